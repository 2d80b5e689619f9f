// Results one by one from device memory: those of rows and taps with an inf or a NaN, which kernels would spread over results that they do
// not belong to, or lose where they skip padding.
//
// The zeros around x are samples like others: with a tap or a gradient that is not finite they make a NaN, as in eager mode, which pads x.
// Gradients have no zeros around them (ConvParams::skips_padding).
#pragma once
#include "causal_conv1d/device_math.cuh"

namespace fusebackend::causal_conv1d {

// start + sum_k w[k] * x[t+k], x being zero outside of [0, len).
template <typename A, typename X, typename T>
__device__ __forceinline__ A sum_of_taps(const X* x, int64_t x_stride, int len, const T* w, int64_t w_stride, int taps, int t, A start,
                                         bool skips_padding) {
  const int first = skips_padding ? max(0, -t) : 0, last = skips_padding ? min(taps, len - t) : taps;
  for (int k = first; k < last; ++k) {
    const bool inside = t + k >= 0 && t + k < len;
    start = fma(A(to_float(w[k * w_stride])), inside ? A(to_float(x[(t + k) * x_stride])) : A(0), start);
  }
  return start;
}
// Not inlined: kernels need their registers, and spill some for each argument.
template <typename A, typename X, typename T>
__device__ __noinline__ A direct_sum(const X* x, int64_t x_stride, int len, const T* w, int64_t w_stride, int taps, int t, A start,
                                     bool skips_padding) {
  return sum_of_taps(x, x_stride, len, w, w_stride, taps, t, start, skips_padding);
}
template <typename T>
__device__ __noinline__ float direct_sum(const T* contiguous_x, int len, const T* w, int64_t w_stride, int taps, int t, float start,
                                         bool skips_padding) {
  return sum_of_taps(contiguous_x, 1, len, w, w_stride, taps, t, start, skips_padding);
}

// dw of a channel, summed over `rows` batch entries from b0 on, by one block.
template <typename T>
__device__ inline void direct_weight_grad(const WeightGradParams& p, int64_t c, int64_t b0, int rows, double* out) {
  for (int64_t k = threadIdx.x; k < p.taps; k += blockDim.x) {
    double sum = 0;
    for (int64_t b = b0; b < b0 + rows; ++b) {
      const T* g = row_of<T>(p.g, p.g_stride, b, c);
      const T* x = row_of<T>(p.x, p.x_stride, b, c);
      for (int64_t t = 0; t < p.out_len; ++t) {
        const int64_t s = t - p.left + k;
        const double sample = s >= 0 && s < p.in_len ? to_float(x[s * p.x_stride.t]) : 0.f;
        sum = fma(double(to_float(g[t * p.g_stride.t])), sample, sum);
      }
    }
    out[k] = sum;
  }
}

}  // namespace fusebackend::causal_conv1d
