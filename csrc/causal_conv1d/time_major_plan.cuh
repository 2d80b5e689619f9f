// How kernels on time-contiguous rows are launched: what they may access at once, and how much a block takes.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <utility>

#include "device_limits.h"
#include "short_time_major.cuh"

namespace fusebackend::conv1d {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How rows may be accessed, the same for all tensors.
template <typename T>
Access row_access(int64_t len, std::initializer_list<std::pair<const void*, Strides>> tensors) {
  constexpr int64_t V = kVecElems<T>;
  const auto& first = *tensors.begin();
  bool whole = len % V == 0;
  for (const auto& [data, s] : tensors) {
    if (!data) continue;
    const uintptr_t base = reinterpret_cast<uintptr_t>(data);
    if (base % sizeof(T) || (base - reinterpret_cast<uintptr_t>(first.first)) % 16) return Access::kElement;
    if ((s.b - first.second.b) % V || (s.c - first.second.c) % V) return Access::kElement;
    whole = whole && base % 16 == 0 && s.b % V == 0 && s.c % V == 0;
  }
  return whole ? Access::kWhole : Access::kVector;
}

template <typename F>
cudaError_t dispatch_access(Access access, F&& f) {
  switch (access) {
    case Access::kWhole: return f(std::integral_constant<Access, Access::kWhole>{});
    case Access::kVector: return f(std::integral_constant<Access, Access::kVector>{});
    default: return f(std::integral_constant<Access, Access::kElement>{});
  }
}

template <typename T>
ShortRows plan_rows(int64_t batch, int64_t len, Access access) {
  constexpr int V = kVecElems<T>;
  const int64_t per_row = ceil_div(len + (access == Access::kVector ? V - 1 : 0), V);
  return {FastDiv(static_cast<uint32_t>(per_row)), batch * per_row, access == Access::kVector};
}

// Blocks a channel: enough to fill the device several times over, none with less than two turns of work.
inline int time_major_splits(int64_t channels, int64_t items) {
  const int64_t wanted = ceil_div(int64_t{sm_count()} * 16, channels);
  return static_cast<int>(std::clamp<int64_t>(std::min(wanted, ceil_div(items, 2 * kShortThreads)), 1, 65535));
}

}  // namespace fusebackend::conv1d
