// Storage types, and vectors of the type that sums are made in, for the CPU kernels. GCC's vector extensions.
//
// FUSE_VECTOR_BYTES is the width of a vector: 32 for the processors that the library is compiled for, 64 in code that is compiled for
// AVX-512 (conv1d_avx512.cpp). Names are unnamed namespaces' throughout: code of the two must not be taken for each other by the linker.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

#ifndef FUSE_VECTOR_BYTES
#define FUSE_VECTOR_BYTES 32
#endif

namespace fusebackend::conv1d {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float load(float v) { return v; }
inline double load(double v) { return v; }
inline float load(BFloat16 v) { return bits_to_float(uint32_t{v.bits} << 16); }
inline float load(Half v) {
  const uint32_t sign = (v.bits & 0x8000u) << 16, rest = (v.bits & 0x7fffu) << 13;
  // Moving the exponent by a multiplication also makes subnormals right; inf and NaN need theirs restored.
  const float f = bits_to_float(rest) * bits_to_float(0x77800000u);
  return bits_to_float(float_to_bits(f) | sign | (rest >= 0x0f800000u ? 0x7f800000u : 0u));
}

template <typename T>
inline T store(float v);
template <>
inline float store<float>(float v) { return v; }
template <>
inline BFloat16 store<BFloat16>(float v) {
  const uint32_t u = float_to_bits(v);
  const uint16_t rounded = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  return {v != v ? static_cast<uint16_t>(0x7fc0) : rounded};
}
template <>
inline Half store<Half>(float v) {
  const uint32_t u = float_to_bits(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  uint32_t h;
  if (a > 0x7f800000u) h = 0x7e00u;
  else if (a >= 0x477ff000u) h = 0x7c00u;  // rounds to inf
  else if (a < 0x38800000u) h = float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000u;  // subnormal: the addition rounds
  else h = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13;
  return {static_cast<uint16_t>(h | sign)};
}

template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <typename T, typename A>
inline T to_storage(A v) {
  if constexpr (std::is_same_v<T, double>) return v;
  else return store<T>(static_cast<float>(v));
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
// In all lanes. Of a sum with zeros the compiler would keep the addition, which is what makes zeros of -0.
template <typename A>
inline V<A> in_all(A x) { return x - V<A>{}; }
// As many 16-bit numbers as a V<float> has.
typedef uint16_t V16 __attribute__((vector_size(FUSE_VECTOR_BYTES / 2)));
template <typename A>
inline V<A> vload(const A* p) { return *reinterpret_cast<const typename VecOf<A>::unaligned*>(p); }
template <typename A>
inline void vstore(A* p, V<A> v) { *reinterpret_cast<typename VecOf<A>::unaligned*>(p) = v; }

#if FUSE_VECTOR_BYTES == 64  // "maskz", of no mask: GCC warns of the others, whose masked lanes are undefined
inline V<float> at_least(V<float> low, V<float> x) { return (V<float>)_mm512_maskz_max_ps(0xffff, (__m512)low, (__m512)x); }
inline V<float> at_most(V<float> high, V<float> x) { return (V<float>)_mm512_maskz_min_ps(0xffff, (__m512)high, (__m512)x); }
inline V<float> fused_difference(V<float> a, V<float> b, V<float> c) { return (V<float>)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c); }
// 1 / x to 2^-14.
inline V<float> reciprocal(V<float> x) { return (V<float>)_mm512_maskz_rcp14_ps(0xffff, (__m512)x); }
#elif defined(__AVX__)
inline V<float> at_least(V<float> low, V<float> x) { return (V<float>)_mm256_max_ps((__m256)low, (__m256)x); }
inline V<float> at_most(V<float> high, V<float> x) { return (V<float>)_mm256_min_ps((__m256)high, (__m256)x); }
// a * b - c, rounded once: where c is a * b rounded, what that lost.
inline V<float> fused_difference(V<float> a, V<float> b, V<float> c) { return (V<float>)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c); }
#else
inline V<float> at_least(V<float> low, V<float> x) { return x < low ? low : x; }
inline V<float> at_most(V<float> high, V<float> x) { return x > high ? high : x; }
inline V<float> fused_difference(V<float> a, V<float> b, V<float> c) {
  V<float> d;
  for (int i = 0; i < VecOf<float>::kSize; ++i) d[i] = std::fma(a[i], b[i], -c[i]);
  return d;
}
#endif
#if FUSE_VECTOR_BYTES != 64
inline V<float> reciprocal(V<float> x) { return 1.f / x; }
#endif

// exp(x) = scale + scale * less_one() for |x| <= kExpRange; NaN for NaN. To 2^-26 with 5 terms of (exp(r) - 1 - r) / r^2, which give the least
// error where |r| <= ln2/2; to 2^-17 with 3, for what is rounded to 16 bits.
constexpr float kExpRange = 88.25f;
template <int TERMS>
struct Exp {
  V<float> scale, r, p;

