// What the kernels take at most. Python asks for it (bind.cpp).
#pragma once
#include <cstdint>

namespace fusebackend::depthwise_conv {

constexpr int64_t kMaxTaps = 1 << 14;           // of a plane: kernels keep them in shared memory
constexpr int64_t kMaxStep = 1 << 12;           // a stride or dilation
constexpr int64_t kMaxSide = int64_t{1} << 26;  // rows, columns or padding of an image: kernels count them in 32 bits, times a step of 2^4
constexpr int64_t kMaxPlanes = int64_t{1} << 31;

}  // namespace fusebackend::depthwise_conv
