// Matrix product in true fp32 accuracy on bf16 tensor cores: C = alpha * A @ B + beta * D, batched, any strides.
//
// Each fp32 operand is written once as three bf16 planes, x = hi + mid + lo, which is exact: 3 x 8 significant bits. The product keeps
// the six plane products that reach fp32's last bit and drops mid*lo, lo*mid and lo*lo (together below 2^-24 |a||b|, of either sign).
// Tensor cores add with truncation, so every 32 of K a fresh tensor-core accumulator, filled from the smallest products to the
// largest, is added (round to nearest) to the fp32 result. See patterns/matmul.py for what that buys.
#pragma once
#include <cuda_runtime.h>
#include <cstddef>
#include <cstdint>

namespace fusebackend::matmul {

constexpr int kPlanes = 3;

// Strides are in elements; a batch stride of 0 broadcasts. Any of them may be anything a tensor can have.
struct Matrix {
  const float* data;
  int64_t row, col, batch;
  const void* planes = nullptr;      // written by `launch_split` before; else `launch` splits
  bool planes_column_major = false;  // which index `planes` has innermost
};

struct Problem {
  int64_t m, n, k, batch;
  Matrix a;                          // m x k
  Matrix b;                          // k x n
  Matrix d;                          // m x n, read only if beta != 0
  float* c;                          // m x n
  int64_t c_row, c_col, c_batch;
  float alpha, beta;
};

// Whether C can be stored two columns at a time, in 8 bytes.
inline bool stores_pairs(const Problem& p) {
  return p.c_col == 1 && p.n % 2 == 0 && p.c_row % 2 == 0 && p.c_batch % 2 == 0 && reinterpret_cast<uintptr_t>(p.c) % 8 == 0;
}

// The decisions that are not semantics. `plan` makes them; tests and tuning make others.
struct Plan {
  int grid;                          // thread blocks; all of them must fit the GPU at once
  bool swap;                         // compute the transposed product, so that a tile's long side lies along m
  int split_tiles;                   // leading tiles that are split along K ...
  int split_parts, split_share;      // ... each into equal parts, or if parts is 0 all together into shares of this many k blocks
};

Plan plan(const Problem& p, int sm_count);

// Device memory that `launch` needs: the planes, and the partial results of split tiles. Contents need no initialisation.
size_t workspace_bytes(const Problem& p, const Plan& plan, int sm_count);

// Two kernels: split what has no planes yet, then multiply. Needs compute capability 9.0; m, n, batch > 0, k >= 0, each of m, n, k below
// 2^31 - 512, and each operand at most 2^31 pieces of 8 elements (of 2 where it is not contiguous or not aligned to 16 bytes).
cudaError_t launch(const Problem& p, const Plan& plan, void* workspace, int sm_count, cudaStream_t stream);

}  // namespace fusebackend::matmul
