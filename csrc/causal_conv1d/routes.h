// Which CUDA kernel serves a convolution or its gradients.
#pragma once
#include "causal_conv1d/params.h"

namespace fusebackend::causal_conv1d {

enum class ForwardRoute { kShort, kRegisterWindow, kSharedTile, kRegisterToeplitz, kToeplitz, kFft };
ForwardRoute forward_route(const ConvParams&);

enum class WeightGradRoute { kRegisterWindow, kSharedTile, kToeplitz, kFft };
WeightGradRoute weight_grad_route(const WeightGradParams&);

// One channel is no depthwise convolution to PyTorch but cuDNN's, which adds up in other orders: fp32 is summed in double.
inline bool sums_exactly(const ConvParams& p) { return p.dtype == DType::kFloat32 && p.channels == 1; }

// Whether SiLU's gradient passes between the backward kernels in a wider type: fp32 for 16-bit types, double for fp32.
bool widens_silu_grad(const BackwardParams&);

// Whether one kernel (launch_short_backward) computes all gradients.
bool one_pass_backward(const BackwardParams&);

}  // namespace fusebackend::causal_conv1d
