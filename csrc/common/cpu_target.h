// What the CPU that a file is compiled for has. FUSE_HAS_AVX2: AVX2, FMA and F16C; other code is made of GCC's vector extensions, for any CPU.
//
// Everything is in unnamed namespaces: some files are compiled for several CPUs, and the linker can't take code of one for the other's.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FUSE_HAS_AVX2 1
#include <immintrin.h>
#else
#define FUSE_HAS_AVX2 0
#endif

// asm("" : FUSE_IN_REGISTER(v)): the compiler must have v, a vector or a floating-point number, in a register there, and knows no more of it.
#if defined(__x86_64__)
#define FUSE_IN_REGISTER(v) "+v"(v)
#elif defined(__aarch64__)
#define FUSE_IN_REGISTER(v) "+w"(v)
#else
#define FUSE_IN_REGISTER(v) "+m"(v)
#endif

namespace fusebackend {
namespace {

// a * b + c, rounded once where the CPU has an instruction for that, as PyTorch's kernels do.
template <typename T>
inline T multiply_add(T a, T b, T c) {
#if FUSE_HAS_AVX2 || defined(__aarch64__)
  if constexpr (sizeof(T) == 8) return __builtin_fma(a, b, c);
  else return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

#if FUSE_HAS_AVX2
inline float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_half(float f) { return static_cast<uint16_t>(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__aarch64__)
inline float half_to_float(uint16_t bits) {
  __fp16 half;
  std::memcpy(&half, &bits, 2);
  return half;
}
inline uint16_t float_to_half(float f) {
  const __fp16 half = f;
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
#else
inline float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude < 0x400) {  // zero or a denormal, which is a normal float
    const float f = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -f : f;
  }
  uint32_t wide = sign | (magnitude << 13);
  if (magnitude < 0x7c00) wide += 112u << 23;  // the exponent's bias
  else wide |= magnitude > 0x7c00 ? 0x7fc00000 : 0x7f800000;  // a quiet NaN, or infinity
  float f;
  std::memcpy(&f, &wide, 4);
  return f;
}
// To nearest, ties to even.
inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x477ff000) return sign | 0x7c00;  // from 65520 on
  if (bits < 0x38800000) {  // a denormal: adding 0.5 rounds at its last place, 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += .5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13));
}
#endif

}  // namespace
}  // namespace fusebackend
