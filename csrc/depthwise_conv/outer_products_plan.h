// The launch configuration of the weight's gradient on tensor cores (outer_products.cuh), apart from the kernel.
#pragma once
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

struct OuterProductsPlan {
  bool fits;
  // What the kernel is compiled for.
  int blocks;    // of eight columns of x, beside sixteen of the gradient
  int per_warp;  // rows of taps
  // Tiles.
  TileShape grad, x;
  Move fill_grad, fill_x;
  bool vectors;       // both moves are of several columns, asynchronously
  int stages;         // tiles in shared memory
  int column_blocks;  // of sixteen columns of the gradient, in a tile
  int shift;          // columns of x before the first that is needed, for alignment
  // Warps of a block: each has a channel, a group of rows of taps, and a slice of the products.
  int tap_groups, slices;
  int64_t channel_tiles, tap_tiles, column_tiles, row_tiles, image_tiles;
  int splits;  // of the tiles, among blocks
  int threads, shared_bytes;

  constexpr int64_t tiles() const { return column_tiles * row_tiles * image_tiles; }
  constexpr int64_t grid() const { return channel_tiles * tap_tiles * splits; }
};

OuterProductsPlan outer_products_plan(const Geometry& g, const Placement& grad, const Placement& x, int sm_count);

}  // namespace fusebackend::depthwise_conv
