// The interface of the fp32 matmul kernels: C = alpha * A @ B + beta * D to fp32 accuracy on bf16 tensor cores, batched, any strides.
//
// Each fp32 operand is written once as three bf16 planes, x = hi + mid + lo, of 8 significant bits each. Of the nine plane products the
// kernels compute the six that reach fp32's last bit. They drop mid * lo, lo * mid and lo * lo, whose sum is below 2^-24 |a| |b| and of
// either sign. Tensor cores add with truncation. So their sum of at most 64 of K (16 without wgmma), taken from the smallest products to
// the largest, is added to an fp32 result with rounding to nearest. The rounding error of that addition is the first term of the tensor
// cores' next sum, so the result is rounded once, whatever K is. patterns/fp32_matmul/README.md has the errors and times.
#pragma once
#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

#include "fp32_matmul/constants.h"

namespace fusebackend::fp32_matmul {

// Strides are in elements; a batch stride of 0 broadcasts. Any strides that a tensor can have are accepted.
struct Matrix {
  const float* data;
  int64_t row, col, batch;
  const void* planes = nullptr;      // as `launch_split` writes them; if null, `launch` makes them
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

// The kernel that suits a GPU: six bf16 products where tensor cores do bf16 at more than six times the rate of fp32 arithmetic, which is 15 times
// on compute capability 9.0, 16 times on 8.0, but only 2 to 4 times on 8.6 and 8.9. `has_wgmma`: the library has that kernel.
inline Kernel default_kernel(int major, int minor, bool has_wgmma) {
  if (major == 9) return has_wgmma ? Kernel::kWgmma : Kernel::kMma;
  return major == 8 && minor == 0 ? Kernel::kMma : Kernel::kFfma;
}

#if __has_include(<cuda_runtime_api.h>)
// Bytes of device memory that `launch` needs, uninitialised: planes, at most `planes_limit` where dividing the product brings them below
// that, and the partial results of tiles that are split along K (13 MB on an H200).
size_t workspace_bytes(const Problem& p, Kernel kernel, size_t planes_limit, int sm_count);

// Splits the operands that come without planes, then multiplies. A product whose planes would exceed the limit is computed in pieces, one after
// the other, and so is one that hardly takes longer that way. Needs m, n, batch > 0, k >= 0, each of m, n, k below 2^31 - 512, and at most 2^31
// chunks of 8 elements an operand (of 2 where it is not contiguous or not aligned to 16 bytes).
cudaError_t launch(const Problem& p, Kernel kernel, void* workspace, size_t planes_limit, int sm_count, cudaStream_t stream);
#endif

}  // namespace fusebackend::fp32_matmul
