// The epilogue of every fp32 matmul kernel: C = alpha * sum + beta * D, and the recomputation of NaNs.
#pragma once
#include "fp32_matmul/fp32_matmul.h"

namespace fusebackend::fp32_matmul {

__device__ __forceinline__ float addend(const Problem& p, int64_t batch, int m, int n) {
  return __ldg(p.d.data + batch * p.d.batch + m * p.d.row + n * p.d.col);
}

__device__ __forceinline__ float scale(const Problem& p, int64_t batch, int m, int n, float sum) {
  sum *= p.alpha;
  return p.beta == 0.f ? sum : fmaf(p.beta, addend(p, batch, m, n), sum);
}

__device__ __forceinline__ int64_t c_offset(const Problem& p, int64_t batch, int m, int n) {
  return batch * p.c_batch + m * p.c_row + n * p.c_col;
}

// A NaN in C is either right or an artefact of the planes: infinity - infinity, or infinity times a plane that is zero. A warp
// recomputes the NaNs of its kRows x kColumns part of C as plain fp32 dot products, 32 columns of a row at a time, so that non-finite
// inputs give what fp32 gives. A dot product ends as soon as its sum is NaN, which it then stays: operands full of NaNs, as in training
// that has diverged, cost a few terms each.
template <int kRows, int kColumns>
__device__ __noinline__ void recompute_nans(const Problem& p, int batch, int m0, int n0, int lane) {
  constexpr int kTerms = 16;
  static_assert(kColumns % 32 == 0);
  __syncwarp();
  for (int i = 0; i < kRows * kColumns / 32; ++i) {
    const int m = m0 + i / (kColumns / 32), n = n0 + i % (kColumns / 32) * 32 + lane;
    float* const c = p.c + c_offset(p, batch, m, n);
    bool open = m < p.m && n < p.n;
    if (open) {
      const float value = __ldcg(c), d = p.beta == 0.f ? 0.f : addend(p, batch, m, n);
      open = value != value && d == d;
    }
    if (!__any_sync(~0u, open)) continue;
    const float* const a = p.a.data + batch * p.a.batch + min(int64_t(m), p.m - 1) * p.a.row;
    const float* const b = p.b.data + batch * p.b.batch + min(int64_t(n), p.n - 1) * p.b.col;
    float sum = 0.f;
    const auto unsettled = [&] { return __any_sync(~0u, open && sum == sum); };
    int64_t k = 0;
    for (; k + kTerms <= p.k && unsettled(); k += kTerms) {
      float x[kTerms], y[kTerms];
#pragma unroll
      for (int j = 0; j < kTerms; ++j) x[j] = __ldg(a + (k + j) * p.a.col), y[j] = __ldg(b + (k + j) * p.b.row);
#pragma unroll
      for (int j = 0; j < kTerms; ++j) sum = fmaf(x[j], y[j], sum);
    }
    if (unsettled())
      for (; k < p.k; ++k) sum = fmaf(a[k * p.a.col], b[k * p.b.row], sum);
    if (open) *c = scale(p, batch, m, n, sum);
  }
}

}  // namespace fusebackend::fp32_matmul
