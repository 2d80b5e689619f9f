// Any depthwise convolution, by loops over its taps. A thread computes kColumns neighbouring results of a row, of one channel; the lanes of
// a warp lie along channels where these are innermost in memory, else along columns.
#include <algorithm>

#include "common/cuda_common.cuh"
#include "common/device_properties.h"
#include "common/integer_math.h"
#include "common/channel_epilogue.cuh"
#include "depthwise_conv/device_math.cuh"
#include "depthwise_conv/launchers.h"

namespace fusebackend::depthwise_conv {
namespace {

constexpr int kThreads = 256, kColumns = 4;

// Where a thread's results are: `inner` counts channels (or groups of columns), `outer` what is left, rows fastest.
struct Place {
  int64_t n;
  int channel, row, column;
};

__device__ __forceinline__ bool find_place(int64_t index, int channels, int rows, int columns, bool channels_inner, int64_t batch, Place& at) {
  const int groups = (columns + kColumns - 1) / kColumns;
  const int inner = channels_inner ? channels : groups, middle = channels_inner ? groups : rows, outer = channels_inner ? rows : channels;
  const int64_t rest = index / inner, rest2 = rest / middle;
  const int a = int(index - rest * inner), b = int(rest - rest2 * middle);
  at.n = rest2 / outer;
  const int c = int(rest2 - at.n * outer);
  at.channel = channels_inner ? a : c;
  at.row = channels_inner ? c : b;
  at.column = (channels_inner ? b : a) * kColumns;
  return at.n < batch;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) depthwise_direct_forward(const __grid_constant__ ForwardParams p, bool channels_inner) {
  const Geometry& g = p.g;
  const int out_w = int(g.out.w);
  Place at;
  if (!find_place(blockIdx.x * int64_t{kThreads} + threadIdx.x, int(g.outputs()), int(g.out.h), out_w, channels_inner, g.batch, at)) return;
  const T* x = static_cast<const T*>(p.x) + at.n * p.x_stride.n + at.channel / int(g.multiplier) * p.x_stride.c;
  const T* w = static_cast<const T*>(p.w) + at.channel * p.w_stride.n;
  float sums[kColumns];
  const float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[at.channel * p.bias_stride]) : 0.f;
  for (float& s : sums) s = bias;
  const int step = int(g.stride.w), in_w = int(g.in.w);
  for (int a = 0; a < int(g.taps.h); ++a) {
    const int64_t row = at.row * g.stride.h - g.pad.h + a * g.dilation.h;
    if (row < 0 || row >= g.in.h) continue;
    for (int b = 0; b < int(g.taps.w); ++b) {
      const float tap = to_float(w[a * p.w_stride.h + b * p.w_stride.w]);
      const int64_t first = int64_t(at.column) * step - g.pad.w + b * g.dilation.w;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int64_t column = first + int64_t(i) * step;
        if (column >= 0 && column < in_w) sums[i] = fmaf(tap, to_float(x[row * p.x_stride.h + column * p.x_stride.w]), sums[i]);
      }
    }
  }
  finish<T>(sums, p.epilogue, affine_of<T>(p.epilogue, at.channel));
  T* y = static_cast<T*>(p.y) + at.n * p.y_stride.n + at.channel * p.y_stride.c + at.row * p.y_stride.h;
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (at.column + i < out_w) y[(at.column + i) * p.y_stride.w] = from_float<T>(sums[i]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) depthwise_direct_input_grad(const __grid_constant__ InputGradParams p, bool channels_inner) {
  const Geometry& g = p.g;
  const int in_w = int(g.in.w), multiplier = int(g.multiplier);
  Place at;
  if (!find_place(blockIdx.x * int64_t{kThreads} + threadIdx.x, int(g.channels), int(g.in.h), in_w, channels_inner, g.batch, at)) return;
  float sums[kColumns] = {};
  const int stride_h = int(g.stride.h), stride_w = int(g.stride.w);
  for (int m = 0; m < multiplier; ++m) {
    const int o = at.channel * multiplier + m;
    const T* grad = static_cast<const T*>(p.grad) + at.n * p.grad_stride.n + o * p.grad_stride.c;
    const T* w = static_cast<const T*>(p.w) + o * p.w_stride.n;
    for (int a = 0; a < int(g.taps.h); ++a) {
      const int64_t up = at.row + g.pad.h - a * g.dilation.h;
      if (up < 0 || int(up) % stride_h) continue;
      const int row = int(up) / stride_h;
      if (row >= g.out.h) continue;
      for (int b = 0; b < int(g.taps.w); ++b) {
        const float tap = to_float(w[a * p.w_stride.h + b * p.w_stride.w]);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const int64_t over = at.column + i + g.pad.w - b * g.dilation.w;
          if (over < 0 || int(over) % stride_w) continue;
          const int column = int(over) / stride_w;
          if (column < g.out.w) sums[i] = fmaf(tap, to_float(grad[row * p.grad_stride.h + column * p.grad_stride.w]), sums[i]);
        }
      }
    }
  }
  T* dx = static_cast<T*>(p.dx) + at.n * p.dx_stride.n + at.channel * p.dx_stride.c + at.row * p.dx_stride.h;
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (at.column + i < in_w) dx[(at.column + i) * p.dx_stride.w] = from_float<T>(sums[i]);
}

