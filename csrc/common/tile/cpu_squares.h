// Transposition in squares that fit in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/cpu_target.h"

namespace fusebackend::tile {

constexpr int64_t kCpuLineBytes = 64;  // a cache line

// Squares of kN x kN elements, kN = 16 / sizeof(E), by log2(kN) rounds of interleaving 16-byte vectors. `run` reads rows at offsets `rows`,
// in bytes, from `from`, and calls store(i, vector) for each row of the transpose.
template <typename E>
struct SquareTranspose {
  static constexpr int kN = 16 / sizeof(E);

  using Lane = std::conditional_t<(kN > 1), E, uint64_t>;
  typedef Lane Vector __attribute__((vector_size(16)));

  // x[kFrom], y[kFrom], x[kFrom + 1], y[kFrom + 1] ...
  template <int kFrom, int... I>
  static Vector interleave(Vector x, Vector y, std::integer_sequence<int, I...>) {
    return __builtin_shuffle(x, y, Vector{Lane(kFrom + I / 2 + I % 2 * kN)...});
  }

  template <typename Store>
  static void run(const char* from, const int64_t* rows, Store store) {
    constexpr auto kLanes = std::make_integer_sequence<int, kN>();
    Vector a[kN], b[kN];
#pragma GCC unroll 16
    for (int i = 0; i < kN; ++i) std::memcpy(&a[i], from + rows[i], sizeof(Vector));
#pragma GCC unroll 4
    for (int round = 1; round < kN; round *= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < kN / 2; ++i) {
        b[2 * i] = interleave<0>(a[i], a[i + kN / 2], kLanes);
        b[2 * i + 1] = interleave<kN / 2>(a[i], a[i + kN / 2], kLanes);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kN; ++i) a[i] = b[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kN; ++i) store(i, a[i]);
  }
};

#if FUSE_HAS_AVX2
// Squares of 8 x 8 elements of four bytes, in 32-byte vectors.
template <>
struct SquareTranspose<uint32_t> {
  static constexpr int kN = 8;

  template <typename Store>
  static void run(const char* from, const int64_t* rows, Store store) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + rows[i]));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {  // pairs of rows
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {  // fours
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // halves
      b[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
      b[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) store(i, b[i]);
  }
};
#endif

// Calls put(q, o, vector) with elements o ... o + kN - 1 of column q, until all o < o_count and q < q_count are covered; the last squares may
// overlap others. It writes whole cache lines of a few output rows at a time: rows whose distance is a power of two share cache sets, so half
// a line would be evicted before it is complete. The input's lines are prefetched: each is in another page, which the hardware does not.
template <typename E, typename Put>
void transpose_squares(const char* from, const int64_t* rows, int64_t o_count, int64_t q_count, Put put) {
  constexpr int64_t kN = SquareTranspose<E>::kN, kLine = kCpuLineBytes / int64_t(sizeof(E));
  for (int64_t line = 0; line < o_count; line += kLine) {
    const int64_t end = std::min(o_count, line + kLine);
    for (int64_t o = end; o < std::min(o_count, end + kLine); ++o) __builtin_prefetch(from + rows[o]);
    for (int64_t q = 0; q < q_count; q += kN) {
      q = std::min(q, q_count - kN);
      for (int64_t o = line; o < end; o += kN) {
        o = std::min(o, o_count - kN);
        SquareTranspose<E>::run(from + q * int64_t(sizeof(E)), rows + o, [&](int i, auto vector) { put(q + i, o, vector); });
      }
    }
  }
}

}  // namespace fusebackend::tile
