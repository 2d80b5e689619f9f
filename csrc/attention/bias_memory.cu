// Copies of biases in which rows can be read in vectors, and the second step of their gradients' sums.
#include "attention/fragments.cuh"
#include "attention/launchers.h"

namespace fusebackend::attention {
namespace {

constexpr int kThreads = 256;

template <typename E>
__global__ __launch_bounds__(kThreads) void attention_align_bias(const __grid_constant__ BiasCopy copy) {
  const int64_t count = copy.size[0] * copy.size[1] * copy.size[2] * copy.size[3] * copy.pitch;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count; i += int64_t(gridDim.x) * kThreads) {
    int64_t rest = i / copy.pitch;
    const int64_t s = i - rest * copy.pitch;
    int64_t from = s * copy.stride[4];
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      from += rest % copy.size[d] * copy.stride[d];
      rest /= copy.size[d];
    }
    static_cast<E*>(copy.to)[i] = s < copy.size[4] ? static_cast<const E*>(copy.from)[from] : E{};
  }
}

// A block adds 32 elements up: each of its 8 warps every eighth of the partial sums, then the warps' results, all in a fixed order.
constexpr int kElements = 32, kWarps = kThreads / kElements;

template <typename T>
__global__ __launch_bounds__(kThreads) void attention_add_partial_sums(const __grid_constant__ PartialSums p) {
  __shared__ float parts[kWarps][kElements];
  const int64_t rows = p.sums_rows ? 1 : p.t, columns = p.sums_columns ? 1 : p.s;
  const int64_t i = blockIdx.x * int64_t(kElements) + threadIdx.x % kElements;
  const int warp = threadIdx.x / kElements;
  const bool exists = i < p.kept * rows * columns;
  if (exists) {
    const int64_t s = i % columns, t = i / columns % rows, kept = i / columns / rows;
    const int64_t summed_rows = p.sums_rows ? p.t : 1, summed_columns = p.sums_columns ? p.s : 1;
    float sum = 0;
    for (int64_t part = warp; part < p.chunks * summed_rows; part += kWarps) {
      const float* from = p.from + ((kept * p.chunks + part / summed_rows) * p.t + t + part % summed_rows) * p.s + s;
      for (int64_t column = 0; column < summed_columns; ++column) sum += from[column];
    }
    parts[warp][threadIdx.x % kElements] = sum;
  }
  __syncthreads();
  if (warp == 0 && exists) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += parts[w][threadIdx.x];
    static_cast<T*>(p.to)[i] = T(sum);
  }
}

}  // namespace

cudaError_t launch_align_bias(const BiasCopy& copy, bool is_fp32, cudaStream_t stream) {
  const int64_t count = copy.size[0] * copy.size[1] * copy.size[2] * copy.size[3] * copy.pitch;
  const unsigned blocks = unsigned(std::min<int64_t>(ceil_div(count, int64_t(kThreads)), 1 << 16));
  if (is_fp32) attention_align_bias<float><<<blocks, kThreads, 0, stream>>>(copy);
  else attention_align_bias<uint16_t><<<blocks, kThreads, 0, stream>>>(copy);
  return cudaGetLastError();
}

cudaError_t launch_add_partial_sums(const PartialSums& p, DType dtype, cudaStream_t stream) {
  const int64_t count = p.kept * (p.sums_rows ? 1 : p.t) * (p.sums_columns ? 1 : p.s), blocks = ceil_div(count, int64_t(kElements));
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (dtype == DType::kFloat32) attention_add_partial_sums<float><<<unsigned(blocks), kThreads, 0, stream>>>(p);
  else if (dtype == DType::kBFloat16) attention_add_partial_sums<__nv_bfloat16><<<unsigned(blocks), kThreads, 0, stream>>>(p);
  else attention_add_partial_sums<__half><<<unsigned(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fusebackend::attention
