#include "conv1d_cuda.h"
#include "device.cuh"

namespace fusebackend::conv1d {
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

}  // namespace

cudaError_t launch_reduce_partials(const double* partial, int splits, int64_t channels, int64_t taps, void* dw, void* db,
                                   Dtype dtype, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t blocks = (channels * (taps + 1) + 127) / 128;
    reduce_partials<T><<<static_cast<unsigned>(blocks < 65536 ? blocks : 65536), 128, 0, stream>>>(
        partial, splits, channels, taps, static_cast<T*>(dw), static_cast<T*>(db));
    return cudaGetLastError();
  });
}

}  // namespace fusebackend::conv1d
