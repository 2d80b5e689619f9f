// Weight gradients of rows with an inf or a NaN, which would spread over all taps in the kernels of many taps.
#pragma once
#include "device.cuh"

namespace fusebackend::conv1d {

// dw of a channel, summed over some batch entries, by one block: from device memory.
template <typename T>
__device__ inline void weight_grad_one_by_one(const WeightGradParams& p, int64_t c, int64_t b0, int rows, double* out) {
  for (int64_t k = threadIdx.x; k < p.taps; k += blockDim.x) {
    double sum = 0;
    for (int64_t b = b0; b < b0 + rows; ++b) {
      const T* g = static_cast<const T*>(p.g) + b * p.gs.b + c * p.gs.c;
      const T* x = static_cast<const T*>(p.x) + b * p.xs.b + c * p.xs.c;
      for (int64_t t = max(int64_t{0}, p.left - k); t < min(p.out_len, p.in_len + p.left - k); ++t)
        sum = fma(double(to_float(g[t * p.gs.t])), double(to_float(x[(t - p.left + k) * p.xs.t])), sum);
    }
    out[k] = sum;
  }
}

}  // namespace fusebackend::conv1d
