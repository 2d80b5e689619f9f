// Matrix product in true fp32 accuracy on bf16 tensor cores: C = alpha * A @ B + beta * D, batched, any strides.
//
// Each fp32 operand is written once as three bf16 planes, x = hi + mid + lo, 3 x 8 significant bits. The product keeps the six plane
// products that reach fp32's last bit and drops mid*lo, lo*mid and lo*lo (together below 2^-24 |a||b|, of either sign).
// Tensor cores add with truncation, so every 64 of K (16 without Hopper's instructions) their sum, taken from the smallest products
// to the largest, is added (round to nearest) to the fp32 result; what that addition loses is where their next sum begins, so the result is
// rounded once however deep the product. See patterns/matmul.py for what that buys.
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

enum class Kernel {
  kWgmma,                            // compute capability 9.0
  kMma,                              // 8.0 and later
  kFfma,                             // any: plain fp32 arithmetic, no planes
};

// Device memory that `launch` needs: planes, never more than kPlanesLimit for what halving brings below that, and partial results of
// split tiles, 13 MB on an H200. Contents need no initialisation.
constexpr size_t kPlanesLimit = size_t(1) << 30;
size_t workspace_bytes(const Problem& p, Kernel kernel, int sm_count);

// Splits what has no planes yet, then multiplies; a product whose planes would exceed kPlanesLimit in halves, one after the other.
// m, n, batch > 0, k >= 0, each of m, n, k below 2^31 - 512, and each operand at most 2^31 pieces of 8 elements (of 2 where it is not
// contiguous or not aligned to 16 bytes).
cudaError_t launch(const Problem& p, Kernel kernel, void* workspace, int sm_count, cudaStream_t stream);

}  // namespace fusebackend::matmul
