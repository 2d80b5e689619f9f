// out[i] = a[i] + alpha * b[i] over contiguous, possibly unaligned memory, for each type.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cpu_target.h"

namespace fusebackend::transpose_add {

// Of floats and doubles (as PyTorch's kernels, with one fma where the CPU has it) and integers; also of vectors of them, in registers.
template <typename T>
struct Arithmetic {
  using Element = T;
  static constexpr bool kOnVectors = true;
  using Scalar = std::conditional_t<std::is_floating_point_v<T> || sizeof(T) == 8, T, uint32_t>;
  static void add(T* __restrict out, const T* a, const T* b, int64_t n, Scalar alpha) {
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (std::is_floating_point_v<T>) out[i] = fusebackend::multiply_add(alpha, b[i], a[i]);
      else out[i] = T(a[i] + alpha * b[i]);
    }
  }
  template <typename Vector>
  static Vector add(Vector a, Vector b, Scalar alpha) {
    typedef T Elements __attribute__((vector_size(sizeof(Vector))));
    if constexpr (std::is_floating_point_v<T>) {
#if FUSE_HAS_AVX2
      if constexpr (std::is_same_v<T, double>) return (Vector)_mm_fmadd_pd(_mm_set1_pd(alpha), (__m128d)b, (__m128d)a);
      else return (Vector)_mm256_fmadd_ps(_mm256_set1_ps(alpha), (__m256)b, (__m256)a);
#else
      Elements sum = (Elements)a;
      const Elements y = (Elements)b;
      for (int i = 0; i < int(sizeof(Vector) / sizeof(T)); ++i) sum[i] = fusebackend::multiply_add(alpha, T(y[i]), T(sum[i]));
      return (Vector)sum;
#endif
    } else {
      return reinterpret_cast<Vector>(reinterpret_cast<Elements>(a) + T(alpha) * reinterpret_cast<Elements>(b));
    }
  }
};

#if FUSE_HAS_AVX2
// a + alpha * b of 16-bit floats in fp32. The product is rounded, as in PyTorch's and in Inductor's loops: a fused multiply-add would give a
// finite sum where alpha * b overflows. The empty instruction keeps the compiler from fusing them.
inline __m256 multiply_add(__m256 a, __m256 b, __m256 alpha) {
  __m256 product = _mm256_mul_ps(alpha, b);
  asm("" : FUSE_IN_REGISTER(product));
  return _mm256_add_ps(a, product);
}

struct Half {
  using Element = uint16_t;
  using Scalar = float;
  static __m256 widen(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static __m128i add8(const uint16_t* a, const uint16_t* b, __m256 alpha) {
    return _mm256_cvtps_ph(multiply_add(widen(a), widen(b), alpha), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static void add16(uint16_t* out, const uint16_t* a, const uint16_t* b, __m256 alpha) {
    for (int i = 0; i < 16; i += 8) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), add8(a + i, b + i, alpha));
  }
};

struct BFloat16 {
  using Element = uint16_t;
  using Scalar = float;
  static __m256 widen(const uint16_t* p) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  // Rounds to nearest, ties to even, into the upper half of each lane. NaNs are replaced by the canonical one (`nan_or`).
  static __m256i round(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  }
  static __m256i nan_or(__m256i rounded, __m256 x) {
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
  static __m128i add8(const uint16_t* a, const uint16_t* b, __m256 alpha) {
    const __m256 sum = multiply_add(widen(a), widen(b), alpha);
    const __m256i upper = _mm256_srli_epi32(nan_or(round(sum), sum), 16);
    const __m256i packed = _mm256_packus_epi32(upper, upper);  // within each half of the vector
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
  // Even and odd elements apart: nothing has to move between lanes.
  static void add16(uint16_t* out, const uint16_t* a, const uint16_t* b, __m256 alpha) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)), y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
    const auto even_of = [](__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); };
    const auto odd_of = [&](__m256i v) { return _mm256_castsi256_ps(_mm256_and_si256(v, upper)); };
    const __m256 even = multiply_add(even_of(x), even_of(y), alpha), odd = multiply_add(odd_of(x), odd_of(y), alpha);
    __m256i even_bits = round(even), odd_bits = round(odd);
    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(even, odd, _CMP_UNORD_Q)), 0)) {
      even_bits = nan_or(even_bits, even);
      odd_bits = nan_or(odd_bits, odd);
    }
    const __m256i sum = _mm256_blend_epi16(_mm256_srli_epi32(even_bits, 16), odd_bits, 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), sum);
  }
};

// Of 16-bit floats, in fp32, rounded once. `out` overlaps no input, so the last vector may overlap the one before it; fewer than eight
// elements go through buffers.
template <typename Format>
struct HalfArithmetic : Format {
  static constexpr bool kOnVectors = false;
  static void add(uint16_t* out, const uint16_t* a, const uint16_t* b, int64_t n, float alpha) {
    const __m256 factor = _mm256_set1_ps(alpha);
    const auto add8 = [&](uint16_t* to, const uint16_t* x, const uint16_t* y) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), Format::add8(x, y, factor));
    };
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) Format::add16(out + i, a + i, b + i, factor);
    if (i == n) return;
    if (n >= 8) {
      if (i + 8 < n) add8(out + i, a + i, b + i);
      return add8(out + n - 8, a + n - 8, b + n - 8);
    }
    uint16_t x[8] = {}, y[8] = {}, z[8];
    std::memcpy(x, a, n * 2);
    std::memcpy(y, b, n * 2);
    add8(z, x, y);
    std::memcpy(out, z, n * 2);
  }
};
#else
// The same, by the vector extensions.
typedef float Floats __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
constexpr int kFloats = 4;

struct Half {
  using Element = uint16_t;
  using Scalar = float;
  static Floats widen(const uint16_t* p) {
    Floats v = {};
    for (int i = 0; i < kFloats; ++i) v[i] = half_to_float(p[i]);
    return v;
  }
  static void round(uint16_t* out, Floats v) {
    for (int i = 0; i < kFloats; ++i) out[i] = float_to_half(v[i]);
  }
};

struct BFloat16 {
  using Element = uint16_t;
  using Scalar = float;
  static Floats widen(const uint16_t* p) { return (Floats)(Words{p[0], p[1], p[2], p[3]} << 16); }
  static void round(uint16_t* out, Floats v) {
    const Words bits = (Words)v, nan = (Words)(v != v), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const Words chosen = (nan & 0x7fc0u) | (~nan & rounded);
    for (int i = 0; i < kFloats; ++i) out[i] = static_cast<uint16_t>(chosen[i]);
  }
};

template <typename Format>
struct HalfArithmetic : Format {
  static constexpr bool kOnVectors = false;
  static void add4(uint16_t* out, const uint16_t* a, const uint16_t* b, float alpha) {
    Floats product = alpha * Format::widen(b);
    asm("" : FUSE_IN_REGISTER(product));  // rounded, as above
    Format::round(out, Format::widen(a) + product);
  }
  static void add(uint16_t* out, const uint16_t* a, const uint16_t* b, int64_t n, float alpha) {
    int64_t i = 0;
    for (; i + kFloats <= n; i += kFloats) add4(out + i, a + i, b + i, alpha);
    if (i == n) return;
    uint16_t x[kFloats] = {}, y[kFloats] = {}, z[kFloats];
    std::memcpy(x, a + i, (n - i) * 2);
    std::memcpy(y, b + i, (n - i) * 2);
    add4(z, x, y, alpha);
    std::memcpy(out + i, z, (n - i) * 2);
  }
};
#endif

}  // namespace fusebackend::transpose_add
