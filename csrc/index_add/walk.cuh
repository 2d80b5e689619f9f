// How the blocks of kReduce, kWide and kTable share entries and columns.
#pragma once

#include "dispatch.cuh"

namespace fusebackend::accumulate {

// A block has `groups` groups of block_columns threads, each with a column of V elements, and takes every row_blocks-th tile of
// groups * per_group entries. A group walks per_group neighbours of the tile, or, for slices under 128 bytes, every groups-th entry, so that a
// warp reads whole lines.
struct Walk {
  int64_t columns, tiles, row_blocks;
  int block_columns, groups, column_blocks, per_group;
  bool interleave;
};

// About as many blocks as run at once, sharing the work evenly: as few tiles each as fit, of one size, at most `most_entries`.
inline Walk make_walk(const Params& p, int v, int most_entries, int blocks_per_sm, const Device& device) {
  Walk w{};
  w.columns = p.columns() / v;
  w.column_blocks = int(ceil_div(w.columns, kThreads));
  w.block_columns = int(ceil_div(w.columns, w.column_blocks));
  w.groups = kThreads / w.block_columns;
  const int64_t blocks = std::max<int64_t>(int64_t(device.sm_count) * blocks_per_sm / w.column_blocks, 1);
  const int64_t tiles_each = ceil_div(p.n, blocks * w.groups * std::max(most_entries / w.groups, 1));
  w.per_group = int(ceil_div(p.n, blocks * w.groups * tiles_each));
  w.tiles = ceil_div(p.n, w.groups * w.per_group);
  w.row_blocks = ceil_div(w.tiles, tiles_each);
  w.interleave = p.dims[p.n_dims - 1].size * element_size(p.dtype) < 128;
  return w;
}

}  // namespace fusebackend::accumulate
