// Storage types of the CPU kernels, and vectors of the type that sums are made in, by GCC's vector extensions.
//
// FUSE_VECTOR_BYTES is the width of a vector: 32 for AVX2, 64 in code that is compiled for AVX-512 (cpu_avx512.cpp), 16 for other CPUs, all of which
// have such registers. Everything is in unnamed namespaces, so that the linker can't take code of one for the other's.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cpu_half.h"

#ifndef FUSE_VECTOR_BYTES
#define FUSE_VECTOR_BYTES (FUSE_HAS_AVX2 ? 32 : 16)
#endif

namespace fusebackend {
namespace {

template <typename T, typename A>
inline T to_storage(A v) {
  T stored;
  narrow(static_cast<Acc<T>>(v), stored);
  return stored;
}

// Vectors, loaded from any address.
template <typename A>
struct VecOf {
  static constexpr int kSize = FUSE_VECTOR_BYTES / sizeof(A);
  typedef A type __attribute__((vector_size(FUSE_VECTOR_BYTES)));
  typedef A unaligned __attribute__((vector_size(FUSE_VECTOR_BYTES), aligned(sizeof(A)), may_alias));
};
template <typename A>
using V = typename VecOf<A>::type;
// x in all lanes. Not x + V{}: of that the compiler would keep the addition, which turns -0 into 0.
template <typename A>
inline V<A> in_all(A x) { return x - V<A>{}; }
template <typename A>
inline V<A> vload(const A* p) { return *reinterpret_cast<const typename VecOf<A>::unaligned*>(p); }
template <typename A>
inline void vstore(A* p, V<A> v) { *reinterpret_cast<typename VecOf<A>::unaligned*>(p) = v; }
template <typename A, typename From>
inline V<A> bit_cast(From v) {
  V<A> out;
  static_assert(sizeof out == sizeof v);
  std::memcpy(&out, &v, sizeof out);
  return out;
}

// What the vector extensions lack; at_least and at_most give x where that is NaN. Those of AVX-512 are the masked ones with all lanes selected: GCC warns of the others, whose masked
// lanes are undefined. reciprocal is 1 / x to at least 2^-14. fused_difference is a * b - c rounded once: the rounding error of c if that is
// a * b rounded.
#if FUSE_VECTOR_BYTES == 64
inline V<float> at_least(V<float> low, V<float> x) { return (V<float>)_mm512_maskz_max_ps(0xffff, (__m512)low, (__m512)x); }
inline V<float> at_most(V<float> high, V<float> x) { return (V<float>)_mm512_maskz_min_ps(0xffff, (__m512)high, (__m512)x); }
inline V<float> fused_difference(V<float> a, V<float> b, V<float> c) { return (V<float>)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c); }
inline V<float> reciprocal(V<float> x) { return (V<float>)_mm512_maskz_rcp14_ps(0xffff, (__m512)x); }
inline V<float> load16(const Float16* p) {
  return (V<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store16(Float16* p, V<float> v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
inline V<uint32_t> load_words(const BFloat16* p) {
  return (V<uint32_t>)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_words(BFloat16* p, V<uint32_t> v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)v));
}
#else
typedef uint16_t V16 __attribute__((vector_size(FUSE_VECTOR_BYTES / 2)));  // as many 16-bit numbers as a V<float> has
#if FUSE_HAS_AVX2
inline V<float> at_least(V<float> low, V<float> x) { return (V<float>)_mm256_max_ps((__m256)low, (__m256)x); }
inline V<float> at_most(V<float> high, V<float> x) { return (V<float>)_mm256_min_ps((__m256)high, (__m256)x); }
inline V<float> fused_difference(V<float> a, V<float> b, V<float> c) { return (V<float>)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c); }
inline V<float> reciprocal(V<float> x) { return 1.f / x; }
inline V<float> load16(const Float16* p) { return (V<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store16(Float16* p, V<float> v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#else
inline V<float> at_least(V<float> low, V<float> x) { return low > x ? low : x; }
inline V<float> at_most(V<float> high, V<float> x) { return high < x ? high : x; }
inline V<float> fused_difference(V<float> a, V<float> b, V<float> c) {
  for (int i = 0; i < VecOf<float>::kSize; ++i) c[i] = __builtin_fmaf(a[i], b[i], -c[i]);
  return c;
}
inline V<float> reciprocal(V<float> x) { return 1.f / x; }
inline V<float> load16(const Float16* p) {
  V<float> v = {};
  for (int i = 0; i < VecOf<float>::kSize; ++i) v[i] = widen(p[i]);
  return v;
}
inline void store16(Float16* p, V<float> v) {
  for (int i = 0; i < VecOf<float>::kSize; ++i) p[i] = to_storage<Float16>(v[i]);
}
#endif
inline V<uint32_t> load_words(const BFloat16* p) {
  V16 raw;
  std::memcpy(&raw, p, sizeof raw);
  return __builtin_convertvector(raw, V<uint32_t>);
}
inline void store_words(BFloat16* p, V<uint32_t> v) {
  const V16 narrow = __builtin_convertvector(v, V16);
  std::memcpy(p, &narrow, sizeof narrow);
}
#endif
inline V<float> load16(const BFloat16* p) { return bit_cast<float>(load_words(p) << 16); }
inline void store16(BFloat16* p, V<float> v) {
  const V<uint32_t> u = bit_cast<uint32_t>(v), nan = (V<uint32_t>)(v != v);
  const V<uint32_t> rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  store_words(p, (nan & 0x7fc0u) | (~nan & rounded));
}

// A vector of A from as many elements of T, and back.
template <typename A, typename T>
inline V<A> vload_as(const T* p) {
  if constexpr (std::is_same_v<T, A>) {
    return vload(p);
  } else if constexpr (std::is_same_v<A, float>) {
    return load16(p);
  } else {
    V<A> v = {};
    for (int i = 0; i < VecOf<A>::kSize; ++i) v[i] = widen(p[i]);
    return v;
  }
}
template <typename A, typename T>
inline void vstore_as(T* p, V<A> v) {
  if constexpr (std::is_same_v<T, A>) {
    vstore(p, v);
  } else if constexpr (std::is_same_v<A, float>) {
    store16(p, v);
  } else {
    for (int i = 0; i < VecOf<A>::kSize; ++i) p[i] = to_storage<T>(v[i]);
  }
}

}  // namespace
}  // namespace fusebackend
