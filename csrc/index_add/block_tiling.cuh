// How the blocks of the atomic_add and thread_tables kernels share entries and columns.
#pragma once

#include "index_add/dispatch.cuh"

namespace fusebackend::index_add {

// The grid is row_blocks x column_blocks. A block has `groups` groups of block_columns threads, each with a column of V elements, and takes
// every row_blocks-th tile of groups * per_group entries. A group takes per_group neighbouring entries of the tile; or, if rows are shorter
// than 128 bytes (`interleave`), every groups-th entry, so that a warp reads whole cache lines.
struct BlockTiling {
  int64_t columns, tiles, row_blocks;
  int block_columns, groups, column_blocks, per_group;
  bool interleave;
};

// About as many blocks as run at once, which share the work evenly: as few tiles each as possible, of one size, at most max_entries.
inline BlockTiling make_block_tiling(const Params& p, int v, int max_entries, int blocks_per_sm, const Device& device) {
  BlockTiling t{};
  t.columns = p.columns() / v;
  t.column_blocks = int(ceil_div(t.columns, kThreads));
  t.block_columns = int(ceil_div(t.columns, t.column_blocks));
  t.groups = kThreads / t.block_columns;
  const int64_t blocks = std::max<int64_t>(int64_t(device.sm_count) * blocks_per_sm / t.column_blocks, 1);
  const int64_t tiles_per_block = ceil_div(p.n, blocks * t.groups * std::max(max_entries / t.groups, 1));
  t.per_group = int(ceil_div(p.n, blocks * t.groups * tiles_per_block));
  t.tiles = ceil_div(p.n, t.groups * t.per_group);
  t.row_blocks = ceil_div(t.tiles, tiles_per_block);
  t.interleave = p.dims[p.n_dims - 1].size * element_size(p.dtype) < 128;
  return t;
}

}  // namespace fusebackend::index_add
