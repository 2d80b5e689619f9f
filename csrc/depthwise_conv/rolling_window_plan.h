// The launch configurations of the kernels with windows that roll down columns (rolling_window.cuh), apart from these.
#pragma once
#include "common/dtype.h"
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

constexpr int kRollingThreads = 128;
constexpr int kRollingWideTaps = 7;  // of a row, for which a kernel of wide planes is compiled

// In which memory order, and by which steps, kernels are compiled.
enum class Rolling : int {
  kPlanes,
  kWidePlanes,  // of more columns a thread, forward
  kChannels,  // innermost
  kStrided,   // the same, by steps of two rows and columns
};

FUSE_HOST_DEVICE constexpr bool is_planes(Rolling form) { return form == Rolling::kPlanes || form == Rolling::kWidePlanes; }
FUSE_HOST_DEVICE constexpr int rolling_step(Rolling form) { return form == Rolling::kStrided ? 2 : 1; }

// What a thread computes, by the taps of a row: neighbouring channels times neighbouring columns (of y, or the gradient).
FUSE_HOST_DEVICE constexpr int rolling_channels(int taps, Rolling form) {
  return is_planes(form) ? 1 : taps == 3 || (taps == 5 && form == Rolling::kStrided) ? 2 : 1;
}
FUSE_HOST_DEVICE constexpr int rolling_columns(int taps, Rolling form) { return form == Rolling::kChannels ? 7 : form == Rolling::kWidePlanes ? 8 : 4; }
// Of the gradient where that of x is computed, of which there are twice as many.
constexpr int kRollingInputColumns = 2;
// Columns of x that such columns of y reach.
FUSE_HOST_DEVICE constexpr int rolling_window_columns(int taps, Rolling form) {
  return is_planes(form) ? rolling_columns(taps, form) + 8 : (rolling_columns(taps, form) - 1) * rolling_step(form) + taps;
}
// Rows of y that a row of x has a part in.
FUSE_HOST_DEVICE constexpr int rolling_ring(int taps, Rolling form) { return (taps + rolling_step(form) - 1) / rolling_step(form); }
// Thread blocks that a multiprocessor has registers for.
FUSE_HOST_DEVICE constexpr int rolling_blocks(int taps, Rolling form) { return form != Rolling::kPlanes && (taps == 7 || (taps == 5 && form == Rolling::kStrided)) ? 3 : 4; }
// Rows of planes are asked for so many rows before they are loaded: there are registers for one that is on its way.
FUSE_HOST_DEVICE constexpr int rolling_rows_asked(Rolling form) { return form == Rolling::kWidePlanes ? 3 : 2; }
FUSE_HOST_DEVICE constexpr int rolling_grad_blocks(int taps) { return taps == 3 ? 4 : 3; }
constexpr int kRollingInputBlocks = 4;

enum class RollingResult : int { kForward, kInputGrad, kWeightGrad };

struct RollingWindowPlan {
  bool fits;
  Rolling form;
  int groups, lines;   // threads of a block: so many of channels, beside so many strips
  int channel_tiles;   // of so many groups
  int rows;            // that a thread walks down: of y; kInputGrad: pairs of rows of x
  int all_rows;        // of these, in an image
  int column_strips, row_tiles;
  int64_t strips;      // of all images
  int64_t strip_tiles; // blocks of a channel tile; for the weight's gradient the splits
};

// x (or its gradient), and y (or its gradient). kInputGrad is for steps of two: with steps of one it is a forward.
RollingWindowPlan rolling_window_plan(const Geometry& g, DType dtype, const Placement& x, const Placement& y, RollingResult result, int sm_count);

// The first column or row of x, counted from the first of the padding, of the pairs that kInputGrad has: an even number.
constexpr int first_of_pairs(int pad) { return pad & ~1; }

}  // namespace fusebackend::depthwise_conv
