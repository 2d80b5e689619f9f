// Variances and means over the rows of matrices whose columns lie side by side, laid out among threads as sums of them are (column_sum.h).
#pragma once

#include "column_sum/column_sum.h"

namespace fusebackend::column_moments {

// `rows.out` and `rows.mean` have no meaning here. The results are contiguous, of `rows.result`. The sum of squared distances is divided by
// the number of rows less `correction`, or by 0 where that is negative. `scale` is 1 / sqrt(variance + epsilon).
struct Problem {
  column_sum::Problem rows;
  void* variance;
  void* mean;
  void* scale;
  double correction, epsilon;
};

#if __has_include(<cuda_runtime_api.h>)
// `partials` has room for twice as many numbers as the plan says.
cudaError_t launch(const Problem& p, const column_sum::Plan& plan, void* partials, cudaStream_t stream);
#endif

// On a CPU threads take columns [begin, end) of batch * columns.
void moments_cpu(const Problem& p, int64_t begin, int64_t end);

}  // namespace fusebackend::column_moments
