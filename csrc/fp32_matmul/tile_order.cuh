// The order in which thread blocks compute the tiles of C.
#pragma once

namespace fusebackend::fp32_matmul {

// Tiles are numbered down kRaster tile rows before the next column, so that blocks which run at the same time share operands in L2.
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

}  // namespace fusebackend::fp32_matmul
