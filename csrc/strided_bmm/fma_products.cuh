// A block's products in fp32, by fused multiply-adds. A thread has four columns side by side of eight rows for one batch entry, or of four rows for
// eight entries, which x has side by side: a sector of memory.
//
// A few terms, kRun or those of a stage, are added one after another, and then to the sums of the runs before: an error grows with the length of a run
// and the number of runs, not with the number of terms.
#pragma once

#include "strided_bmm/tiles.cuh"

namespace fusebackend::strided_bmm {

template <typename Traits>
struct FmaProducts {
  using TileX = typename Traits::TileX;
  using TileY = typename Traits::TileY;
  static constexpr bool kIsStaged = false;
  static constexpr int kFours = Traits::kTileRows / 32;  // of rows of a thread
  static constexpr int kRun = 16;  // terms
  static_assert(Traits::kTileColumns == Traits::kThreads / 32 * 16);
  static __host__ __device__ constexpr int staged_bytes(int span) { return 0; }

  float sums[Traits::kEntries][4 * kFours][4] = {};
  const int lane_row = threadIdx.x % 32 / 4, column = threadIdx.x / 32 * 16 + threadIdx.x % 4 * 4;

  // Of the i-th of four rows: where lanes read vectors of terms or of batch entries these are of eight neighbouring rows.
  __device__ __forceinline__ int row(int four, int i) const { return four * 32 + (Traits::kX == Inner::kRows ? lane_row * 4 + i : lane_row + 8 * i); }

  // Four rows' four terms from 4 * k4 on.
  template <typename Tile, Inner kInner, typename RowOf>
  static __device__ __forceinline__ void read_block(float (&x)[4][4], uint32_t tile, int k4, RowOf row) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[4];
      read_vector(v, tile + (kInner == Inner::kTerms ? Tile::term_offset(row(i), k4) : Tile::row_offset(4 * k4 + i, row(0) / 4)));
#pragma unroll
      for (int j = 0; j < 4; ++j) (kInner == Inner::kTerms ? x[i][j] : x[j][i]) = v[j];
    }
  }

  __device__ __forceinline__ void add_entry(int e, uint32_t stage, int terms) {
    static_assert(Traits::kEntries == 1 && Traits::kDepth % kRun == 0);
#pragma unroll 1
    for (int first = 0; first < Traits::kDepth; first += kRun) {
      if (first >= terms) break;
      float run[4 * kFours][4] = {};
#pragma unroll 2
      for (int k4 = first / 4; k4 < (first + kRun) / 4; ++k4) {
        if (k4 * 4 >= terms) break;
        float y[4][4];
        read_block<TileY, Traits::kY>(y, stage + TileX::kBytes, k4, [&](int j) { return column + j; });
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
          float x[4][4];
          read_block<TileX, Traits::kX>(x, stage, k4, [&](int i) { return row(four, i); });
#pragma unroll
          for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
              for (int j = 0; j < 4; ++j) run[4 * four + i][j] = fmaf(x[i][t], y[j][t], run[4 * four + i][j]);
        }
      }
#pragma unroll
      for (int r = 0; r < 4 * kFours; ++r)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[e][r][j] += run[r][j];
    }
  }

  __device__ __forceinline__ void add_all(uint32_t stage) {
    static_assert(!Traits::kAllEntries || kFours == 1);
#pragma unroll
    for (int e = 0; e < Traits::kEntries; e += 4) {
      float run[4][4][4] = {};  // of four entries
#pragma unroll 1
      for (int t = 0; t < Traits::kDepth; ++t) {
        float x[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) read_vector(x[i], stage + TileX::batch_offset(row(0, i), t, e / 4));
#pragma unroll
        for (int own = 0; own < 4; ++own) {
          float y[4];
          read_vector(y, stage + TileX::kBytes + (e + own) * TileY::kEntryBytes + TileY::row_offset(t, column / 4));
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) run[own][i][j] = fmaf(x[i][own], y[j], run[own][i][j]);
        }
      }
#pragma unroll
      for (int own = 0; own < 4; ++own)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[e + own][i][j] += run[own][i][j];
    }
  }

  __device__ __forceinline__ void store(const Problem& p, const Place<Traits>& place) const {
    float* const out = static_cast<float*>(p.out.data) + place.outer * p.out.outer + int64_t(place.group) * Traits::kEntries * p.out.batch;
#pragma unroll
    for (int r = 0; r < 4 * kFours; ++r) {
      const int m = place.row + row(r / 4, r % 4), n = place.column + column;
      if (m >= p.m || n >= p.n) continue;
#pragma unroll
      for (int e = 0; e < Traits::kEntries; ++e)
        write_vector(out + e * p.out.batch + m * p.out.row + n, __float_as_uint(sums[e][r][0]), __float_as_uint(sums[e][r][1]), __float_as_uint(sums[e][r][2]),
                     __float_as_uint(sums[e][r][3]));
    }
  }
};

}  // namespace fusebackend::strided_bmm
