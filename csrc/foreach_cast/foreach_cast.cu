// A thread block casts a chunk of one stretch, whose number it finds among the first chunks of all stretches. A thread casts four elements at
// once, where both ends are aligned for it: 16 bytes of the wider dtype, so that a warp reads and writes whole lines. Of a whole chunk it loads all
// that it casts before it stores any.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/cuda_common.cuh"
#include "foreach_cast/foreach_cast.h"

namespace fusebackend::foreach_cast {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;
constexpr int kSteps = 4;
constexpr int kChunk = kThreads * kAtOnce * kSteps;

struct Arguments {
  const void* from[kMostTensors];
  void* to[kMostTensors];
  int64_t elements[kMostTensors];
  uint32_t first_chunk[kMostTensors + 1];
};
static_assert(sizeof(Arguments) <= 4096, "parameters of a kernel");

__device__ __forceinline__ void cast(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void cast(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void cast(__nv_bfloat16 x, float& y) { y = __bfloat162float(x); }
__device__ __forceinline__ void cast(__half x, float& y) { y = __half2float(x); }

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) foreach_cast_chunks(const __grid_constant__ Arguments p, int count) {
  int stretch = 0;
  for (int last = count; last - stretch > 1;) {  // the last whose first chunk is not behind this one
    const int middle = (stretch + last) / 2;
    (p.first_chunk[middle] <= blockIdx.x ? stretch : last) = middle;
  }
  const int64_t begin = int64_t(blockIdx.x - p.first_chunk[stretch]) * kChunk;
  const int elements = int(min(int64_t(kChunk), p.elements[stretch] - begin));
  const From* from = static_cast<const From*>(p.from[stretch]) + begin;
  To* to = static_cast<To*>(p.to[stretch]) + begin;
  using In = Vec<From, kAtOnce>;
  using Out = Vec<To, kAtOnce>;
  const bool aligned = reinterpret_cast<uintptr_t>(from) % sizeof(In) == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(Out) == 0;
  const auto stored = [&](int i, const In& in) {
    Out out;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) cast(in.v[k], out.v[k]);
    reinterpret_cast<Out*>(to)[i] = out;
  };
  if (aligned && elements == kChunk) {
    In in[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) in[step] = reinterpret_cast<const In*>(from)[step * kThreads + int(threadIdx.x)];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) stored(step * kThreads + int(threadIdx.x), in[step]);
    return;
  }
  const int vectors = aligned ? elements / kAtOnce : 0;
  for (int i = int(threadIdx.x); i < vectors; i += kThreads) stored(i, reinterpret_cast<const In*>(from)[i]);
  for (int i = vectors * kAtOnce + int(threadIdx.x); i < elements; i += kThreads) cast(from[i], to[i]);
}

template <typename From, typename To>
cudaError_t launch_cast(const Arguments& p, int count, cudaStream_t stream) {
  foreach_cast_chunks<From, To><<<p.first_chunk[count], kThreads, 0, stream>>>(p, count);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch(const Stretches& stretches, DType from, DType to, cudaStream_t stream) {
  Arguments p;
  int64_t chunks = 0;
  for (int i = 0; i < stretches.count; ++i) {
    p.from[i] = stretches.from[i], p.to[i] = stretches.to[i], p.elements[i] = stretches.elements[i];
    p.first_chunk[i] = uint32_t(chunks);
    chunks += ceil_div(stretches.elements[i], int64_t(kChunk));
  }
  if (chunks > INT32_MAX) return cudaErrorInvalidValue;  // of a grid
  p.first_chunk[stretches.count] = uint32_t(chunks);
  if (from == DType::kFloat32)
    return to == DType::kBFloat16 ? launch_cast<float, __nv_bfloat16>(p, stretches.count, stream) : launch_cast<float, __half>(p, stretches.count, stream);
  return from == DType::kBFloat16 ? launch_cast<__nv_bfloat16, float>(p, stretches.count, stream) : launch_cast<__half, float>(p, stretches.count, stream);
}

}  // namespace fusebackend::foreach_cast
