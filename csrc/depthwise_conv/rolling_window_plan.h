// The launch configurations of the kernels with windows that roll down columns (rolling_window.cuh), apart from these.
#pragma once
#include "common/dtype.h"
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

constexpr int kRollingThreads = 128;

// What a thread computes, by the taps of a row: neighbouring channels (where these are innermost in memory) times neighbouring columns.
FUSE_HOST_DEVICE constexpr int rolling_channels(int taps, bool planes) { return taps == 3 && !planes ? 2 : 1; }
FUSE_HOST_DEVICE constexpr int rolling_columns(int taps, bool planes) { return planes ? 4 : 7; }
// Thread blocks that a multiprocessor has registers for.
FUSE_HOST_DEVICE constexpr int rolling_blocks(int taps, bool planes) { return taps == 7 && !planes ? 3 : 4; }
FUSE_HOST_DEVICE constexpr int rolling_grad_blocks(int taps) { return taps == 3 ? 4 : 3; }

struct RollingWindowPlan {
  bool fits;
  bool planes;         // else channels are innermost
  int groups, lines;   // threads of a block: so many of channels, beside so many strips
  int channel_tiles;   // of so many groups
  int rows;            // that a thread walks down
  int column_strips, row_tiles;
  int64_t strips;      // of all images
  int64_t strip_tiles; // blocks of a channel tile; for the weight's gradient the splits
};

// Either x and y, or the gradient and x.
RollingWindowPlan rolling_window_plan(const Geometry& g, DType dtype, const Placement& x, const Placement& y, bool weight_grad, int sm_count);

}  // namespace fusebackend::depthwise_conv
