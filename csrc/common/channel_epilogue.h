// What is done to a convolution's results before they are stored: an affine map of each channel, as of batch norm in inference, and an activation.
//
//   y = activation((sum - mean[o]) / sqrt(variance[o] + eps) * scale[o] + shift[o])
//
// in the precision of the sums; a vector that is not given is left out. For depthwise_conv and causal_conv1d.
#pragma once
#include <cstdint>

namespace fusebackend {

// A number for each output channel.
struct ChannelVector {
  const void* data;  // may be null
  int64_t stride;
  bool wide;         // of the type of the sums (fp32; fp64 for float64), else of x's
};

enum class Activation : int { kNone, kRelu, kRelu6, kHardswish, kSilu, kGeluTanh, kGelu };

// GELU by tanh is v * sigmoid(kGeluGate * (v + kGeluCubic * v^3)), since (1 + tanh(u)) / 2 = sigmoid(2 u).
constexpr double kGeluGate = 1.5957691216057308, kGeluCubic = .044715;  // the first is twice sqrt(2 / pi)

struct ChannelEpilogue {
  ChannelVector mean, variance, scale, shift;
  double eps;
  bool is_affine;  // one of the vectors is given
  bool any;        // one of them, or an activation
  Activation activation;
};

}  // namespace fusebackend
