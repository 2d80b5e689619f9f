// Whether several elements may be accessed at once: of channels in (batch, time, channel) tensors, of samples in (batch, channel, time).
#pragma once
#include <algorithm>
#include <initializer_list>
#include <utility>

#include "causal_conv1d/params.h"

namespace fusebackend::causal_conv1d {

using StridedTensors = std::initializer_list<std::pair<const void*, Strides>>;  // data, null for a tensor that is absent, and strides

template <typename F>
bool all_present(StridedTensors tensors, F&& f) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const auto& tensor) { return !tensor.first || f(tensor.first, tensor.second); });
}
inline bool aligned_to(const void* data, int64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

// Vectors of `vec` channels tile every sample, on boundaries of their size.
inline bool channels_aligned(int vec, int64_t channels, DType dtype, StridedTensors tensors) {
  return channels % vec == 0 && all_present(tensors, [&](const void* data, const Strides& s) {
           return aligned_to(data, vec * element_size(dtype)) && s.b % vec == 0 && s.t % vec == 0;
         });
}
// Vectors of `vec` samples tile every row, on boundaries of their size.
inline bool samples_aligned(int vec, int64_t len, DType dtype, StridedTensors tensors) {
  return len % vec == 0 && all_present(tensors, [&](const void* data, const Strides& s) {
           return aligned_to(data, vec * element_size(dtype)) && s.b % vec == 0 && s.c % vec == 0;
         });
}

}  // namespace fusebackend::causal_conv1d
