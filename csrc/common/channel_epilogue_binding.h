// The epilogue (channel_epilogue.h) of an operator, from its arguments: Tensor? mean, variance, scale and shift, float eps, str activation.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "common/binding.h"
#include "common/channel_epilogue.h"

namespace fusebackend {

// A number for each channel, or none.
using ChannelNumbers = std::optional<Tensor>;

inline Activation activation_of(const char* op, const std::string& name) {
  constexpr std::pair<const char*, Activation> kNames[] = {
      {"", Activation::kNone},     {"relu", Activation::kRelu},           {"relu6", Activation::kRelu6}, {"hardswish", Activation::kHardswish},
      {"silu", Activation::kSilu}, {"gelu_tanh", Activation::kGeluTanh}, {"gelu", Activation::kGelu}};
  for (const auto& [known, activation] : kNames)
    if (name == known) return activation;
  STD_TORCH_CHECK(false, op, ": activation ", name, " is not supported");
}

inline ChannelVector channel_vector(const char* op, const char* name, const ChannelNumbers& v, const Tensor& x, int64_t channels) {
  if (!v) return {};
  STD_TORCH_CHECK(v->dim() == 1 && v->size(0) == channels, op, ": ", name, " must be (", channels, ",)");
  STD_TORCH_CHECK(v->is_cuda() == x.is_cuda() && v->get_device_index() == x.get_device_index(), op, ": ", name, " must be on x's device");
  const ScalarType type = v->scalar_type(), sums = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(type == x.scalar_type() || type == sums, op, ": ", name, " must have x's dtype, or that of its sums");
  return {v->data_ptr(), v->stride(0), type == sums};
}

// `channels`: of the result.
inline ChannelEpilogue epilogue_of(const char* op, const Tensor& x, int64_t channels, const ChannelNumbers& mean, const ChannelNumbers& variance,
                                   const ChannelNumbers& scale, const ChannelNumbers& shift, double eps, const std::string& activation,
                                   const char* shift_name = "shift") {
  ChannelEpilogue e = {};
  e.mean = channel_vector(op, "mean", mean, x, channels), e.variance = channel_vector(op, "variance", variance, x, channels);
  e.scale = channel_vector(op, "scale", scale, x, channels), e.shift = channel_vector(op, shift_name, shift, x, channels);
  e.eps = eps, e.activation = activation_of(op, activation);
  e.is_affine = mean || variance || scale || shift;
  e.any = e.is_affine || e.activation != Activation::kNone;
  return e;
}

}  // namespace fusebackend
