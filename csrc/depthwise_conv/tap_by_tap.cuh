// A sum over taps without padding: what the kernels of rolling windows and bands fall back on where something is not finite.
#pragma once
#include "common/channel_epilogue.cuh"
#include "depthwise_conv/device_math.cuh"

namespace fusebackend::depthwise_conv {

// `sum`, and what a channel's taps add to the result at this row and column. Those that fall outside the plane of x are left out. The stride is
// apart from the geometry, since kernels for a stride of 1 know it.
template <typename T>
__device__ __forceinline__ float add_tap_by_tap(float sum, const ForwardParams& p, const T* x, const T* w, int row, int column, const Pair& stride) {
  const Geometry& g = p.g;
  for (int a = 0; a < int(g.taps.h); ++a) {
    const int i = row * int(stride.h) - int(g.pad.h) + a;
    if (i < 0 || i >= int(g.in.h)) continue;
    for (int b = 0; b < int(g.taps.w); ++b) {
      const int j = column * int(stride.w) - int(g.pad.w) + b;
      if (j >= 0 && j < int(g.in.w)) sum = fmaf(to_float(w[a * p.w_stride.h + b * p.w_stride.w]), to_float(x[i * p.x_stride.h + j * p.x_stride.w]), sum);
    }
  }
  return sum;
}

// Computes a column pair of results anew, tap by tap: those that are not finite, or all where an epilogue may have made others of these. They are at `y`,
// rows `pitch` elements apart.
template <typename T, int kStride = 1>
__device__ __noinline__ void mend_column(const ForwardParams& p, int64_t image, int channel, int first_row, int rows, int first_column, T* y, int64_t pitch) {
  const Geometry& g = p.g;
  const T* const x = static_cast<const T*>(p.x) + image * p.x_stride.n + channel / int(g.multiplier) * p.x_stride.c;
  const T* const w = static_cast<const T*>(p.w) + channel * p.w_stride.n;
  for (int row = first_row; row < first_row + rows; ++row, y += pitch) {
    for (int column = first_column; column < min(first_column + 2, int(g.out.w)); ++column) {
      if (!p.epilogue.any && isfinite(to_float(y[column - first_column]))) continue;
      const float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[channel * p.bias_stride]) : 0.f;
      y[column - first_column] = from_float<T>(finished<T>(add_tap_by_tap(bias, p, x, w, row, column, {kStride, kStride}), p.epilogue, channel));
    }
  }
}

// The same of results in channels-last order.
// kFinishes: with an epilogue.
template <typename T, bool kFinishes>
__device__ __noinline__ void mend_pixels(const ForwardParams& p, int image, int first_row, int rows, int channel, int first_column) {
  const Geometry& g = p.g;
  const T* const x = static_cast<const T*>(p.x) + image * p.x_stride.n + channel * p.x_stride.c;
  const T* const w = static_cast<const T*>(p.w) + channel * p.w_stride.n;
  T* const y = static_cast<T*>(p.y) + image * p.y_stride.n + channel * p.y_stride.c;
  for (int row = first_row; row < first_row + rows; ++row) {
    for (int column = first_column; column < min(first_column + 2, int(g.out.w)); ++column) {
      T& result = y[row * p.y_stride.h + column * p.y_stride.w];
      if (!kFinishes && isfinite(to_float(result))) continue;
      const float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[channel * p.bias_stride]) : 0.f;
      const float sum = add_tap_by_tap(bias, p, x, w, row, column, {1, 1});
      if constexpr (kFinishes) result = from_float<T>(finished<T>(sum, p.epilogue, channel));
      else result = from_float<T>(sum);
    }
  }
}

// x's gradient tap by tap, with strides of 2: some rows of some columns, which may begin and end outside the plane.
template <typename T>
__device__ __noinline__ void roll_back_tap_by_tap(const InputGradParams& p, int image, int channel, int first_row, int rows, int first_column, int columns) {
  const Geometry& g = p.g;
  const T* const w = static_cast<const T*>(p.w) + channel * p.w_stride.n;
  const T* const grad = static_cast<const T*>(p.grad) + image * p.grad_stride.n + channel * p.grad_stride.c;
  T* const dx = static_cast<T*>(p.dx) + image * p.dx_stride.n + channel * p.dx_stride.c;
  for (int row = max(first_row, 0); row < min(first_row + rows, int(g.in.h)); ++row) {
    for (int column = max(first_column, 0); column < min(first_column + columns, int(g.in.w)); ++column) {
      float sum = 0;
      for (int a = 0; a < int(g.taps.h); ++a) {
        const int i = row + int(g.pad.h) - a;
        if (i < 0 || i % 2 != 0 || i / 2 >= int(g.out.h)) continue;
        for (int b = 0; b < int(g.taps.w); ++b) {
          const int j = column + int(g.pad.w) - b;
          if (j < 0 || j % 2 != 0 || j / 2 >= int(g.out.w)) continue;
          sum = fmaf(to_float(w[a * p.w_stride.h + b * p.w_stride.w]), to_float(grad[i / 2 * p.grad_stride.h + j / 2 * p.grad_stride.w]), sum);
        }
      }
      dx[row * p.dx_stride.h + column * p.dx_stride.w] = from_float<T>(sum);
    }
  }
}

}  // namespace fusebackend::depthwise_conv
