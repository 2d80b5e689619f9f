// A block's products of 16-bit elements, on tensor cores. Fragments are read with ldmatrix where terms or rows are neighbours. Where batch entries
// are, a thread reads the vectors of two neighbouring terms and exchanges halves of words: these are fragments of all eight entries. It has the same
// elements of the result for all entries; where the batch is innermost in the result they are vectors, and wait for those of other entries in shared
// memory, so that memory is written in long runs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/fragments.cuh"
#include "strided_bmm/tiles.cuh"

namespace fusebackend::strided_bmm {

using attention::Half2;
using attention::ldmatrix;
using attention::ldmatrix_transposed;
using attention::mma;

// 16 rows and 16 terms of a tile's entry.
template <typename Tile, Inner kInner>
__device__ __forceinline__ void left_fragment(uint32_t (&a)[4], uint32_t tile, int row, int k16) {
  const int lane = threadIdx.x % 32;
  if constexpr (kInner == Inner::kTerms) ldmatrix(a, tile + Tile::term_offset(row + lane % 16, 2 * k16 + lane / 16));
  else ldmatrix_transposed(a, tile + Tile::row_offset(16 * k16 + lane / 16 * 8 + lane % 8, row / 8 + lane / 8 % 2));
}

// For the columns from `row` and from `row` + 8: rows of a tile's entry.
template <typename Tile, Inner kInner>
__device__ __forceinline__ void right_fragments(uint32_t (&b)[4], uint32_t tile, int row, int k16) {
  const int lane = threadIdx.x % 32;
  if constexpr (kInner == Inner::kTerms) ldmatrix(b, tile + Tile::term_offset(row + lane / 16 * 8 + lane % 8, 2 * k16 + lane / 8 % 2));
  else ldmatrix_transposed(b, tile + Tile::row_offset(16 * k16 + lane / 8 % 2 * 8 + lane % 8, row / 8 + lane / 16));
}

// Terms `term` and `term` + 1 of a row as a register for each entry.
template <typename Tile>
__device__ __forceinline__ void read_pairs(uint32_t (&to)[kTileEntries], uint32_t tile, int row, int term) {
  uint32_t low[4], high[4];
  read_vector(low, tile + Tile::batch_offset(row, term, 0));
  read_vector(high, tile + Tile::batch_offset(row, term + 1, 0));
#pragma unroll
  for (int j = 0; j < 4; ++j) to[2 * j] = __byte_perm(low[j], high[j], 0x5410), to[2 * j + 1] = __byte_perm(low[j], high[j], 0x7632);
}

// Word i of lane j of four neighbours becomes word j of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t received = __shfl_xor_sync(0xffffffffu, lane & 1 ? w[j] : w[j + 1], 1);
    w[j] = lane & 1 ? received : w[j], w[j + 1] = lane & 1 ? w[j + 1] : received;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t received = __shfl_xor_sync(0xffffffffu, lane & 2 ? w[j] : w[j + 2], 2);
    w[j] = lane & 2 ? received : w[j], w[j + 2] = lane & 2 ? w[j + 2] : received;
  }
}

template <typename Traits>
struct MmaProducts {
  using T = typename Traits::T;
  using TileX = typename Traits::TileX;
  using TileY = typename Traits::TileY;
  static constexpr bool kIsStaged = Traits::kRoute == Route::kToBatch;
  static constexpr int kWarpRows = Traits::kTileRows / 16, kWarpColumns = Traits::kThreads / 32 / kWarpRows;
  static constexpr int kN8 = Traits::kTileColumns / kWarpColumns / 8;  // results of 16 x 8 of a warp
  static_assert(kN8 % (kIsStaged ? 2 : 4) == 0);

  // A row of the result that waits for all its batch entries, in vectors: an odd number, so that neighbouring rows are in other banks.
  static __host__ __device__ constexpr int staged_row(int span) { return (Traits::kTileColumns * span) | 1; }
  static __host__ __device__ constexpr int staged_bytes(int span) { return kIsStaged ? Traits::kTileRows * staged_row(span) * 16 : 0; }

  float sums[Traits::kEntries][kN8][4] = {};
  const int row = threadIdx.x / 32 % kWarpRows * 16, column = threadIdx.x / 32 / kWarpRows * kN8 * 8;  // the warp's first, in the tile

