// From tensors to kernel parameters; shared by the CPU and CUDA bindings.
//
//   causal_conv1d(Tensor x, Tensor weight, Tensor? bias, SymInt left, SymInt right, float shift, bool silu, bool channels_last, Tensor? mean=None,
//                 Tensor? variance=None, Tensor? scale=None, Tensor? offset=None, float eps=0., str activation="") -> Tensor
//   causal_conv1d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, SymInt left, float shift, bool silu, bool channels_last,
//                          bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)
//
// x is (batch, channels, time), padded by `left` and `right` zeros, and weight (channels, 1, taps). The result (or x's gradient) lies in
// memory as (batch, time, channels) if `channels_last`, else as (batch, channels, time). What the last six arguments make of it is described in
// common/channel_epilogue.h (`offset` is its shift). A gradient that is not needed comes back empty.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "causal_conv1d/params.h"
#include "common/binding.h"
#include "common/channel_epilogue_binding.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {

using Bias = std::optional<Tensor>;

inline DType dtype_of(const Tensor& t) {
  const std::optional<DType> dtype = to_dtype(t.scalar_type());
  STD_TORCH_CHECK(dtype && is_floating(*dtype), "causal_conv1d: dtype must be float32, float16, bfloat16 or float64");
  return *dtype;
}

inline Strides strides_of(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

inline Tensor empty_rows(const Tensor& like, int64_t batch, int64_t channels, int64_t length, bool channels_last) {
  if (!channels_last) return empty_like_sized(like, {batch, channels, length});
  const int64_t pitch = std::max<int64_t>(channels, 1);  // as torch lays out what is empty
  return empty_strided_like(like, {batch, channels, length}, {std::max<int64_t>(length, 1) * pitch, 1, pitch});
}

inline void check_operand(const Tensor& t, const Tensor& x, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.is_cuda() == x.is_cuda() && t.get_device_index() == x.get_device_index(),
                  "causal_conv1d: ", name, " must have x's dtype and device");
}

// The most samples of a row: kernels count them in 32 bits.
constexpr int64_t kMaxSamples = (int64_t{1} << 29) - 1;
// The most taps: the z dimension of a grid, times the taps of a block of shared_tile_weight_grad.cuh.
constexpr int64_t kMaxTaps = 65535 * int64_t{128};
// The most tiles in all rows: the x dimension of a grid, whose blocks take no fewer samples of a row (shared_tile_forward.cuh).
constexpr int64_t kMaxTiles = INT32_MAX, kTileSamples = 256;

// `length` is the result's.
inline void check_operands(const Tensor& x, const Tensor& weight, const Bias& bias, int64_t left, int64_t length) {
  STD_TORCH_CHECK(weight.size(0) == x.size(1) && weight.size(1) == 1 && weight.size(2) >= 1, "causal_conv1d: weight must be (", x.size(1),
                  ", 1, taps)");
  check_operand(weight, x, "weight");
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == x.size(1), "causal_conv1d: bias must be (", x.size(1), ",)");
    check_operand(*bias, x, "bias");
  }
  STD_TORCH_CHECK(length >= 0, "causal_conv1d: more taps than padded samples");
  STD_TORCH_CHECK(x.size(2) <= kMaxSamples && weight.size(2) <= kMaxSamples && length <= kMaxSamples && left >= -kMaxSamples &&
                      left <= kMaxSamples,
                  "causal_conv1d: rows of more than ", kMaxSamples, " samples are not supported");
  STD_TORCH_CHECK(weight.size(2) <= kMaxTaps, "causal_conv1d: more than ", kMaxTaps, " taps are not supported");
  const int64_t tiles = ceil_div(std::max(x.size(2), length), kTileSamples);
  STD_TORCH_CHECK(x.size(0) * x.size(1) * tiles <= kMaxTiles, "causal_conv1d: more than ", kMaxTiles, " rows, or tiles of ", kTileSamples,
                  " samples of rows, are not supported");
}

inline void check_rank(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() == 3 && weight.dim() == 3, "causal_conv1d: x must be (batch, channels, time) and weight (channels, 1, taps)");
}

// The result's length, with everything checked.
inline int64_t check_forward(const Tensor& x, const Tensor& weight, const Bias& bias, int64_t left, int64_t right) {
  check_rank(x, weight);
  const int64_t length = x.size(2) + left + right - weight.size(2) + 1;
  check_operands(x, weight, bias, left, length);
  return length;
}

inline void check_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Bias& bias, int64_t left) {
  check_rank(x, weight);
  STD_TORCH_CHECK(grad.dim() == 3 && grad.size(0) == x.size(0) && grad.size(1) == x.size(1),
                  "causal_conv1d_backward: grad must have x's batch and channels");
  check_operand(grad, x, "grad");
  check_operands(x, weight, bias, left, grad.size(2));
}

// What the parameters of both directions have in common.
template <typename Params>
void set_operands(Params& p, const Tensor& x, const Tensor& weight, const Bias& bias, int64_t left, double shift) {
  p.x = x.data_ptr();
  p.w = weight.data_ptr();
  p.batch = x.size(0), p.channels = x.size(1), p.in_len = x.size(2);
  p.taps = weight.size(2), p.left = left;
  p.x_stride = strides_of(x);
  p.w_stride = {weight.stride(0), weight.stride(2)};
  if (bias) p.bias = bias->data_ptr(), p.bias_stride = bias->stride(0);
  p.shift = shift;
  p.dtype = dtype_of(x);
}

inline ConvParams forward_params(const Tensor& x, const Tensor& weight, const Bias& bias, int64_t left, const Tensor& out, double shift,
                                 bool silu, const ChannelEpilogue& after = {}) {
  ConvParams p = {};
  set_operands(p, x, weight, bias, left, shift);
  p.out = out.data_ptr();
  if (out.dim() == 3) p.out_len = out.size(2), p.out_stride = strides_of(out);
  STD_TORCH_CHECK(!silu || !after.any, "causal_conv1d: SiLU and another epilogue");
  p.epilogue = after.any ? Epilogue::kChannel : silu ? Epilogue::kSilu : Epilogue::kNone;
  p.after = after;
  p.x_dtype = p.out_dtype = p.dtype;
  return p;
}

// The parameters of one backward call with its results, allocated.
struct Backward {
  BackwardParams params = {};
  Tensor dx, dw, db;

  Backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Bias& bias, int64_t left, double shift, bool silu,
           bool channels_last, bool need_x, bool need_weight, bool need_bias)
      : dx(need_x ? empty_rows(x, x.size(0), x.size(1), x.size(2), channels_last) : empty_like_sized(x, {0})),
        dw(empty_like_sized(x, need_weight ? to_vector(weight.sizes()) : std::vector<int64_t>{0})),
        db(empty_like_sized(x, {need_bias ? x.size(1) : 0})) {
    BackwardParams& p = params;
    set_operands(p, x, weight, bias, left, shift);
    p.dy = grad.data_ptr();
    if (need_x) p.dx = dx.data_ptr(), p.dx_stride = strides_of(dx);
    if (need_weight) p.dw = dw.data_ptr();
    if (need_bias) p.db = db.data_ptr();
    p.out_len = grad.size(2);
    p.dy_stride = strides_of(grad);
    p.silu = silu;
  }
};

}  // namespace fusebackend::causal_conv1d
