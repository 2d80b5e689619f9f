#include <immintrin.h>

#include <type_traits>

#include "cpu_blocks.h"

namespace fusebackend::tile {
namespace {

// out[i] = a[i] + alpha * b[i] over contiguous, possibly unaligned memory. -ffp-contract=fast makes the floating forms one fma.
template <typename T>
struct Arithmetic {
  using Element = T;
  static constexpr bool kOnVectors = true;
  using Scalar = std::conditional_t<std::is_floating_point_v<T> || sizeof(T) == 8, T, uint32_t>;
  static void add(T* __restrict out, const T* a, const T* b, int64_t n, Scalar alpha) {
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (std::is_same_v<T, double>) out[i] = __builtin_fma(alpha, b[i], a[i]);
      else if constexpr (std::is_same_v<T, float>) out[i] = __builtin_fmaf(alpha, b[i], a[i]);
      else out[i] = T(a[i] + alpha * b[i]);
    }
  }
  template <typename Vector>
  static Vector add(Vector a, Vector b, Scalar alpha) {
    if constexpr (std::is_same_v<T, double>) {
      return _mm_castpd_si128(_mm_fmadd_pd(_mm_set1_pd(alpha), _mm_castsi128_pd(b), _mm_castsi128_pd(a)));
    } else if constexpr (std::is_same_v<T, float>) {
      return _mm256_fmadd_ps(_mm256_set1_ps(alpha), b, a);
    } else {
      typedef T Elements __attribute__((vector_size(sizeof(Vector))));
      return reinterpret_cast<Vector>(reinterpret_cast<Elements>(a) + T(alpha) * reinterpret_cast<Elements>(b));
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
  // To nearest, ties to even, in the upper half of each; NaN to the canonical one.
  static __m256i round(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  }
  static __m256i nan_or(__m256i rounded, __m256 x) {
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
  static __m128i add8(const uint16_t* a, const uint16_t* b, __m256 alpha) {
    const __m256 sum = _mm256_fmadd_ps(alpha, widen(b), widen(a));
    const __m256i upper = _mm256_srli_epi32(nan_or(round(sum), sum), 16);
    const __m256i packed = _mm256_packus_epi32(upper, upper);  // within each half
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
  // Even and odd elements apart: nothing has to change places.
  static void add16(uint16_t* out, const uint16_t* a, const uint16_t* b, __m256 alpha) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)), y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
    const auto even_of = [](__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); };
    const auto odd_of = [&](__m256i v) { return _mm256_castsi256_ps(_mm256_and_si256(v, upper)); };
    const __m256 even = _mm256_fmadd_ps(alpha, even_of(y), even_of(x)), odd = _mm256_fmadd_ps(alpha, odd_of(y), odd_of(x));
    __m256i even_bits = round(even), odd_bits = round(odd);
    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(even, odd, _CMP_UNORD_Q)), 0)) {
      even_bits = nan_or(even_bits, even);
      odd_bits = nan_or(odd_bits, odd);
    }
    const __m256i sum = _mm256_blend_epi16(_mm256_srli_epi32(even_bits, 16), odd_bits, 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), sum);
  }
};

