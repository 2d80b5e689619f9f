#include <immintrin.h>

#include <type_traits>

#include "cpu_blocks.h"

namespace fusebackend::tile {
namespace {

// out[i] = a[i] + alpha * b[i] over contiguous, possibly unaligned memory. -ffp-contract=fast makes the floating forms one fma.
template <typename T>
struct Arithmetic {
  using Element = T;
  using Scalar = std::conditional_t<std::is_floating_point_v<T> || sizeof(T) == 8, T, uint32_t>;
  static void add(T* __restrict out, const T* a, const T* b, int64_t n, Scalar alpha) {
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (std::is_same_v<T, double>) out[i] = __builtin_fma(alpha, b[i], a[i]);
      else if constexpr (std::is_same_v<T, float>) out[i] = __builtin_fmaf(alpha, b[i], a[i]);
      else out[i] = T(a[i] + alpha * b[i]);
    }
  }
};

struct Half {
  using Element = uint16_t;
  using Scalar = float;
  static __m256 widen(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static __m128i add8(const uint16_t* a, const uint16_t* b, __m256 alpha) {
    return _mm256_cvtps_ph(_mm256_fmadd_ps(alpha, widen(b), widen(a)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

struct BFloat16 {
  using Element = uint16_t;
  using Scalar = float;
  static __m256 widen(const uint16_t* p) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  // To nearest, ties to even; NaN to the canonical one.
  static __m128i narrow(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    const __m256i packed = _mm256_packus_epi32(rounded, rounded);  // within each half
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
  static __m128i add8(const uint16_t* a, const uint16_t* b, __m256 alpha) { return narrow(_mm256_fmadd_ps(alpha, widen(b), widen(a))); }
};

// 16-bit floats: eight at a time in fp32; a tail shorter than eight goes through buffers.
template <typename Format>
struct Reduced : Format {
  static void add(uint16_t* out, const uint16_t* a, const uint16_t* b, int64_t n, float alpha) {
    const __m256 factor = _mm256_set1_ps(alpha);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), Format::add8(a + i, b + i, factor));
    if (i == n) return;
    uint16_t x[8] = {}, y[8] = {}, z[8];
    std::memcpy(x, a + i, (n - i) * 2);
    std::memcpy(y, b + i, (n - i) * 2);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(z), Format::add8(x, y, factor));
    std::memcpy(out + i, z, (n - i) * 2);
  }
};

template <typename Arithmetic, typename Real>
void add_as(const Plan& plan, Real alpha, int64_t begin, int64_t end) {
  using T = typename Arithmetic::Element;
  using E = std::conditional_t<sizeof(T) == 1, uint8_t,
            std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
  const Problem& p = plan.problem;
  const auto factor = static_cast<typename Arithmetic::Scalar>(alpha);
  constexpr int64_t kW = sizeof(T);
  alignas(64) char buffer[2][kBlockBytes];
  alignas(64) T scattered[kBlockElements];  // rows of an output that is not contiguous
  const int64_t out_o = p.strides[kOut][0] * kW, out_q = p.strides[kOut][block_dim(plan)] * kW;
  for_blocks(plan, begin, end, [&](const Block& block) {
    const Rows a = block_rows<E>(plan, kA, block, buffer[0]), b = block_rows<E>(plan, kB, block, buffer[1]);
    char* out = p.data[kOut] + block.offset[kOut];
    const auto add = [&](T* to, int64_t q, int64_t n) {
      Arithmetic::add(to, reinterpret_cast<const T*>(a.data + q * a.stride), reinterpret_cast<const T*>(b.data + q * b.stride), n, factor);
    };
    const int64_t row = block.o * kW;
    if (out_o == kW && out_q == row && a.stride == row && b.stride == row) return add(reinterpret_cast<T*>(out), 0, block.o * block.q);
    for (int64_t q = 0; q < block.q; ++q) {
      if (out_o == kW) {
        add(reinterpret_cast<T*>(out + q * out_q), q, block.o);
      } else {
        add(scattered, q, block.o);
        copy_elements<E>(reinterpret_cast<char*>(scattered), kW, 0, out + q * out_q, out_o, 0, block.o, 1);
      }
    }
  });
}

}  // namespace

void add_cpu(const Plan& plan, AddType type, Alpha alpha, int64_t begin, int64_t end) {
  switch (type) {
    case AddType::kF64: return add_as<Arithmetic<double>>(plan, alpha.real, begin, end);
    case AddType::kF32: return add_as<Arithmetic<float>>(plan, alpha.real, begin, end);
    case AddType::kF16: return add_as<Reduced<Half>>(plan, alpha.real, begin, end);
    case AddType::kBF16: return add_as<Reduced<BFloat16>>(plan, alpha.real, begin, end);
    case AddType::kI8: return add_as<Arithmetic<uint8_t>>(plan, alpha.integer, begin, end);
    case AddType::kI16: return add_as<Arithmetic<uint16_t>>(plan, alpha.integer, begin, end);
    case AddType::kI32: return add_as<Arithmetic<uint32_t>>(plan, alpha.integer, begin, end);
    case AddType::kI64: return add_as<Arithmetic<uint64_t>>(plan, alpha.integer, begin, end);
  }
}

}  // namespace fusebackend::tile
