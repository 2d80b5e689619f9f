// The products of tiles that attention consists of, by mma.sync. products_sm90.cuh has the same by wgmma.
#pragma once

#include "attention/fragments.cuh"

namespace fusebackend::attention {

// Of a warp's 16 * kTiles rows, which begin at `first_row` of the left tile.
template <typename T, int kD, int kTiles>
struct MmaProducts {
  using Rows = Tile<kD>;
  using Scores = float[kTiles][8][4];
  using Results = float[kTiles][kD / 8][4];
  struct Packed {};  // what wgmma reads while it runs

  // scores = left @ right.mT, of 64 rows of the right tile.
  static __device__ __forceinline__ void start_scores(Scores& scores, uint32_t left_tile, int first_row, uint32_t right_tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][j][e] = 0.f;
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      uint32_t left[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) Rows::left(left[m], left_tile, first_row + 16 * m + lane % 16, k);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t b[4];
        Rows::right(b, right_tile, j, k);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma<T>(scores[m][j], left[m], b[0], b[1]);
          mma<T>(scores[m][j + 1], left[m], b[2], b[3]);
        }
      }
    }
  }

  // result += left @ right, of 64 columns of `left`, rounded, and 64 rows of the right tile.
  static __device__ __forceinline__ void start_sum(Results& result, const Scores& left, uint32_t right_tile, Packed&) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t packed[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) pack_left<T>(packed[m], left[m], k);
#pragma unroll
      for (int j = 0; j < kD / 8; j += 2) {
        uint32_t b[4];
        Rows::right_transposed(b, right_tile, k, j);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma<T>(result[m][j], packed[m], b[0], b[1]);
          mma<T>(result[m][j + 1], packed[m], b[2], b[3]);
        }
      }
    }
  }

  // Until all but the last kPending products are done; then `done` may be read.
  template <int kPending, int kColumns>
  static __device__ __forceinline__ void wait(float (&done)[kTiles][kColumns][4]) {}
  // Behind the wait for a sum.
  static __device__ __forceinline__ void release(const Packed&) {}
  // Between what writes tiles and a barrier.
  static __device__ __forceinline__ void publish() {}
};

}  // namespace fusebackend::attention
