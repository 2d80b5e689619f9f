// What kernels on channel-contiguous samples may access at once.
#pragma once
#include <initializer_list>
#include <utility>

#include "conv1d.h"

namespace fusebackend::conv1d {

inline bool channel_major(const Strides& s, int64_t channels) { return s.c == 1 && s.t != 1 && channels > 1; }

// Whether V channels of every sample lie on a boundary of V elements.
template <typename T, int V>
bool vector_aligned(std::initializer_list<std::pair<const void*, Strides>> tensors) {
  for (const auto& [data, s] : tensors) {
    if (data && (reinterpret_cast<uintptr_t>(data) % (V * sizeof(T)) || s.b % V || s.t % V)) return false;
  }
  return true;
}

}  // namespace fusebackend::conv1d
