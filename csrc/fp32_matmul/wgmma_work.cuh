// What the thread blocks of the wgmma kernel compute: its parameters, each block's list of work, and the epilogue of a tile.
#pragma once
#include "fp32_matmul/epilogue.cuh"
#include "fp32_matmul/launch.h"
#include "fp32_matmul/tile_order.cuh"

namespace fusebackend::fp32_matmul {

constexpr int kRaster = 16;                 // see TileAt
constexpr int kValues = kTileN / 2;         // elements of C a lane: a warpgroup's 64 x kTileN over 128 lanes

struct GemmParams {
  Problem p;
  int tiles_m, tiles_n, tiles, k_blocks;
  int split_tiles;                   // see WgmmaPlan
  int split_parts, split_share;
  bool a_batched, b_batched;
  bool exact_sums;                   // add the tensor cores' sums without error
  bool exact_parts;                  // add the parts of split tiles without error
  bool c_pairs;                      // C can be stored two columns at a time
  float* partial;                    // [thread block][accumulator register][consumer thread]
  int* ready;                        // [thread block][consumer warpgroup]
};

// A thread block's list of work: its share of the split tiles' k blocks, from the last to the first, then whole tiles.
struct Work {
  int tile, k_begin, k_end;          // k in blocks

  __device__ explicit Work(const GemmParams& g)
      : begin_(share_start(g, blockIdx.x)), end_(share_start(g, blockIdx.x + 1)), next_tile_(g.split_tiles + blockIdx.x) {}

  __device__ bool next(const GemmParams& g) {
    if (end_ > begin_) {
      tile = (end_ - 1) / g.k_blocks;
      const int tile_begin = tile * g.k_blocks;
      k_begin = max(begin_ - tile_begin, 0);
      k_end = end_ - tile_begin;
      end_ = tile_begin + k_begin;
      return true;
    }
    if (next_tile_ >= g.tiles) return false;
    tile = next_tile_, k_begin = 0, k_end = g.k_blocks;
    next_tile_ += gridDim.x;
    return true;
  }

  // Where a thread block's share begins, in k blocks over all split tiles.
  __device__ static int share_start(const GemmParams& g, int block) {
    const int begin = g.split_parts ? block / g.split_parts * g.k_blocks + block % g.split_parts * g.k_blocks / g.split_parts
                                    : block * g.split_share;
    return min(g.split_tiles * g.k_blocks, begin);
  }

 private:
  int begin_, end_, next_tile_;
};

struct Origin {                      // of a tile; m and n in elements
  int batch, m, n;
  __device__ Origin(const GemmParams& g, int tile) {
    const TileAt<kRaster> at(tile, g.tiles_m, g.tiles_n);
    batch = at.batch, m = at.m * kTileM, n = at.n * kTileN;
  }
};

// A lane holds rows lane / 4 + {0, 8} of its warp's 16 and columns 8 j + lane % 4 * 2 + {0, 1}, as acc[4 j + 2 row + column].
struct LaneAt {
  int m, n;
  __device__ explicit LaneAt(const Origin& at) : m(at.m + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4), n(at.n + threadIdx.x % 4 * 2) {}
};

// acc = alpha * acc + beta * D. Half of D is loaded before any of it is used. Beyond C's edges some element within D is loaded instead.
__device__ __forceinline__ void scale_tile(const Problem& p, int batch, LaneAt at, float (&acc)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) acc[i] *= p.alpha;
  if (p.beta == 0.f) return;
  const float* const d = p.d.data + batch * p.d.batch;
  const float* const rows[2] = {d + min(int64_t(at.m), p.m - 1) * p.d.row, d + min(int64_t(at.m) + 8, p.m - 1) * p.d.row};
  constexpr int kHalf = kValues / 2;
#pragma unroll
  for (int first = 0; first < kValues; first += kHalf) {
    float added[kHalf];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const int i = first + j;
      added[j] = __ldg(rows[i >> 1 & 1] + min(int64_t(at.n) + (i >> 2) * 8 + (i & 1), p.n - 1) * p.d.col);
    }
#pragma unroll
    for (int j = 0; j < kHalf; ++j) acc[first + j] = fmaf(p.beta, added[j], acc[first + j]);
  }
}

// Stores a tile in few registers, since products are under way. Returns whether this lane saw a NaN.
__device__ __forceinline__ bool store_tile(const GemmParams& g, int batch, LaneAt at, const float (&acc)[kValues]) {
  const Problem& p = g.p;
  bool nan = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = at.m + half * 8;
    if (m >= p.m) continue;
    float* c = p.c + c_offset(p, batch, m, at.n);
    const int columns = p.n - at.n;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const float x = acc[j * 4 + half * 2], y = acc[j * 4 + half * 2 + 1];
      nan |= x != x || y != y;
      if (g.c_pairs) {
        if (j * 8 < columns) *reinterpret_cast<float2*>(c + j * 8) = make_float2(x, y);
      } else {
        if (j * 8 < columns) *c = x;
        if (j * 8 + 1 < columns) c[p.c_col] = y;
        c += 8 * p.c_col;
      }
    }
  }
  return nan;
}

}  // namespace fusebackend::fp32_matmul