  explicit Exp(V<float> x) {
    static_assert(TERMS == 3 || TERMS == 5);
    constexpr float kMost[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f4p-5f, 0x1.123a22p-7f, 0x1.6a23cap-10f};
    constexpr float kFew[] = {0x1.0006b8p-1f, 0x1.571d22p-3f, 0x1.5224e2p-5f};
    constexpr float kShift = 12582912.f + 127.f;  // 1.5 * 2^23: adding it rounds to an integer, here to what the exponent of 2^n is kept as
    const V<float> shifted = x * 1.44269504f + kShift, n = shifted - kShift;
    // The first product is exact: that constant has few bits.
    r = TERMS == 5 ? (x - n * 0.693145752f) - n * 1.42860677e-6f : x - n * 0.693147181f;
    p = in_all(TERMS == 5 ? kMost[4] : kFew[2]);
#pragma GCC unroll 8
    for (int i = TERMS - 2; i >= 0; --i) p = p * r + (TERMS == 5 ? kMost[i] : kFew[i]);
    V<int32_t> bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits <<= 23;
    std::memcpy(&scale, &bits, sizeof bits);
  }
  // Of exp(r), to more digits than 1 + that has.
  V<float> less_one() const { return p * r * r + r; }
  V<float> plus_one() const { return scale * ((p * r + 1.f) * r + 1.f) + 1.f; }
};

// exp by range reduction and Taylor terms, to 1e-16.
inline V<double> vexp(V<double> x) {
  using VI = V<int64_t>;
  const V<double> lo = V<double>{} - 708., hi = V<double>{} + 709.;
  const V<double> clamped = x < lo ? lo : (x > hi ? hi : x);
  const V<double> magic = V<double>{} + 6755399441055744.;
  const V<double> rounded = clamped * 1.4426950408889634 + magic, n = rounded - magic;
  const V<double> r = (clamped - n * 6.93147180369123816490e-1) - n * 1.90821492927058770002e-10;
  V<double> p = V<double>{} + 1. / 6227020800.;
  constexpr double kTerms[] = {1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120, 1. / 24, 1. / 6, .5, 1., 1.};
  for (const double term : kTerms) p = p * r + term;
  VI e;
  std::memcpy(&e, &rounded, sizeof e);
  e = (e + 1023) << 52;  // the low bits of `rounded` are n
  V<double> scale;
  std::memcpy(&scale, &e, sizeof e);
  return x > hi ? V<double>{} + HUGE_VAL : p * scale;
}

inline V<double> silu(V<double> v) { return v / (1 + vexp(-v)); }
inline V<double> silu_backward(V<double> dy, V<double> v) {
  const V<double> s = 1 / (1 + vexp(-v));
  return dy * s * (1 + v * (1 - s));
}

inline V<float> at_least_in_range(V<float> v) { return at_least(in_all(-kExpRange), v); }
inline V<float> in_range(V<float> v) { return at_most(in_all(kExpRange), at_least_in_range(v)); }

// To 2^-14, for what is rounded to 16 bits.
inline V<float> rough_silu(V<float> v) { return at_least_in_range(v) * reciprocal(Exp<3>(-in_range(v)).plus_one()); }
inline V<float> rough_silu_backward(V<float> dy, V<float> v) {
  const V<float> c = in_range(v);
  const Exp<3> e(-c);
  const V<float> s = 1 / e.plus_one();
  return dy * s * (1 + c * (1 - s));
}

// SiLU of fp32, errors like those of PyTorch's or smaller.
inline V<float> exact_silu(V<float> v) { return at_least_in_range(v) / Exp<5>(-in_range(v)).plus_one(); }
inline V<float> exact_silu_backward(V<float> dy, V<float> value) {
  const V<float> v = in_range(value), one = in_all(1.f);
  const Exp<5> e(-v);
  const V<float> q = e.less_one();
  // The sigmoid in two parts.
  const V<float> power = e.scale + one, other = power - one, lost = (one - (power - other)) + (e.scale - other);
  const V<float> s = one / (e.scale * q + power), s_tail = -(fused_difference(s, power, one) + s * (e.scale * q + lost)) * s;
  // The slope is s + s * v * (1 - s).
  const V<float> c = one - s, c_tail = (one - c) - s - s_tail;
  const V<float> vs = v * s, vs_tail = fused_difference(v, s, vs) + v * s_tail;
  const V<float> product = vs * c, product_tail = fused_difference(vs, c, product) + (vs * c_tail + vs_tail * c);
  const V<float> slope = s + product, added = slope - s;
  const V<float> slope_tail = (s - (slope - added)) + (product - added) + (s_tail + product_tail);
  const V<float> g = dy * slope;
  return g + (fused_difference(dy, slope, g) + dy * slope_tail);
}

template <typename T, typename A>
inline V<A> silu_of(V<A> v) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<A, float>) return exact_silu(v);
  else if constexpr (std::is_same_v<A, float>) return rough_silu(v);
  else return silu(v);
}
template <typename T, typename A>
inline V<A> silu_backward_of(V<A> dy, V<A> v) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<A, float>) return exact_silu_backward(dy, v);
  else if constexpr (std::is_same_v<A, float>) return rough_silu_backward(dy, v);
  else return silu_backward(dy, v);
}

