// 16-bit floats on the CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/cpu_target.h"

namespace fusebackend::index_add {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float widen(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline void narrow(float f, BFloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out.bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t(rounded);
}
inline float widen(Float16 x) { return half_to_float(x.bits); }
inline void narrow(float f, Float16& out) { out.bits = float_to_half(f); }
template <typename T> T widen(T x) { return x; }

// The type in which elements T are summed.
template <typename T> struct AccOf { using type = T; };
template <> struct AccOf<BFloat16> { using type = float; };
template <> struct AccOf<Float16> { using type = float; };
template <typename T> using Acc = typename AccOf<T>::type;

}  // namespace fusebackend::index_add
