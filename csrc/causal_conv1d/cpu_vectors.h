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

// x = n ln2 + r + tail, |r| <= ln2/2, for exp(x) = 2^n exp(r + tail). A NaN goes to r. Beyond fp32's range x is brought back into it.
struct Reduced {
  V<float> r, tail, scale;

  explicit Reduced(V<float> x) {
    using VI = V<int32_t>;
    const V<float> clamped = at_most(V<float>{} + 88.7f, at_least(V<float>{} - 87.f, x));
    const V<float> shifted = clamped * 1.44269504f + 12582912.f, n = shifted - 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
    const V<float> near = clamped - n * 0.693145752f;  // exact: that constant has few bits
    const V<float> rest = n * -1.42860677e-6f;
    r = near + rest;
    tail = rest - (r - near);
    VI e;
    std::memcpy(&e, &shifted, sizeof e);
    e = (e + 127) << 23;  // the low bits of `shifted` are n
    std::memcpy(&scale, &e, sizeof e);
  }
};

// (exp(r) - 1 - r) / r^2 to TERMS Taylor terms.
template <int TERMS>
inline V<float> exp_remainder(V<float> r) {
  constexpr float kTerms[] = {1.f / 2, 1.f / 6, 1.f / 24, 1.f / 120, 1.f / 720, 1.f / 5040, 1.f / 40320};
  V<float> p = V<float>{} + kTerms[TERMS - 1];
#pragma GCC unroll 8
  for (int i = TERMS - 2; i >= 0; --i) p = p * r + kTerms[i];
  return p;
}

// To 1e-7, for what is rounded to 16 bits.
inline V<float> vexp(V<float> x) {
  const Reduced d(x);
  const V<float> e = (exp_remainder<5>(d.r) * d.r * d.r + d.r + 1.f) * d.scale;
  return x > V<float>{} + 88.7f ? V<float>{} + HUGE_VALF : e;
}

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

template <typename A>
inline V<A> silu(V<A> v) { return v / (1 + vexp(-v)); }
template <typename A>
inline V<A> silu_backward(V<A> dy, V<A> v) {
  const V<A> s = 1 / (1 + vexp(-v));
  return dy * s * (1 + v * (1 - s));
}

// The sigmoid of fp32 as head + tail, to 2^-28: its rounding is not to be seen beside that of the result.
struct Sigmoid {
  V<float> head, tail;

  explicit Sigmoid(V<float> v) {
    const Reduced d(-v);
    // 1 + exp(r) in two parts, then 1 + 2^n of that.
    const V<float> one = V<float>{} + 1.f, square = exp_remainder<7>(d.r) * d.r * d.r, t = d.r + square, top = one + t;
    const V<float> low = t - (top - one) + (square - (t - d.r) + (d.tail + d.tail * d.r));
    const V<float> a = top * d.scale, sum = one + a, other = sum - one;
    const V<float> left = (one - (sum - other)) + (a - other) + low * d.scale;
    head = one / sum;
    tail = (-fused_difference(head, sum, one) - head * left) * head;
  }
};
inline V<float> exact_silu(V<float> v) {
  const Sigmoid s(v);
  const V<float> y = v * s.head, corrected = y + (fused_difference(v, s.head, y) + v * s.tail);
  return corrected == corrected ? corrected : y;  // an infinity
}
inline V<float> exact_silu_backward(V<float> dy, V<float> v) {
  const Sigmoid s(v);
  // The slope is s + s * v * (1 - s).
  const V<float> one = V<float>{} + 1.f, c = one - s.head, c_tail = (one - c) - s.head - s.tail;
  const V<float> vs = v * s.head, vs_tail = fused_difference(v, s.head, vs) + v * s.tail;
  const V<float> product = vs * c, product_tail = fused_difference(vs, c, product) + (vs * c_tail + vs_tail * c);
  const V<float> slope = s.head + product, other = slope - s.head;
  const V<float> slope_tail = (s.head - (slope - other)) + (product - other) + (s.tail + product_tail);
  const V<float> g = dy * slope;
  const V<float> corrected = g + (fused_difference(dy, slope, g) + dy * slope_tail);
  return corrected == corrected ? corrected : g;
}

template <typename T, typename A>
inline V<A> silu_of(V<A> v) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<A, float>) return exact_silu(v);
  else return silu<A>(v);
}
template <typename T, typename A>
inline V<A> silu_backward_of(V<A> dy, V<A> v) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<A, float>) return exact_silu_backward(dy, v);
  else return silu_backward<A>(dy, v);
}

template <typename T>
inline V<Acc<T>> vload_as(const T* p) {
  using A = Acc<T>;
  if constexpr (std::is_same_v<T, A>) {
    return vload(p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    using V32 = V<uint32_t>;
    V16 raw;
    std::memcpy(&raw, p, sizeof raw);
    const V32 wide = __builtin_convertvector(raw, V32) << 16;
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
    const V16 narrow = __builtin_convertvector(rounded, V16);
    std::memcpy(p, &narrow, sizeof narrow);
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
