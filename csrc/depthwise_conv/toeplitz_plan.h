// The launch configuration of the convolution on tensor cores (toeplitz.cuh), apart from the kernel.
#pragma once
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

// How the columns of a result follow from those of its source.
enum class ColumnStep : int {
  kHalf,  // x's gradient where the stride is 2: eight of its columns follow from four of the gradient
  kOne,
  kTwo,
};

// A convolution, or x's gradient as one of the incoming gradient: source and destination are images, and results follow from
//   destination row h  <-  source rows  h / row_divisor * row_factor + row_base + (offsets that depend on the tap, and on h % phases)
// and columns alike.
struct ToeplitzPlan {
  bool fits;
  // What the kernel is compiled for.
  ColumnStep step;
  int span;      // blocks of eight source columns that eight columns of results need
  int blocks;    // of eight columns, that a warp computes at once
  // Tiles.
  TileShape source, target;
  Move fill, store;
  bool in_place;  // results take the place of their sources: a warp has a whole plane, of one image
  int segments;  // of `blocks` blocks, in a row of a tile
  int phases, row_step, row_factor, row_divisor, row_base;
  int column_factor, column_divisor, column_base;
  int shift;  // source columns before the first that is needed, for alignment
  int table_length;  // of the taps of a row
  int64_t channel_tiles, column_tiles, row_tiles, image_tiles;
  int threads, shared_bytes;

  constexpr int64_t tiles() const { return column_tiles * row_tiles * image_tiles; }
  constexpr int64_t grid() const { return channel_tiles * tiles(); }
};

// `transposed`: of x's gradient. Of `source` and `target`, a channel's plane is what the other's is.
ToeplitzPlan toeplitz_plan(const Geometry& g, bool transposed, const Placement& source, const Placement& target, int sm_count);

}  // namespace fusebackend::depthwise_conv
