// Products of many small matrices: out[i] = a[i] @ b[i], with at most kMostSize rows, columns and terms.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::small_bmm {

constexpr int kMostSize = 32;

// Matrices lie one behind the other without a gap: `a` by rows (m, k) or, transposed, by columns, and b likewise; the result by rows. Sums
// are made in fp32.
struct Problem {
  const void *a, *b;
  void* out;
  int64_t batch;
  int m, n, k;
  bool a_transposed, b_transposed;
  DType dtype;
  bool is_small = true;  // otherwise a library multiplies them: where sizes are symbolic, what was small once may grow
};

// How rows, as they lie in memory, stand in shared memory: `pitch` elements apart, with vector i of row r at i ^ (r >> shift & swizzle).
struct Placement {
  int pitch, swizzle, shift;
};

// How a GPU computes them: a block takes `products` of them to shared memory, where a group of threads computes each, two or four rows and
// one or four columns a thread.
struct Plan {
  bool vectors;           // of four elements: all sizes are multiples of four, and the matrices begin at multiples of such vectors
  int row_tile;           // rows of a thread
  int threads_a_product;
  int products;           // of a block
  Placement a, b;
  int shared_bytes;
  int64_t blocks;
};

constexpr int kThreads = 128;
Plan make_plan(const Problem& p);

#if __has_include(<cuda_runtime_api.h>)
cudaError_t launch(const Problem& p, const Plan& plan, cudaStream_t stream);
#endif

// The products begin to end - 1.
void multiply_cpu(const Problem& p, int64_t begin, int64_t end);

}  // namespace fusebackend::small_bmm
