// The CPU loop under both operations. Work is cut into blocks of o (the output's innermost dimension) x q (the dimension along which an
// input is contiguous; the output's next one where there is none). An input that is not contiguous along o is transposed in squares that
// fit in registers. A block is as wide in q as a cache line of the input and long in o: every line is read and written once however
// large the strides are, and the few output rows are written as streams.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu.h"

namespace fusebackend::tile {

constexpr int64_t kBlockElements = 4096;  // a block where nothing is transposed
constexpr int64_t kLineBytes = 64;        // where something is: a block's extent in q,
constexpr int64_t kTileLength = 1024;     // and in o
constexpr int64_t kTileBytes = 32768;     // such a block where a dimension is shorter

// The second dimension of blocks, 0 for none, and their elements along both. Where one dimension is short, the other is longer.
inline int block_dim(const Plan& plan) { return plan.route == Route::kTiles ? plan.staged_dim : plan.problem.rank > 1 ? 1 : 0; }

struct BlockShape {
  int64_t o, q;
};
inline BlockShape block_shape(const Plan& plan) {
  const Problem& p = plan.problem;
  const int dim = block_dim(plan);
  const bool tiles = plan.route == Route::kTiles;
  const int64_t elements = tiles ? kTileBytes / p.element_bytes : kBlockElements;
  const int64_t q_size = dim ? p.sizes[dim] : 1;
  const int64_t line = kLineBytes / p.element_bytes;
  if (tiles && p.sizes[0] >= line && q_size >= line) return {std::min(p.sizes[0], kTileLength), line};
  const int64_t o = std::min(p.sizes[0], std::max(tiles ? elements / 64 : elements, elements / q_size));
  return {o, std::min(q_size, std::max<int64_t>(1, elements / o))};
}

// Calls body(block, offsets of the block's first element by Role in bytes) for units [begin, end).
struct Block {
  int64_t o, q;        // elements
  int64_t offset[3];   // bytes, by Role
};
template <typename Body>
void for_blocks(const Plan& plan, int64_t begin, int64_t end, Body body) {
  const Problem& p = plan.problem;
  const BlockShape shape = block_shape(plan);
  const int q = block_dim(plan);
  // An odometer over blocks of o, blocks of q, then the other dimensions.
  int rank = 0;
  int64_t count[kMaxRank + 1], step[3][kMaxRank + 1], digit[kMaxRank + 1];
  const auto push = [&](int dim, int64_t block) {
    count[rank] = (p.sizes[dim] + block - 1) / block;
    for (int r = 0; r < p.operands; ++r) step[r][rank] = p.strides[r][dim] * block * p.element_bytes;
    ++rank;
  };
  push(0, shape.o);
  if (q) push(q, shape.q);
  for (int d = 1; d < p.rank; ++d)
    if (d != q) push(d, 1);

  int64_t rest = begin;
  Block block = {};
  for (int d = 0; d < rank; ++d) {
    digit[d] = rest % count[d];
    rest /= count[d];
    for (int r = 0; r < p.operands; ++r) block.offset[r] += digit[d] * step[r][d];
  }
  for (int64_t unit = begin; unit < end; ++unit) {
    block.o = std::min(shape.o, p.sizes[0] - digit[0] * shape.o);
    block.q = q ? std::min(shape.q, p.sizes[q] - digit[1] * shape.q) : 1;
    body(block);
    for (int d = 0; d < rank; ++d) {
      for (int r = 0; r < p.operands; ++r) block.offset[r] += step[r][d];
      if (++digit[d] < count[d]) break;
      for (int r = 0; r < p.operands; ++r) block.offset[r] -= count[d] * step[r][d];
      digit[d] = 0;
    }
  }
}

// N x N elements, N = 16 / sizeof(E), by log2(N) rounds of interleaving 16-byte vectors. Calls store(i, vector) for each transposed row.
template <typename E>
struct SquareTranspose {
  static constexpr int kN = 16 / sizeof(E);

  static __m128i low(__m128i x, __m128i y) {
    if constexpr (kN == 16) return _mm_unpacklo_epi8(x, y);
    else if constexpr (kN == 8) return _mm_unpacklo_epi16(x, y);
    else if constexpr (kN == 4) return _mm_unpacklo_epi32(x, y);
    else return _mm_unpacklo_epi64(x, y);
  }
  static __m128i high(__m128i x, __m128i y) {
    if constexpr (kN == 16) return _mm_unpackhi_epi8(x, y);
    else if constexpr (kN == 8) return _mm_unpackhi_epi16(x, y);
    else if constexpr (kN == 4) return _mm_unpackhi_epi32(x, y);
    else return _mm_unpackhi_epi64(x, y);
  }

