// Weight gradients one by one from device memory, for rows with an inf or a NaN, which the kernels for many taps would spread over all taps.
#pragma once
#include "causal_conv1d/device_math.cuh"

namespace fusebackend::causal_conv1d {

// dw of a channel, summed over `rows` batch entries from b0 on, by one block.
template <typename T>
__device__ inline void direct_weight_grad(const WeightGradParams& p, int64_t c, int64_t b0, int rows, double* out) {
  for (int64_t k = threadIdx.x; k < p.taps; k += blockDim.x) {
    double sum = 0;
    for (int64_t b = b0; b < b0 + rows; ++b) {
      const T* g = row_of<T>(p.g, p.g_stride, b, c);
      const T* x = row_of<T>(p.x, p.x_stride, b, c);
      for (int64_t t = max(int64_t{0}, p.left - k); t < min(p.out_len, p.in_len + p.left - k); ++t)
        sum = fma(double(to_float(g[t * p.g_stride.t])), double(to_float(x[(t - p.left + k) * p.x_stride.t])), sum);
    }
    out[k] = sum;
  }
}

}  // namespace fusebackend::causal_conv1d
