// The CPU kernels compute ranges of units, which are independent: a binding hands them to threads.
#pragma once
#include "depthwise_conv/params.h"

namespace fusebackend::depthwise_conv {

// A unit is one row of outputs: of one plane, or in (batch, height, width, channels) order of all channels.
int64_t forward_units(const ForwardParams&);
void forward(const ForwardParams&, int64_t begin, int64_t end);

// A unit is one row of x's gradient, in the same way.
int64_t input_grad_units(const InputGradParams&);
void input_grad(const InputGradParams&, int64_t begin, int64_t end);

// A unit is one output channel, or kChannelsOfUnit of them where they lie side by side.
int64_t weight_grad_units(const WeightGradParams&);
void weight_grad(const WeightGradParams&, int64_t begin, int64_t end);

}  // namespace fusebackend::depthwise_conv
