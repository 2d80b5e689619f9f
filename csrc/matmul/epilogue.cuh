// What every matmul kernel does with a finished sum: scale, add D; and how a NaN is looked into.
#pragma once
#include "matmul.h"

namespace fusebackend::matmul {

__device__ __forceinline__ float scale(const Problem& p, int64_t batch, int m, int n, float sum) {
  sum *= p.alpha;
  return p.beta == 0.f ? sum : fmaf(p.beta, __ldg(p.d.data + batch * p.d.batch + m * p.d.row + n * p.d.col), sum);
}

__device__ __forceinline__ int64_t c_offset(const Problem& p, int64_t batch, int m, int n) {
  return batch * p.c_batch + m * p.c_row + n * p.c_col;
}

// A NaN in C is either right or an artefact of the planes: infinity - infinity, or infinity times a plane that is zero. A warp
// recomputes every NaN of its kRows x kColumns part of C as plain fp32 dot products, so that non-finite inputs give what fp32 gives.
template <int kRows, int kColumns>
__device__ __noinline__ void recompute_nans(const Problem& p, int batch, int m0, int n0, int lane) {
  __syncwarp();
  for (int i = lane; i < kRows * kColumns; i += 32) {
    const int my_m = m0 + i / kColumns, my_n = n0 + i % kColumns;
    const bool inside = my_m < p.m && my_n < p.n;
    const float value = inside ? __ldcg(p.c + c_offset(p, batch, my_m, my_n)) : 0.f;
    for (unsigned todo = __ballot_sync(~0u, value != value); todo; todo &= todo - 1) {
      const int m = __shfl_sync(~0u, my_m, __ffs(todo) - 1), n = __shfl_sync(~0u, my_n, __ffs(todo) - 1);
      const float* a = p.a.data + batch * p.a.batch + m * p.a.row;
      const float* b = p.b.data + batch * p.b.batch + n * p.b.col;
      float sum = 0.f;
      for (int64_t k = lane; k < p.k; k += 32) sum = fmaf(a[k * p.a.col], b[k * p.b.row], sum);
      for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane == 0) p.c[c_offset(p, batch, m, n)] = scale(p, batch, m, n, sum);
    }
  }
}

}  // namespace fusebackend::matmul
