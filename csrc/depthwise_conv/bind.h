// From tensors to kernel parameters; shared by the CPU and CUDA bindings.
//
//   depthwise_conv(Tensor x, Tensor weight, Tensor? bias, int[] stride, SymInt[] padding, int[] dilation, bool? channels_last, Tensor? mean=None,
//                  Tensor? variance=None, Tensor? scale=None, Tensor? shift=None, float eps=0., str activation="") -> Tensor
//   depthwise_conv_backward(Tensor grad, Tensor x, Tensor weight, int[] stride, SymInt[] padding, int[] dilation, bool? channels_last,
//                           bool weight_channels_last, bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)
//
// x is (batch, channels, height, width), weight (channels * multiplier, 1, taps, taps), and padding (top, bottom, left, right), negative where
// x is cropped. The result (or x's gradient) lies in memory as (batch, height, width, channels) if `channels_last`, as x does if that is None.
// What follows the sums is described in common/channel_epilogue.h; mean, variance, scale and shift have a number an output, in x's dtype or in that of the sums.
// A gradient that is not needed comes back empty.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/binding.h"
#include "common/channel_epilogue_binding.h"
#include "depthwise_conv/limits.h"
#include "depthwise_conv/params.h"

namespace fusebackend::depthwise_conv {

using Bias = std::optional<Tensor>;
using Ints = std::vector<int64_t>;

inline DType dtype_of(const Tensor& t) {
  const std::optional<DType> dtype = to_dtype(t.scalar_type());
  STD_TORCH_CHECK(dtype && is_floating(*dtype) && (*dtype != DType::kFloat64 || !t.is_cuda()),
                  "depthwise_conv: dtype must be float32, float16 or bfloat16 (on CPUs also float64)");
  return *dtype;
}

inline Strides strides_of(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}; }

inline Ints channels_last_strides(const Ints& s) { return {s[1] * s[2] * s[3], 1, s[1] * s[3], s[1]}; }

// As ops.is_channels_last: what lies in memory as (batch, height, width, channels), and where both orders are the same is not told so.
inline bool is_channels_last(const Tensor& t) {
  const bool many = t.size(2) > 1 || t.size(3) > 1;
  if (many) return t.stride(1) == 1;
  return t.size(1) > 1 && t.stride(1) == 1 && t.stride(3) == t.size(1);
}

inline Tensor empty_image(const Tensor& like, const Ints& sizes, bool channels_last) {
  if (!channels_last) return empty_like_sized(like, sizes);
  Ints positive = sizes;
  for (int64_t& s : positive) s = s > 0 ? s : 1;
  return empty_strided_like(like, sizes, channels_last_strides(positive));
}

inline void check_operand(const Tensor& t, const Tensor& x, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.is_cuda() == x.is_cuda() && t.get_device_index() == x.get_device_index(),
                  "depthwise_conv: ", name, " must have x's dtype and device");
}

