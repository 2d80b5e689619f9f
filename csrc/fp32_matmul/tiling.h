// How C is cut into tiles, for every kernel; the tile of the Hopper kernel is here because `plan` counts with it.
#pragma once
#include <cstdint>

namespace fusebackend::matmul {

constexpr int kTileM = 128, kTileN = 192, kBlockK = 32;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifdef __CUDACC__
// Tiles are numbered down kRaster tile rows before moving to the next column, so that a wave of blocks shares operands in L2.
template <int kRaster> struct TileAt {
  int batch, m, n;                   // m and n in tiles

  __device__ TileAt(int tile, int tiles_m, int tiles_n) {
    const int per_batch = tiles_m * tiles_n;
    batch = tile / per_batch;
    const int t = tile - batch * per_batch;
    const int group = t / (kRaster * tiles_n);
    const int rows = min(kRaster, tiles_m - group * kRaster);
    const int in_group = t - group * kRaster * tiles_n;
    m = group * kRaster + in_group % rows;
    n = in_group / rows;
  }
};
#endif

}  // namespace fusebackend::matmul