// A block sums one tap (or the bias's gradient, the last) of one channel over a part of the rows of all images, in a fixed order.
template <typename T>
__global__ void __launch_bounds__(kThreads) depthwise_direct_weight_grad(const __grid_constant__ WeightGradParams p) {
  const Geometry& g = p.g;
  const int taps = int(g.tap_count()), all = taps + 1;
  const int64_t o = blockIdx.x / all;
  const int tap = int(blockIdx.x - o * all), a = tap / int(g.taps.w), b = tap - a * int(g.taps.w);
  float sum = 0;
  if (tap < taps ? p.dw != nullptr : p.db != nullptr) {
    const T* grad = static_cast<const T*>(p.grad) + o * p.grad_stride.c;
    const T* x = static_cast<const T*>(p.x) + o / g.multiplier * p.x_stride.c;
    const int64_t rows = g.batch * g.out.h, first = rows * blockIdx.y / gridDim.y, last = rows * (blockIdx.y + 1) / gridDim.y;
    const int out_w = int(g.out.w);
    const int64_t count = (last - first) * out_w;
    for (int64_t index = threadIdx.x; index < count; index += kThreads) {
      const int64_t line = first + index / out_w, n = line / g.out.h;
      const int j = int(index % out_w), i = int(line - n * g.out.h);
      const float gradient = to_float(grad[n * p.grad_stride.n + i * p.grad_stride.h + j * p.grad_stride.w]);
      if (tap == taps) {
        sum += gradient;
        continue;
      }
      const int64_t row = i * g.stride.h - g.pad.h + a * g.dilation.h, column = j * g.stride.w - g.pad.w + b * g.dilation.w;
      if (row < 0 || row >= g.in.h || column < 0 || column >= g.in.w) continue;
      sum = fmaf(gradient, to_float(x[n * p.x_stride.n + row * p.x_stride.h + column * p.x_stride.w]), sum);
    }
  }
  __shared__ float sums[kThreads / 32];
  for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kThreads / 32; ++i) sum += sums[i];
    p.partial[(blockIdx.y * g.outputs() + o) * all + tap] = sum;
  }
}

bool channels_inner(const Strides& s, int64_t channels) { return s.c == 1 && s.w != 1 && channels > 1; }

template <typename Launch>
cudaError_t launch(int64_t batch, int64_t channels, Pair sides, Launch&& kernel) {
  const int64_t blocks = ceil_div(batch * channels * sides.h * ceil_div(sides.w, kColumns), kThreads);
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel(unsigned(blocks));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_direct_forward(const ForwardParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    return launch(p.g.batch, p.g.outputs(), p.g.out, [&](unsigned blocks) {
      depthwise_direct_forward<decltype(type)><<<blocks, kThreads, 0, stream>>>(p, channels_inner(p.y_stride, p.g.outputs()));
    });
  });
}

cudaError_t launch_direct_input_grad(const InputGradParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    return launch(p.g.batch, p.g.channels, p.g.in, [&](unsigned blocks) {
      depthwise_direct_input_grad<decltype(type)><<<blocks, kThreads, 0, stream>>>(p, channels_inner(p.dx_stride, p.g.channels));
    });
  });
}

int direct_weight_grad_splits(const WeightGradParams& p) {
  const int64_t rows = p.g.batch * p.g.out.h, blocks = p.g.outputs() * (p.g.tap_count() + 1);
  const int64_t wanted = ceil_div(int64_t{sm_count()} * 16, blocks), most = ceil_div(rows * p.g.out.w, int64_t{kThreads} * 16);
  return int(std::clamp<int64_t>(std::min(wanted, most), 1, 1024));
}

cudaError_t launch_direct_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  const int64_t blocks = p.g.outputs() * (p.g.tap_count() + 1);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return dispatch_dtype(p.dtype, [&](auto type) {
    depthwise_direct_weight_grad<decltype(type)><<<dim3(unsigned(blocks), p.splits), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace fusebackend::depthwise_conv
