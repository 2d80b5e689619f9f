// Plain loops for any convolution: what the vector kernels (cpu_launch.h) leave. Each computes a range of independent units.
#pragma once
#include "depthwise_conv/params.h"

namespace fusebackend::depthwise_conv {

// Whether channels, and not columns, should be the inner loop.
inline bool along_channels(const Strides& s, int64_t channels, int64_t width) { return s.c == 1 && channels > 1 && (s.w != 1 || width == 1); }

// A unit is one row of outputs: of one plane, or in (batch, height, width, channels) order of all channels.
int64_t loops_forward_units(const ForwardParams&);
void loops_forward(const ForwardParams&, int64_t begin, int64_t end);

// A unit is one row of x's gradient, in the same way.
int64_t loops_input_grad_units(const InputGradParams&);
void loops_input_grad(const InputGradParams&, int64_t begin, int64_t end);

// A unit is one output channel, or kChannelsOfUnit of them where they lie side by side.
int64_t loops_weight_grad_units(const WeightGradParams&);
void loops_weight_grad(const WeightGradParams&, int64_t begin, int64_t end);

}  // namespace fusebackend::depthwise_conv
