// The elements of the CPU kernels: 16-bit floats, and how all are widened for sums and rounded to nearest, ties to even. A NaN becomes a quiet one.
//
// In an unnamed namespace, as cpu_target.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cpu_target.h"

namespace fusebackend {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename T>
inline T widen(T x) {
  return x;
}
inline float widen(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline float widen(Float16 x) { return half_to_float(x.bits); }

template <typename T>
inline void narrow(T x, T& out) {
  out = x;
}
inline void narrow(float x, BFloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  out.bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, Float16& out) { out.bits = float_to_half(x); }

// The type in which elements T are computed with.
template <typename T>
using Acc = decltype(widen(T()));

}  // namespace
}  // namespace fusebackend
