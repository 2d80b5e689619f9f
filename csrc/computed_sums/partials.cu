// The second kernel: for each sum of each image, the sums of the columns of as many rows of partial sums as blocks shared its rows, in fp64. These
// are few additions, of the largest numbers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/integer_math.h"
#include "common/programmatic_launch.cuh"
#include "computed_sums/launch.h"

namespace fusebackend::computed_sums {
namespace {

constexpr int kThreads = 512;

__device__ __forceinline__ void store(void* out, int64_t i, double value, int type) {
  if (type == kFloat16) static_cast<__half*>(out)[i] = __float2half_rn(float(value));
  else if (type == kBFloat16) static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(float(value));
  else static_cast<float*>(out)[i] = float(value);
}

// A block has 2^column_bits columns of one sum of one image, and a thread every n-th term of one, where n such threads share a column.
__global__ void __launch_bounds__(kThreads) computed_sums_partials(const Arguments p, const float* partials, uint32_t tiles, int column_bits) {
  constexpr int kAtOnce = 8;
  __shared__ double sums[kThreads];
  wait_for_previous_kernel();
  const uint32_t tile = blockIdx.x % tiles, which = blockIdx.x / tiles, image = which % p.batch;
  const int block_columns = 1 << column_bits, lanes = kThreads >> column_bits;
  const int lane = threadIdx.x >> column_bits, own = threadIdx.x & (block_columns - 1);
  const int64_t column = int64_t(tile) * block_columns + own;
  double sum = 0;
  if (column < p.columns) {
    const float* const from = partials + int64_t(which) * p.splits * p.columns + column;
    for (int64_t i = lane; i < p.splits; i += kAtOnce * lanes) {
      float x[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) x[u] = i + u * lanes < p.splits ? from[(i + u * lanes) * p.columns] : 0.0f;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) sum += double(x[u]);
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) sums[threadIdx.x] = sum += sums[threadIdx.x + half * block_columns];
  }
  if (lane != 0 || column >= p.columns) return;
#pragma unroll
  for (int s = 0; s < kMostOuts; ++s)
    if (s == which / p.batch) store(p.out[s], image * p.columns + column, sum * p.scale, p.results[s]);
}

}  // namespace

cudaError_t launch_partials(const Arguments& p, int sums, const float* partials, cudaStream_t stream) {
  int bits = 3;  // at least the columns of a sector of 32 bytes; as many threads share a column as it has terms
  while ((kThreads >> bits) / 2 >= p.splits) ++bits;
  const int64_t tiles = ceil_div(p.columns, int64_t(1) << bits);
  if (tiles * sums * p.batch > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch_dependent(computed_sums_partials, dim3(uint32_t(tiles * sums * p.batch)), dim3(kThreads), 0, true, stream, p, partials, uint32_t(tiles), bits);
}

}  // namespace fusebackend::computed_sums
