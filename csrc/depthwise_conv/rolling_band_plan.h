// The launch configuration of the convolution of planes on tensor cores without shared memory (rolling_band.cuh), apart from the kernel.
#pragma once
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

constexpr int kRollingBandThreads = 128;

// Source rows that a warp has on their way, a multiple of the rows of taps.
FUSE_HOST_DEVICE constexpr int rows_ahead(int tap_rows) { return tap_rows == 3 ? 6 : tap_rows; }

// Thread blocks that a multiprocessor has registers for.
FUSE_HOST_DEVICE constexpr int rolling_band_blocks(int tap_rows, bool words) { return (tap_rows == 3 ? 5 : tap_rows == 5 ? 4 : 3) + words; }

struct RollingBandPlan {
  bool fits;
  bool words;         // two columns are loaded and stored at once, else one
  int shift;          // source columns before the first that is needed, for alignment
  int rows;           // of results, that a warp walks down
  int column_blocks;  // of eight, in a row
  int64_t row_tiles, groups, warps;  // groups of sixteen strips of a channel

  constexpr int64_t grid() const { return ceil_div(warps, kRollingBandThreads / 32); }
};

RollingBandPlan rolling_band_plan(const Geometry& g, const Placement& source, const Placement& target, int sm_count);

}  // namespace fusebackend::depthwise_conv
