// The launch configurations of the kernels whose rows wait in shared memory (row_ring_sm90.cuh), apart from these.
#pragma once
#include "common/dtype.h"
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

// Rows and columns of taps, and how far they reach beyond the one in the middle. More taps have more products than such a kernel has time for.
constexpr int kRingTaps = 3, kRingBeside = kRingTaps / 2;
// What a thread computes of a row: so many neighbouring columns, of two neighbouring channels.
constexpr int kRingColumns = 7, kRingChannels = 2;
constexpr int kRingWindow = kRingColumns + 2 * kRingBeside;  // columns that these are computed from
constexpr int kRingPlaces = 2;                               // for rows of results in shared memory
// Threads that a multiprocessor has registers for.
constexpr int kRingThreads = 640;

enum class RowRingResult : int { kForward, kGradients };

// Threads of a block that move rows: a warp that loads them, and for the forward one that stores them. Gradients have no shared memory left for that.
FUSE_HOST_DEVICE constexpr int ring_movers(RowRingResult result) { return result == RowRingResult::kForward ? 64 : 32; }

// The rows of all images are one sequence, of which the blocks of a segment have equal parts.
struct RowRingPlan {
  bool fits;
  int channels, channel_tiles;  // of a block; blocks side by side
  int groups, segments;         // of so many columns as a thread has, in a block; blocks side by side
  int parts;                    // of the rows
  int slots, slot_bytes;        // rows that shared memory has
  int place_bytes;              // of a row of results
  int threads;                  // of a block that compute; others move rows
  int shared_bytes;

  FUSE_HOST_DEVICE constexpr int columns() const { return groups * kRingColumns; }
  constexpr int blocks() const { return channel_tiles * segments * parts; }
};

// The pixels of a slot: a row with what lies beside it, and for gradients a row of x.
FUSE_HOST_DEVICE constexpr int ring_pixels(int columns, RowRingResult result) {
  return columns + 2 * kRingBeside + (result == RowRingResult::kGradients ? columns : 0);
}

// x (or the incoming gradient) and y (or x's gradient); for the gradients of x and the weight together, `other` is x, else it is null.
RowRingPlan row_ring_plan(const Geometry& g, DType dtype, const Placement& source, const Placement& target, const Placement* other, int sm_count);

}  // namespace fusebackend::depthwise_conv