  // `terms`: how many are left.
  __device__ __forceinline__ void add_entry(int e, uint32_t stage, int terms) {
#pragma unroll
    for (int k16 = 0; k16 < Traits::kDepth / 16; ++k16) {
      if (k16 * 16 >= terms) break;
      uint32_t a[4];
      left_fragment<TileX, Traits::kX>(a, stage, row, k16);
#pragma unroll
      for (int j = 0; j < kN8; j += 2) {
        uint32_t b[4];
        right_fragments<TileY, Traits::kY>(b, stage + TileX::kBytes, column + 8 * j, k16);
        mma<T>(sums[e][j], a, b[0], b[1]);
        mma<T>(sums[e][j + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void add_all(uint32_t stage) {
    static_assert(!Traits::kAllEntries || Traits::kDepth == 16);
    const int lane = threadIdx.x % 32;
    uint32_t a[4][Traits::kEntries];
#pragma unroll
    for (int r = 0; r < 4; ++r) read_pairs<TileX>(a[r], stage, row + lane / 4 + r % 2 * 8, lane % 4 * 2 + r / 2 * 8);
#pragma unroll
    for (int e = 0; e < Traits::kEntries; ++e) {
      const uint32_t left[4] = {a[0][e], a[1][e], a[2][e], a[3][e]};
#pragma unroll
      for (int j = 0; j < kN8; j += 2) {
        uint32_t b[4];
        right_fragments<TileY, Traits::kY>(b, stage + TileX::kBytes + e * TileY::kEntryBytes, column + 8 * j, 0);
        mma<T>(sums[e][j], left, b[0], b[1]);
        mma<T>(sums[e][j + 1], left, b[2], b[3]);
      }
    }
  }

  // To memory, where columns are innermost.
  __device__ __forceinline__ void store(const Problem& p, const Place<Traits>& place) const {
    const int lane = threadIdx.x % 32;
    T* const out = static_cast<T*>(p.out.data) + place.outer * p.out.outer + int64_t(place.group) * Traits::kEntries * p.out.batch;
#pragma unroll
    for (int e = 0; e < Traits::kEntries; ++e) {
#pragma unroll
      for (int part = 0; part < kN8 / 2; ++part) {  // of four results of 16 x 8 the upper or the lower rows
        const int first = part / 2 * 4, half = part % 2;
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = Half2<T>::pack(sums[e][first + i][2 * half], sums[e][first + i][2 * half + 1]);
        transpose_quad(w);
        const int m = place.row + row + lane / 4 + half * 8, n = place.column + column + 8 * (first + lane % 4);
        if (m < p.m && n < p.n) write_vector(out + e * p.out.batch + m * p.out.row + n, w[0], w[1], w[2], w[3]);
      }
    }
  }

  // A vector of batch entries for each element, the `at`-th of `span`, to the rows that wait for all of them.
  __device__ __forceinline__ void stage_result(uint4* staged, int span, int at) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = row + lane / 4 + i / 2 * 8, n = column + 8 * j + lane % 4 * 2 + i % 2;
        uint4 v;
        v.x = Half2<T>::pack(sums[0][j][i], sums[1][j][i]), v.y = Half2<T>::pack(sums[2][j][i], sums[3][j][i]);
        v.z = Half2<T>::pack(sums[4][j][i], sums[5][j][i]), v.w = Half2<T>::pack(sums[6][j][i], sums[7][j][i]);
        staged[m * staged_row(span) + n * span + at] = v;
      }
    }
  }

  static __device__ __forceinline__ void store_staged(const uint4* staged, const Problem& p, const Place<Traits>& place, const Tiles& tiles) {
    T* const out = static_cast<T*>(p.out.data) + place.outer * p.out.outer + int64_t(place.group) * p.span * Traits::kEntries;
    const int row_vectors = min(Traits::kTileColumns, p.n - place.column) * p.span, lane = threadIdx.x % 32;
    for (int m = threadIdx.x / 32; m < Traits::kTileRows && place.row + m < p.m; m += Traits::kThreads / 32) {
      T* const to = out + (place.row + m) * p.out.row + place.column * p.out.column;
      for (int v = lane; v < row_vectors; v += 32) {
        uint32_t n, at;
        tiles.by_span.divmod(v, n, at);
        *reinterpret_cast<uint4*>(to + n * p.out.column + at * Traits::kEntries) = staged[m * staged_row(p.span) + v];
      }
    }
  }
};

}  // namespace fusebackend::strided_bmm