// Checks x, weight and the numbers, and computes the result's sizes.
inline Geometry geometry_of(const Tensor& x, const Tensor& weight, const Ints& stride, const Ints& padding, const Ints& dilation) {
  STD_TORCH_CHECK(x.dim() == 4 && weight.dim() == 4, "depthwise_conv: x must be (batch, channels, height, width) and weight (outputs, 1, taps, taps)");
  dtype_of(x);
  check_operand(weight, x, "weight");
  STD_TORCH_CHECK(stride.size() == 2 && dilation.size() == 2 && padding.size() == 4, "depthwise_conv: two strides and dilations, and four paddings, are needed");
  const int64_t channels = x.size(1), outputs = weight.size(0);
  STD_TORCH_CHECK(weight.size(1) == 1 && channels > 0 && outputs > 0 && outputs % channels == 0,
                  "depthwise_conv: weight must be (a multiple of ", channels, ", 1, taps, taps)");
  Geometry g = {};
  g.batch = x.size(0), g.channels = channels, g.multiplier = outputs / channels;
  g.in = {x.size(2), x.size(3)}, g.taps = {weight.size(2), weight.size(3)};
  STD_TORCH_CHECK(g.taps.h >= 1 && g.taps.w >= 1 && g.tap_count() <= kMaxTaps, "depthwise_conv: from 1 to ", kMaxTaps, " taps are supported");
  for (int i = 0; i < 2; ++i)
    STD_TORCH_CHECK(stride[i] >= 1 && stride[i] <= kMaxStep && dilation[i] >= 1 && dilation[i] <= kMaxStep,
                    "depthwise_conv: strides and dilations must be from 1 to ", kMaxStep);
  for (int64_t p : padding) STD_TORCH_CHECK(p >= -kMaxSide && p <= kMaxSide, "depthwise_conv: a padding of more than ", kMaxSide, " is not supported");
  g.stride = {stride[0], stride[1]}, g.dilation = {dilation[0], dilation[1]}, g.pad = {padding[0], padding[2]};
  const int64_t room_h = g.in.h + padding[0] + padding[1] - g.dilation.h * (g.taps.h - 1) - 1;
  const int64_t room_w = g.in.w + padding[2] + padding[3] - g.dilation.w * (g.taps.w - 1) - 1;
  STD_TORCH_CHECK(room_h >= 0 && room_w >= 0, "depthwise_conv: more taps than padded rows or columns");
  g.out = {room_h / g.stride.h + 1, room_w / g.stride.w + 1};
  STD_TORCH_CHECK(g.in.h <= kMaxSide && g.in.w <= kMaxSide && g.out.h <= kMaxSide && g.out.w <= kMaxSide,
                  "depthwise_conv: more than ", kMaxSide, " rows or columns are not supported");
  STD_TORCH_CHECK(g.batch <= kMaxPlanes / outputs, "depthwise_conv: more than ", kMaxPlanes, " planes are not supported");
  return g;
}

inline ForwardParams forward_params(const Geometry& g, const Tensor& x, const Tensor& weight, const Bias& bias, const ChannelEpilogue& epilogue, const Tensor& y) {
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == g.outputs(), "depthwise_conv: bias must be (", g.outputs(), ",)");
    check_operand(*bias, x, "bias");
  }
  ForwardParams p = {};
  p.g = g;
  p.x = x.data_ptr(), p.w = weight.data_ptr(), p.y = y.data_ptr();
  if (bias) p.bias = bias->data_ptr(), p.bias_stride = bias->stride(0);
  p.x_stride = strides_of(x), p.y_stride = strides_of(y), p.w_stride = strides_of(weight);
  p.dtype = dtype_of(x);
  p.epilogue = epilogue;
  return p;
}

// The results of a backward, allocated, and the parameters of both its parts.
struct Backward {
  Geometry g;
  Tensor dx, dw, db;
  InputGradParams input = {};
  WeightGradParams weight = {};

  Backward(const Tensor& grad, const Tensor& x, const Tensor& w, const Ints& stride, const Ints& padding, const Ints& dilation,
           std::optional<bool> channels_last, bool weight_channels_last, bool need_x, bool need_weight, bool need_bias)
      : g(geometry_of(x, w, stride, padding, dilation)),
        dx(need_x ? empty_image(x, to_vector(x.sizes()), channels_last.value_or(is_channels_last(x))) : empty_like_sized(x, {0})),
        dw(need_weight ? empty_image(x, to_vector(w.sizes()), weight_channels_last) : empty_like_sized(x, {0})),
        db(empty_like_sized(x, {need_bias ? g.outputs() : 0})) {
    STD_TORCH_CHECK(grad.dim() == 4 && grad.size(0) == g.batch && grad.size(1) == g.outputs() && grad.size(2) == g.out.h && grad.size(3) == g.out.w,
                    "depthwise_conv_backward: grad must be (", g.batch, ", ", g.outputs(), ", ", g.out.h, ", ", g.out.w, ")");
    check_operand(grad, x, "grad");
    const DType dtype = dtype_of(x);
    input.g = weight.g = g;
    input.grad = weight.grad = grad.data_ptr();
    input.grad_stride = weight.grad_stride = strides_of(grad);
    input.w = w.data_ptr(), input.w_stride = strides_of(w);
    if (need_x) input.dx = dx.data_ptr(), input.dx_stride = strides_of(dx);
    weight.x = x.data_ptr(), weight.x_stride = strides_of(x);
    if (need_weight) weight.dw = dw.data_ptr();
    if (need_bias) weight.db = db.data_ptr();
    input.dtype = weight.dtype = dtype;
  }
};

}  // namespace fusebackend::depthwise_conv
