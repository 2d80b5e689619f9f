// The launch configurations of the fp32 kernels (register_window.cuh), apart from these.
#pragma once
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

struct RegisterWindowPlan {
  bool fits;
  int images, rows, columns;          // of a tile of results; of the gradient for the weight's gradient
  int x_rows, x_pitch, grad_pitch;    // in shared memory, in elements
  int tasks;                          // of a tile: some rows and columns, of one thread each
  int64_t column_tiles, row_tiles, image_tiles;
  int splits;                         // of the tiles, among blocks: the weight's gradient only
  int threads, shared_bytes;

  constexpr int64_t tiles() const { return column_tiles * row_tiles * image_tiles; }
};

RegisterWindowPlan register_window_forward_plan(const Geometry& g, int sm_count);
RegisterWindowPlan register_window_weight_grad_plan(const Geometry& g, int sm_count);

// Whether the fp32 kernels are for such a convolution at all.
bool has_register_window(const Geometry& g);

// What a thread computes.
constexpr int kForwardRows = 4, kForwardColumns = 4, kGradColumns = 8;
constexpr int kMaxWindowTaps = 7;
// Columns of x that a thread of the forward loads, and one of the weight's gradient.
constexpr int forward_window(int taps) { return (kForwardColumns + taps - 1 + 3) / 4 * 4; }
constexpr int grad_window(int taps) { return (kGradColumns + taps - 1 + 3) / 4 * 4; }

}  // namespace fusebackend::depthwise_conv
