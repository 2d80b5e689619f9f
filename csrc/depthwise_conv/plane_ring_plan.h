// The launch configuration of the kernels of planes that bulk copies bring to a ring in shared memory (plane_ring_sm90.cuh), apart from them.
#pragma once
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

constexpr int kPlaneRingStages = 2;         // of which one is ahead
constexpr int kPlaneRingSumWarps = 2;       // of a block, that sum up the weight's gradient
constexpr int kPlaneRingSumRows = 16;       // of the gradient, that they multiply at once
constexpr int kPlaneRingBlockBytes = 4096;  // of shared memory, that a block has beside its ring, at most

// Of a convolution alone, or of both gradients (`sums`).
FUSE_HOST_DEVICE constexpr int plane_ring_threads(bool sums) { return 32 * (1 + sums * kPlaneRingSumWarps); }
// Thread blocks that a multiprocessor has registers for.
FUSE_HOST_DEVICE constexpr int plane_ring_blocks(bool sums, int taps) { return !sums ? 16 : taps < 7 ? 6 : 5; }

struct PlaneRingPlan {
  bool fits;
  int shift;                      // source columns before the first that is needed, for alignment
  int column_blocks;              // strips of a row of results
  int chunk_columns;              // of a row, in whole parts of sixteen
  int images;                     // of a stage
  int rows;                       // of results of an image, in a stage
  int row_tiles, groups, stages;  // of a channel: stages = row_tiles * groups of images
  int splits;                     // of these, among thread blocks
  int row_bytes, slot_bytes;      // of an image's rows in a stage
  int result_bytes;               // of an image's results, where they do not take the place of what was read
  int tensors;                    // of a stage

  FUSE_HOST_DEVICE constexpr int stage_bytes() const { return slot_bytes * images * tensors; }
  constexpr int shared_bytes() const { return kPlaneRingStages * stage_bytes() + images * result_bytes; }
};

struct PlaneRingDevice {
  int sm_count, shared_bytes;  // of a multiprocessor
};

// Whether copies of whole 16 bytes around some rows of planes, which lie side by side, stay inside the tensor.
bool is_copied(const Placement& t, int64_t batch, int64_t rows);

constexpr int kRingBanks = 128;  // bytes of shared memory that are read at once

// Bytes of a stage for an image that has so many: neighbouring images begin `place` bytes apart in the banks.
inline int ring_slot_bytes(int64_t bytes, int64_t place) {
  return int((bytes > place ? round_up(bytes - place, kRingBanks) : 0) + place);
}

// Parts of each channel's stages, of which thread blocks have one each: as many as fill the `slots` for blocks most evenly, or where there are enough of them
// and a block begins with little, blocks of some stages (`stages_dealt`, or 0).
int ring_splits(int64_t channels, int64_t stages, int64_t slots, int stages_dealt);

PlaneRingPlan plane_ring_plan(const Geometry& g, const Placement& source, const Placement& target, const PlaneRingDevice& device);

// Of both gradients; `g` is the convolution's.
PlaneRingPlan plane_ring_gradients_plan(const Geometry& g, const Placement& grad, const Placement& x, const Placement& dx, const PlaneRingDevice& device);

}  // namespace fusebackend::depthwise_conv
