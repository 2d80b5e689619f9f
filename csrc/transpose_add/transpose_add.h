// transpose_add: x + alpha * y of operands in any memory orders. Knows nothing of torch.
#pragma once

#include "common/dtype.h"
#include "common/tile/cpu_blocking.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::transpose_add {

// Floating types read `real` (fp16 and bf16 compute in fp32 and round once), integers `integer` (they wrap modulo 2^n).
struct Alpha {
  double real = 1.0;
  int64_t integer = 1;
};

// Adds blocks [begin, end).
void add_cpu(const tile::Plan& plan, const tile::Blocking& blocking, DType type, Alpha alpha, int64_t begin, int64_t end);

#if __has_include(<cuda_runtime_api.h>)
// On `stream` of the current device; captured into a CUDA graph if the stream is.
cudaError_t launch_add(const tile::Problem& problem, DType type, Alpha alpha, cudaStream_t stream);
#endif

}  // namespace fusebackend::transpose_add