// 16-bit floats in fp32. `out` overlaps no input, so a last vector may overlap the one before; fewer than eight go through buffers.
template <typename Format>
struct Reduced : Format {
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

// Rows of a block as contiguous memory.
struct Rows {
  const char* data;
  int64_t stride;  // bytes
};

constexpr int64_t kBufferBytes = 96 * 1024;

// In squares: an operand that is contiguous along o as it is; in `buffer` one that is constant along it or has to be transposed.
template <typename E>
Rows block_rows(const Plan& plan, const Cut& cut, const Table (&tables)[2], Role role, const Block& block, char* buffer) {
  constexpr int64_t kW = sizeof(E);
  const Problem& p = plan.problem;
  const char* from = p.data[role] + block.offset[role];
  const int64_t from_q = p.strides[role][cut.q] * kW, stride = block.run * kW;
  if (is_dense(plan, cut, role)) return {from, from_q};
  if (is_constant(plan, cut, role)) {
    for (int64_t q = 0; q < block.rows; ++q) {
      E value;
      std::memcpy(&value, from + q * from_q, kW);
      std::fill_n(reinterpret_cast<E*>(buffer + q * stride), block.run, value);
    }
  } else {
    transpose_squares<E>(from, tables[role - kA].data(), block.run, block.rows,
                         [&](int64_t q, int64_t o, auto vector) { std::memcpy(buffer + q * stride + o * kW, &vector, sizeof vector); });
  }
  return {buffer, stride};
}

template <typename Arithmetic, typename Real>
void add_as(const Plan& plan, const Cut& cut, Real alpha, int64_t begin, int64_t end) {
  using T = typename Arithmetic::Element;
  using E = std::conditional_t<sizeof(T) == 1, uint8_t,
            std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
  const Problem& p = plan.problem;
  const auto factor = static_cast<typename Arithmetic::Scalar>(alpha);
  constexpr int64_t kW = sizeof(T);
  const int64_t out_q = p.strides[kOut][cut.q] * kW;
  const auto add_rows = [&](char* out, Rows a, Rows b, const Block& block) {
    for (int64_t q = 0; q < block.rows; ++q)
      Arithmetic::add(reinterpret_cast<T*>(out + q * out_q), reinterpret_cast<const T*>(a.data + q * a.stride),
                      reinterpret_cast<const T*>(b.data + q * b.stride), block.run, factor);
  };
  const auto at = [&](Role role, const Block& block) { return p.data[role] + block.offset[role]; };

  const Table tables[2] = {{plan, cut, kA}, {plan, cut, kB}};
  if (cut.movement != Movement::kSquares) {
    alignas(64) char buffer[2][kRun * kW];
    const bool dense[2] = {is_dense(plan, cut, kA), is_dense(plan, cut, kB)};
    for_blocks(plan, cut, begin, end, [&](const Block& block) {
      for (int64_t q = 0; q < block.rows; ++q) {
        const T* rows[2];
        for (int i = 0; i < 2; ++i) {
          const char* from = at(Role(kA + i), block) + q * p.strides[kA + i][cut.q] * kW;
          if (!dense[i]) gather<E>(buffer[i], from, tables[i], block.run, cut.run_rank == 1);
          rows[i] = reinterpret_cast<const T*>(dense[i] ? from : buffer[i]);
        }
        Arithmetic::add(reinterpret_cast<T*>(at(kOut, block) + q * out_q), rows[0], rows[1], block.run, factor);
      }
    });
    return;
  }

  alignas(64) char buffer[2][kBufferBytes];
  for_blocks(plan, cut, begin, end, [&](const Block& block) {
    char* out = at(kOut, block);
    if constexpr (Arithmetic::kOnVectors) {  // added where squares leave the registers
      const bool turned = !is_dense(plan, cut, kA) && !is_constant(plan, cut, kA);  // a; b otherwise
      const Role role = turned ? kA : kB;
      const Rows other = block_rows<E>(plan, cut, tables, turned ? kB : kA, block, buffer[0]);
      const auto squares = [&](auto sum) {
        transpose_squares<E>(at(role, block), tables[role - kA].data(), block.run, block.rows, [&](int64_t q, int64_t o, auto vector) {
          decltype(vector) row;
          std::memcpy(&row, other.data + q * other.stride + o * kW, sizeof row);
          vector = sum(vector, row);
          std::memcpy(out + q * out_q + o * kW, &vector, sizeof vector);
        });
      };
      if (turned) squares([&](auto x, auto y) { return Arithmetic::add(x, y, factor); });
      else squares([&](auto y, auto x) { return Arithmetic::add(x, y, factor); });
    } else {
      const Rows a = block_rows<E>(plan, cut, tables, kA, block, buffer[0]), b = block_rows<E>(plan, cut, tables, kB, block, buffer[1]);
      add_rows(out, a, b, block);
    }
  });
}

}  // namespace

void add_cpu(const Plan& plan, const Cut& cut, AddType type, Alpha alpha, int64_t begin, int64_t end) {
  switch (type) {
    case AddType::kF64: return add_as<Arithmetic<double>>(plan, cut, alpha.real, begin, end);
    case AddType::kF32: return add_as<Arithmetic<float>>(plan, cut, alpha.real, begin, end);
    case AddType::kF16: return add_as<Reduced<Half>>(plan, cut, alpha.real, begin, end);
    case AddType::kBF16: return add_as<Reduced<BFloat16>>(plan, cut, alpha.real, begin, end);
    case AddType::kI8: return add_as<Arithmetic<uint8_t>>(plan, cut, alpha.integer, begin, end);
    case AddType::kI16: return add_as<Arithmetic<uint16_t>>(plan, cut, alpha.integer, begin, end);
    case AddType::kI32: return add_as<Arithmetic<uint32_t>>(plan, cut, alpha.integer, begin, end);
    case AddType::kI64: return add_as<Arithmetic<uint64_t>>(plan, cut, alpha.integer, begin, end);
  }
}

}  // namespace fusebackend::tile
