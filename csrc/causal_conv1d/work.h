// What a convolution makes a GPU do, for estimates of its time.
#pragma once

#include <string>

#include "causal_conv1d/params.h"

namespace fusebackend::causal_conv1d {

// "name=value" pairs, separated by spaces. Strides tell memory orders only. The kind of kernel is that of route_limits.h: alignment and shared
// memory, which decide between neighbouring kinds, are left out.
//   short, window, tensor_cores, fft   1 for the kind of kernel that convolves; none of them for windows in shared memory
//   doubles    1 if it sums in double
//   blocks     thread blocks, about
//   lanes      the threads of a warp, over those that have channels to work on
//   shared     where the kind is tensor_cores: bytes of shared memory that a block must have, or windows in shared memory take its place
std::string work_of(const ConvParams& p, int sm_count);

// The same of the gradients:
//   one_pass   1 if one kernel computes them all
//   launches   kernels
//   convolutions   how many of these are convolutions: of SiLU's gradient, and for x's
//   short ... lanes   of these
//   grad_window, grad_tensor_cores   1 for the kind of kernel that computes the weight's gradient; neither for windows in shared memory
//   wide_bytes   of SiLU's gradient, where it passes between kernels
std::string work_of(const BackwardParams& p, int sm_count);

}  // namespace fusebackend::causal_conv1d
