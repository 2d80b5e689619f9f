// The second stage of weight gradients: adds up the blocks' partial sums in a fixed order, so that results do not vary from run to run.
//
// The kernels with tiles multiply zeros, of the padding and around it, by whatever is there, which gives NaN where that is not finite.
// A tap whose sum is not finite is therefore summed again, of the products that there are.
#include "depthwise_conv/device_math.cuh"
#include "depthwise_conv/launchers.h"

namespace fusebackend::depthwise_conv {
namespace {

constexpr int kThreads = 256;

// The sum over the block of each thread's part of one tap of channel o, for all threads.
template <typename T>
__device__ float sum_tap(const WeightGradParams& p, int64_t o, int tap, float* sums) {
  const Geometry& g = p.g;
  const int a = tap / int(g.taps.w), b = tap - a * int(g.taps.w), out_w = int(g.out.w), out_h = int(g.out.h);
  const T* grad = static_cast<const T*>(p.grad) + o * p.grad_stride.c;
  const T* x = static_cast<const T*>(p.x) + o / g.multiplier * p.x_stride.c;
  float sum = 0;
  const int64_t count = g.batch * g.out.h * g.out.w;
  for (int64_t index = threadIdx.x; index < count; index += kThreads) {
    const int64_t line = index / out_w, n = line / out_h;
    const int j = int(index - line * out_w), i = int(line - n * out_h);
    const int64_t row = i * g.stride.h - g.pad.h + a * g.dilation.h, column = j * g.stride.w - g.pad.w + b * g.dilation.w;
    if (row < 0 || row >= g.in.h || column < 0 || column >= g.in.w) continue;
    const float gradient = to_float(grad[n * p.grad_stride.n + i * p.grad_stride.h + j * p.grad_stride.w]);
    sum = fmaf(gradient, to_float(x[n * p.x_stride.n + row * p.x_stride.h + column * p.x_stride.w]), sum);
  }
  __syncthreads();
  sums[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < kThreads; ++i) sum += sums[i];
  return sum;
}

// A block has one channel. Its threads lie along the taps, and share the splits where there are fewer taps than threads.
template <typename T>
__global__ void __launch_bounds__(kThreads) depthwise_reduce(const __grid_constant__ WeightGradParams p) {
  const int taps = int(p.g.tap_count()), all = taps + 1;
  const int64_t o = blockIdx.x, pitch = p.g.outputs() * all;
  __shared__ float sums[kThreads];
  __shared__ double parts[kThreads];
  __shared__ int not_finite;
  if (threadIdx.x == 0) not_finite = 0;
  T *dw = static_cast<T*>(p.dw), *db = static_cast<T*>(p.db);
  const int width = min(all, kThreads), slices = kThreads / width, slice = int(threadIdx.x) / width;
  for (int first = 0; first < all; first += width) {
    const int tap = first + int(threadIdx.x) % width;
    double sum = 0;
    if (slice < slices && tap < all) {
#pragma unroll 8
      for (int s = slice; s < p.splits; s += slices) sum += p.partial[s * pitch + o * all + tap];
    }
    __syncthreads();
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (slice > 0 || tap >= all) continue;
    for (int i = 1; i < slices; ++i) sum += parts[i * width + threadIdx.x];
    if (tap < taps && dw) {
      dw[o * taps + tap] = from_float<T>(float(sum));
      if (!isfinite(float(sum))) not_finite = 1;
    } else if (tap == taps && db) {
      db[o] = from_float<T>(float(sum));
    }
  }
  if (!dw) return;
  __syncthreads();
  if (!not_finite) return;
  for (int tap = 0; tap < taps; ++tap) {
    const float was = to_float(dw[o * taps + tap]);
    if (isfinite(was)) continue;
    const float sum = sum_tap<T>(p, o, tap, sums);
    if (threadIdx.x == 0) dw[o * taps + tap] = from_float<T>(sum);
  }
}

}  // namespace

cudaError_t launch_reduce(const WeightGradParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    depthwise_reduce<decltype(type)><<<unsigned(p.g.outputs()), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace fusebackend::depthwise_conv
