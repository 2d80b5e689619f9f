// A block's products in fp32 where the batch is innermost in the result: each warp has an entry of eight, so that a thread has eight columns of eight
// rows and reads few operands for many multiply-adds. Results of four rows at a time meet in shared memory, where eight entries are a sector of memory.
//
// The terms of a stage are added one after another, and then to the sums of the stages before, as in fma_products.cuh.
#pragma once

#include "strided_bmm/tiles.cuh"

namespace fusebackend::strided_bmm {

template <typename Traits>
struct FmaEntries {
  using TileX = typename Traits::TileX;
  using TileY = typename Traits::TileY;
  static constexpr bool kIsStaged = false;
  static constexpr int kRowLanes = 4, kColumnLanes = 8, kEach = 8;  // rows and columns of a thread
  static_assert(Traits::kTileRows == kRowLanes * kEach && Traits::kTileColumns == kColumnLanes * kEach && Traits::kThreads == 32 * Traits::kEntries);
  // Results that meet: kRowLanes rows of all entries. Paddings keep lanes that write, and those that read, in different banks.
  static constexpr int kRowPitch = Traits::kTileColumns + 8, kEntryPitch = kRowLanes * kRowPitch + 4;
  static __host__ __device__ constexpr int staged_bytes(int span) { return Traits::kEntries * kEntryPitch * int(sizeof(float)); }

  float sums[kEach][kEach] = {};
  const int entry = threadIdx.x / 32, row_lane = threadIdx.x % 32 / kColumnLanes, column_lane = threadIdx.x % kColumnLanes;

  // The i-th of a lane's rows or columns: every kLanes-th one, or four neighbours where vectors are of neighbours.
  template <Inner kInner, int kLanes>
  static __device__ __forceinline__ int place(int lane, int i) {
    return kInner == Inner::kTerms ? lane + kLanes * i : 4 * lane + i % 4 + 4 * kLanes * (i / 4);
  }

  // Four terms from 4 * k4 on, of a lane's eight rows.
  template <typename Tile, Inner kInner, int kLanes>
  static __device__ __forceinline__ void read(float (&to)[4][kEach], uint32_t tile, int lane, int k4) {
    float v[4];
    if constexpr (kInner == Inner::kTerms) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        read_vector(v, tile + Tile::term_offset(place<kInner, kLanes>(lane, i), k4));
#pragma unroll
        for (int t = 0; t < 4; ++t) to[t][i] = v[t];
      }
    } else {
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          read_vector(v, tile + Tile::row_offset(4 * k4 + t, lane + kLanes * half));
#pragma unroll
          for (int i = 0; i < 4; ++i) to[t][4 * half + i] = v[i];
        }
    }
  }

  __device__ __forceinline__ void add_all(uint32_t stage) {
    const uint32_t x_tile = stage + entry * TileX::kEntryBytes, y_tile = stage + TileX::kBytes + entry * TileY::kEntryBytes;
    float run[kEach][kEach] = {};
#pragma unroll
    for (int k4 = 0; k4 < Traits::kDepth / 4; ++k4) {
      float x[4][kEach], y[4][kEach];
      read<TileX, Traits::kX, kRowLanes>(x, x_tile, row_lane, k4);
      read<TileY, Traits::kY, kColumnLanes>(y, y_tile, column_lane, k4);
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int i = 0; i < kEach; ++i)
#pragma unroll
          for (int j = 0; j < kEach; ++j) run[i][j] = fmaf(x[t][i], y[t][j], run[i][j]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) sums[i][j] += run[i][j];
  }

  __device__ __forceinline__ void store(void* shared, const Problem& p, const Place<Traits>& tile) const {
    float* const met = static_cast<float*>(shared);
    float* const out = static_cast<float*>(p.out.data) + tile.outer * p.out.outer + int64_t(tile.group) * Traits::kEntries;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      __syncthreads();  // the rows before have left
#pragma unroll
      for (int j = 0; j < kEach; ++j) met[entry * kEntryPitch + row_lane * kRowPitch + place<Traits::kY, kColumnLanes>(column_lane, j)] = sums[i][j];
      __syncthreads();
#pragma unroll
      for (int at = threadIdx.x; at < kRowLanes * Traits::kTileColumns * 2; at += Traits::kThreads) {  // vectors of four entries
        const int first = at % 2 * 4, column = at / 2 % Traits::kTileColumns, lane = at / 2 / Traits::kTileColumns;
        const int m = tile.row + place<Traits::kX, kRowLanes>(lane, i), n = tile.column + column;
        if (m >= p.m || n >= p.n) continue;
        uint32_t v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = __float_as_uint(met[(first + e) * kEntryPitch + lane * kRowPitch + column]);
        write_vector(out + m * p.out.row + n * p.out.column + first, v[0], v[1], v[2], v[3]);
      }
    }
  }
};

}  // namespace fusebackend::strided_bmm
