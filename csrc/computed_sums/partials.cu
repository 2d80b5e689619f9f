// The second kernel: for each sum of each image, the sums of the columns of as many rows of partial sums as blocks shared its rows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/column_partials.cuh"
#include "common/programmatic_launch.cuh"
#include "computed_sums/launch.h"

namespace fusebackend::computed_sums {
namespace {

__device__ __forceinline__ void store(void* out, int64_t i, double value, int type) {
  if (type == kFloat16) static_cast<__half*>(out)[i] = __float2half_rn(float(value));
  else if (type == kBFloat16) static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(float(value));
  else static_cast<float*>(out)[i] = float(value);
}

// A block has a tile of the columns of one sum of one image.
__global__ void __launch_bounds__(kFinalThreads) computed_sums_partials(const Arguments p, const float* partials, uint32_t tiles, int column_bits) {
  wait_for_previous_kernel();
  const uint32_t tile = blockIdx.x % tiles, which = blockIdx.x / tiles, image = which % p.batch;
  int64_t column;
  double sum;
  if (!add_column_partials(partials + int64_t(which) * p.splits * p.columns, p.splits, p.columns, tile, column_bits, column, sum)) return;
#pragma unroll
  for (int s = 0; s < kMostOuts; ++s)
    if (s == which / p.batch) store(p.out[s], image * p.columns + column, sum * p.scale, p.results[s]);
}

}  // namespace

cudaError_t launch_partials(const Arguments& p, int sums, const float* partials, cudaStream_t stream) {
  const int bits = final_column_bits(p.splits);
  const int64_t tiles = final_tiles(p.columns, bits);
  if (tiles * sums * p.batch > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch_dependent(computed_sums_partials, dim3(uint32_t(tiles * sums * p.batch)), dim3(kFinalThreads), 0, true, stream, p, partials, uint32_t(tiles), bits);
}

}  // namespace fusebackend::computed_sums
