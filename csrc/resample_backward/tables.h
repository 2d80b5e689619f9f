// For each axis, which elements of the gradient each element of the result is the sum of: where the list of element k begins, for k up to the axis'
// size, and then the lists, one behind the other. An entry of a list is a place in the gradient and its weight. Behind them is scratch memory.
#pragma once

#include "resample_backward/resample_backward.h"

namespace fusebackend::resample_backward {

template <typename Acc>
struct alignas(2 * sizeof(Acc)) Entry {
  Acc weight;
  int32_t place;
};

// The lists of longer axes are made by two kernels: in the one that makes those of others every block reads all indices.
constexpr int64_t kShortAxis = 4096;
FUSE_HOST_DEVICE constexpr bool is_long(const Axis& a) { return a.terms > 0 && a.length > kShortAxis; }

constexpr int64_t kFlagBytes = 16;  // before the tables: a flag of each axis
inline int64_t entries_of(const Axis& a) { return a.terms > 0 ? a.terms * a.length : a.size; }
inline int64_t begin_bytes(const Axis& a) { return round_up((a.size + 1) * int64_t(sizeof(int32_t)), 16); }
inline int64_t entry_bytes(const Axis& a, DType dtype) {
  return round_up(entries_of(a) * int64_t(dtype == DType::kFloat64 ? sizeof(Entry<double>) : sizeof(Entry<float>)), 16);
}
inline int64_t edge_bytes(const Axis& a) { return is_long(a) ? round_up(a.terms * (a.size + 1) * int64_t(sizeof(int32_t)), 16) : 0; }
inline int64_t table_bytes(const Axis& a, DType dtype) { return begin_bytes(a) + entry_bytes(a, dtype) + edge_bytes(a); }

}  // namespace fusebackend::resample_backward
