// The second stage of weight gradients: adds up the blocks' partial sums in a fixed order, so that results do not vary from run to run.
#include <algorithm>

#include "causal_conv1d/launchers.h"
#include "causal_conv1d/device_math.cuh"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

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
    reduce_partials<T><<<blocks, kThreads, 0, stream>>>(p.partial, p.splits, p.channels, p.taps, static_cast<T*>(p.dw), static_cast<T*>(p.db));
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_reduce_partials(const WeightGradParams& p, cudaStream_t stream) { return launch(p, stream); }
cudaError_t launch_reduce_partials(const BackwardParams& p, cudaStream_t stream) { return launch(p, stream); }

}  // namespace fusebackend::causal_conv1d