template <typename T>
inline V<Acc<T>> vload_as(const T* p) {
  using A = Acc<T>;
  if constexpr (std::is_same_v<T, A>) {
    return vload(p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
#if FUSE_VECTOR_BYTES == 64
    const V<uint32_t> wide = (V<uint32_t>)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))) << 16;
#else
    V16 raw;
    std::memcpy(&raw, p, sizeof raw);
    const V<uint32_t> wide = __builtin_convertvector(raw, V<uint32_t>) << 16;
#endif
    V<float> out;
    std::memcpy(&out, &wide, sizeof out);
    return out;
  } else {
#if FUSE_VECTOR_BYTES == 64
    return (V<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return (V<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    V<A> out;
    for (int i = 0; i < VecOf<A>::kSize; ++i) out[i] = load(p[i]);
    return out;
#endif
  }
}

template <typename T>
inline void vstore_as(T* p, V<Acc<T>> v) {
  using A = Acc<T>;
  if constexpr (std::is_same_v<T, A>) {
    vstore(p, v);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    using V32 = V<uint32_t>;
    V32 u;
    std::memcpy(&u, &v, sizeof u);
    V32 rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    const V32 nan = (V32)(v != v);
    rounded = (nan & 0x7fc0u) | (~nan & rounded);
#if FUSE_VECTOR_BYTES == 64
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)rounded));
#else
    const V16 narrow = __builtin_convertvector(rounded, V16);
    std::memcpy(p, &narrow, sizeof narrow);
#endif
  } else {
#if FUSE_VECTOR_BYTES == 64
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < VecOf<A>::kSize; ++i) p[i] = to_storage<T>(v[i]);
#endif
  }
}

}  // namespace
}  // namespace fusebackend::conv1d
