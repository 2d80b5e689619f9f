// The launch configuration of the kernel for 16-bit channels-last tensors that come and go by tensor copies (channel_ring_sm90.cuh), apart from it.
#pragma once
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

constexpr int kChannelRingChannels = 16;  // of a block; each of its warps that multiply has two
constexpr int kChannelRingRows = 2;       // at a time
constexpr int kChannelRingStrips = 16;    // of eight columns: a product's rows
constexpr int kChannelRingBlockBytes = 256;  // of eight neighbouring pixels' channels
constexpr int kChannelRingMostSlots = 4, kChannelRingBuffers = 2;
constexpr int kChannelRingMultiplyWarps = kChannelRingChannels / 2, kChannelRingMoveWarps = 4;
constexpr int kChannelRingThreads = 32 * (kChannelRingMultiplyWarps + kChannelRingMoveWarps);
// Thread blocks that a multiprocessor has registers for.
constexpr int kChannelRingBlocks = 2;

// A segment is a number of strips beside one another in some rows of an image. A block has segments of neighbouring images, all in the same place.
struct ChannelRingPlan {
  bool fits;
  int segments, slot_bits;  // segments * 2^slot_bits = kChannelRingStrips
  int strips;               // of a segment, that its 2^slot_bits places have
  int blocks;               // of eight columns of a row of x, that a segment reads: one more than strips, but for an image of one
  int first_column;         // that is read, counted from the first of the results
  int rows;                 // of results; even
  int row_tiles, column_tiles, channel_tiles, groups;  // groups of so many images as a block has
  int slots;                // of shared memory for what is on its way
  int segment_units;        // of 16 bytes, that a segment has in a plane of shared memory: strips of different segments lie in different banks
  int shared_bytes;

  FUSE_HOST_DEVICE constexpr int units() const { return kChannelRingRows * segments * blocks; }
  FUSE_HOST_DEVICE constexpr int result_units() const { return kChannelRingRows * segments * strips; }
  FUSE_HOST_DEVICE constexpr int slot_bytes() const { return units() * kChannelRingBlockBytes; }
  FUSE_HOST_DEVICE constexpr int place_bytes() const { return result_units() * kChannelRingBlockBytes; }
  FUSE_HOST_DEVICE constexpr int plane_units() const { return (segments * segment_units) | 1; }  // planes are in different banks too
  FUSE_HOST_DEVICE constexpr int planes_bytes() const { return int(round_up(kChannelRingChannels * plane_units() * 16, 128)); }
  constexpr int64_t thread_blocks() const { return int64_t{channel_tiles} * column_tiles * row_tiles * groups; }
};

constexpr int kChannelRingResultUnits = kChannelRingRows * kChannelRingStrips + 1;  // of a plane of results
constexpr int kChannelRingResultBytes = int(round_up(kChannelRingChannels * kChannelRingResultUnits * 16, 128));

// x and y, or the incoming gradient and x's. `shared_bytes` is 0 where the kernel cannot take a convolution, and `fits` is false where others should as well.
ChannelRingPlan channel_ring_plan(const Geometry& g, const Placement& x, const Placement& y, int sm_count);

}  // namespace fusebackend::depthwise_conv
