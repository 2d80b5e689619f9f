// The launch configuration of the kernels of strided planes that bulk copies bring to a ring in shared memory (strided_ring_sm90.cuh), apart from them.
#pragma once
#include "depthwise_conv/plane_ring_plan.h"
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

constexpr int kStridedRingStages = 2;         // of which one is ahead
constexpr int kStridedRingThreads = 128;      // of a block, that compute, at most
constexpr int kStridedRingBlockBytes = 2048;  // of shared memory, that a block has beside its stages, at most
constexpr int kStridedRingFront = 16;         // bytes before the first stage, that are read with it

// Rows of results that a pair of source rows has a part in.
FUSE_HOST_DEVICE constexpr int strided_ring_live(int taps) { return (taps + 1) / 2; }
// Thread blocks of that many threads that a multiprocessor has registers for.
FUSE_HOST_DEVICE constexpr int strided_ring_blocks(bool sums, int taps) { return sums ? (taps > 3 ? 3 : 4) : (taps > 3 ? 4 : 5); }

// A line is a row of results, or a pair of rows of x with its gradient's (`sums`: both gradients). A thread walks down some lines, at two columns of results.
struct StridedRingPlan {
  bool fits;
  bool words;                     // two columns of x lie in one word
  int shift;                      // columns before the first that is needed, so that words begin there
  int lines, columns;             // of a plane; columns are threads
  int images, rows;               // of a stage: rows are lines
  int segments, segment_rows;     // of these rows, each of which has its threads
  int row_tiles, groups, stages;  // of a channel: stages = row_tiles * groups of images
  int splits;                     // of these, among thread blocks
  int threads;                    // that compute
  int source_bytes, grad_bytes, result_bytes;  // of an image, in a stage

  FUSE_HOST_DEVICE constexpr int stage_bytes() const { return (source_bytes + grad_bytes + result_bytes) * images; }
  constexpr int shared_bytes() const { return kStridedRingFront + kStridedRingStages * stage_bytes(); }
};

StridedRingPlan strided_ring_plan(const Geometry& g, const Placement& x, const Placement& y, const PlaneRingDevice& device);

// Of both gradients; `g` is the convolution's.
StridedRingPlan strided_ring_gradients_plan(const Geometry& g, const Placement& grad, const Placement& x, const Placement& dx, const PlaneRingDevice& device);

}  // namespace fusebackend::depthwise_conv