  template <typename Store>
  static void run(const char* from, int64_t from_stride, Store store) {
    __m128i a[kN], b[kN];
#pragma GCC unroll 16
    for (int i = 0; i < kN; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
#pragma GCC unroll 4
    for (int round = 1; round < kN; round *= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < kN / 2; ++i) {
        b[2 * i] = low(a[i], a[i + kN / 2]);
        b[2 * i + 1] = high(a[i], a[i + kN / 2]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kN; ++i) a[i] = b[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kN; ++i) store(i, a[i]);
  }
};

// 8 x 8 elements of four bytes, in 32-byte vectors.
template <>
struct SquareTranspose<uint32_t> {
  static constexpr int kN = 8;

  template <typename Store>
  static void run(const char* from, int64_t from_stride, Store store) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * from_stride));
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

// A strided two-dimensional copy by elements. Arguments by value: through references, every store might change them.
template <typename E>
void copy_elements(const char* from, int64_t from_o, int64_t from_q, char* to, int64_t to_o, int64_t to_q, int64_t o_count,
                   int64_t q_count) {
  // The shorter loop inside would cost more than it saves.
  if (o_count < q_count) {
    std::swap(from_o, from_q);
    std::swap(to_o, to_q);
    std::swap(o_count, q_count);
  }
  for (int64_t q = 0; q < q_count; ++q) {
    const char* source = from + q * from_q;
    char* target = to + q * to_q;
#pragma GCC unroll 8
    for (int64_t o = 0; o < o_count; ++o) std::memcpy(target + o * to_o, source + o * from_o, sizeof(E));
  }
}

// memcpy for rows that are mostly short: a call costs as much as the copy.
inline void copy_row(char* to, const char* from, int64_t bytes) {
  typedef char Vector __attribute__((vector_size(32), aligned(1), may_alias));
  constexpr int64_t kBytes = sizeof(Vector);
  if (bytes < kBytes || bytes > 4096) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i + kBytes <= bytes; i += kBytes) *reinterpret_cast<Vector*>(to + i) = *reinterpret_cast<const Vector*>(from + i);
  const int64_t last = bytes - kBytes;  // overlaps what was copied
  *reinterpret_cast<Vector*>(to + last) = *reinterpret_cast<const Vector*>(from + last);
}

// Whether transpose_squares serves a block of an input with these strides.
template <typename E>
bool has_squares(int64_t from_q, int64_t o_count, int64_t q_count) {
  constexpr int64_t kN = SquareTranspose<E>::kN;
  return kN > 1 && from_q == int64_t(sizeof(E)) && o_count >= kN && q_count >= kN;
}

// Calls put(q, o, vector) with elements (o ... o + kN - 1) of column q, until all are covered; the last squares may overlap others.
// Whole lines of a few output rows at a time: rows whose distance is a power of two share cache sets, so half a line would be lost again.
// The input's lines are in as many pages, which no hardware prefetches.
template <typename E, typename Put>
void transpose_squares(const char* from, int64_t from_o, int64_t o_count, int64_t q_count, Put put) {
  constexpr int64_t kN = SquareTranspose<E>::kN, kLine = kLineBytes / int64_t(sizeof(E));
  for (int64_t line = 0; line < o_count; line += kLine) {
    const int64_t end = std::min(o_count, line + kLine);
    for (int64_t o = end; o < std::min(o_count, end + kLine); ++o) __builtin_prefetch(from + o * from_o);
    for (int64_t q = 0; q < q_count; q += kN) {
      q = std::min(q, q_count - kN);
      for (int64_t o = line; o < end; o += kN) {
        o = std::min(o, o_count - kN);
        SquareTranspose<E>::run(from + o * from_o + q * int64_t(sizeof(E)), from_o, [&](int i, auto vector) { put(q + i, o, vector); });
      }
    }
  }
}

// to[q][o] = from[o][q]: rows of `to` are contiguous and `to_stride` bytes apart.
template <typename E>
void transpose_block(const char* from, int64_t from_o, int64_t from_q, char* to, int64_t to_stride, int64_t o_count, int64_t q_count) {
  constexpr int64_t kW = sizeof(E);
  if (!has_squares<E>(from_q, o_count, q_count)) return copy_elements<E>(from, from_o, from_q, to, kW, to_stride, o_count, q_count);
  if constexpr (SquareTranspose<E>::kN > 1)
    transpose_squares<E>(from, from_o, o_count, q_count,
                         [&](int64_t q, int64_t o, auto vector) { std::memcpy(to + q * to_stride + o * kW, &vector, sizeof vector); });
}

// Rows of an input's block as contiguous memory: its own, or `buffer` filled from it.
struct Rows {
  const char* data;
  int64_t stride;  // bytes between rows
};
template <typename E>
Rows block_rows(const Plan& plan, Role role, const Block& block, char* buffer) {
  const Problem& p = plan.problem;
  constexpr int64_t kW = sizeof(E);
  const char* from = p.data[role] + block.offset[role];
  const int64_t o_step = p.strides[role][0] * kW, q_step = block.q > 1 ? p.strides[role][block_dim(plan)] * kW : 0;
  if (o_step == kW || block.o == 1) return {from, q_step};
  const int64_t stride = block.o * kW;  // rows are packed, so that short ones may be taken as one
  if (o_step == 0) {
    const int64_t rows = q_step == 0 ? 1 : block.q;
    for (int64_t q = 0; q < rows; ++q) {
      E value;
      std::memcpy(&value, from + q * q_step, kW);
      std::fill_n(reinterpret_cast<E*>(buffer + q * stride), block.o, value);
    }
    return {buffer, q_step == 0 ? 0 : stride};
  }
  transpose_block<E>(from, o_step, block.q > 1 ? q_step : kW, buffer, stride, block.o, block.q);
  return {buffer, stride};
}

// Bytes of buffer that block_rows may need.
constexpr int64_t kBlockBytes = 64 * 1024;
static_assert(kBlockElements * 16 <= kBlockBytes && kTileBytes <= kBlockBytes && kTileLength * kLineBytes <= kBlockBytes);

}  // namespace fusebackend::tile
