// The second stage of weight gradients: adds up the blocks' partial sums in a fixed order, so that results do not vary from run to run.
#include <algorithm>
#include <type_traits>

#include "causal_conv1d/launchers.h"
#include "causal_conv1d/device_math.cuh"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

// Tap k's products with the zeros around x: 0, or NaN where a gradient is not finite.
template <typename G>
__device__ __noinline__ double products_with_padding(const WeightGradParams& p, int64_t c, int64_t k) {
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t t = 0; t < p.out_len; ++t) {
      const int64_t s = t - p.left + k;
      if (s < 0 || s >= p.in_len) sum = fma(double(to_float(row_of<G>(p.g, p.g_stride, b, c)[t * p.g_stride.t])), 0., sum);
    }
  }
  return sum;
}

// Where partial sums lack such products.
template <typename G, typename T>
__global__ void reduce_partials_and_padding(const __grid_constant__ WeightGradParams p) {
  const int64_t n = p.channels * (p.taps + 1);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t c = i / (p.taps + 1), k = i - c * (p.taps + 1);
    double sum = 0, db = 0;
    for (int s = 0; s < p.splits; ++s) {
      sum += p.partial[s * n + i];
      db += p.partial[s * n + (c + 1) * (p.taps + 1) - 1];
    }
    if (k < p.taps) {
      if (!isfinite(db)) sum += products_with_padding<G>(p, c, k);
      if (p.dw) static_cast<T*>(p.dw)[c * p.taps + k] = from_float<T>(static_cast<float>(sum));
    } else if (p.db) {
      static_cast<T*>(p.db)[c] = from_float<T>(static_cast<float>(sum));
    }
  }
}

template <typename T>
__global__ void reduce_partials(const double* partial, int splits, int64_t channels, int64_t taps, T* dw, T* db) {
  const int64_t n = channels * (taps + 1);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    double sum = 0;
    for (int s = 0; s < splits; ++s) sum += partial[s * n + i];
    const int64_t c = i / (taps + 1), k = i - c * (taps + 1);
    if (k < taps) {
      if (dw) dw[c * taps + k] = from_float<T>(static_cast<float>(sum));
    } else if (db) {
      db[c] = from_float<T>(static_cast<float>(sum));
    }
  }
}

template <typename Params>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  if (!p.dw && !p.db) return cudaSuccess;
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kThreads = 128;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(p.channels * (p.taps + 1), kThreads), 65536));
    if constexpr (std::is_same_v<Params, WeightGradParams>) {
      if (p.skips_padding) {
        p.g_dtype == p.dtype ? reduce_partials_and_padding<T, T><<<blocks, kThreads, 0, stream>>>(p)
                             : reduce_partials_and_padding<Sum<T>, T><<<blocks, kThreads, 0, stream>>>(p);
        return cudaGetLastError();
      }
    }
    reduce_partials<T><<<blocks, kThreads, 0, stream>>>(p.partial, p.splits, p.channels, p.taps, static_cast<T*>(p.dw), static_cast<T*>(p.db));
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_reduce_partials(const WeightGradParams& p, cudaStream_t stream) { return launch(p, stream); }
cudaError_t launch_reduce_partials(const BackwardParams& p, cudaStream_t stream) { return launch(p, stream); }

}  // namespace fusebackend::causal_conv1d
