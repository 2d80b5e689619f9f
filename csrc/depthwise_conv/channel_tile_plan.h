// The launch configurations of the kernels on tensor cores for 16-bit channels-last tensors (channel_band.cuh, channel_products.cuh), apart from these.
#pragma once
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

constexpr int kTileChannels = 16, kTileChunks = kTileChannels / 8;  // of a block, and of eight channels
constexpr int kChannelTileThreads = 16 * kTileChannels;             // a warp has two channels
constexpr int kFillWords = 64, kFillThreads = kFillWords * kTileChunks;  // that fill one row of a tile; each has two pixels of a chunk
constexpr int kChunkPad = 4 / kTileChunks;                          // words behind a plane, with which chunks are in different banks
constexpr int kBandStrips = 16, kProductStrips = 8;           // of eight columns that a product has: results; gradients of two segments

// Thread blocks that a multiprocessor has registers for.
constexpr int kChannelTileBlocks = 512 / kChannelTileThreads;
// Rows (channel_band: pairs of rows) that are on their way, beside those that are multiplied.
constexpr int kChannelTileAhead = 3;
constexpr int kPixelPairWords = 8;  // of eight channels of two pixels

// A segment is a number of strips beside one another in some rows of an image. A block has several, all at the same columns.
struct ChannelTilePlan {
  bool fits;
  int strips, slot_bits;  // of a segment; in a product it has 2^slot_bits places
  int segments;           // of a block (channel_products: pairs of segments)
  int words;              // pairs of pixels that a row of a segment is filled with
  int shift;              // columns before the first that is needed, so that pairs begin at even ones
  int rows;               // of results, or gradients
  int row_tiles, column_tiles, channel_tiles;
  int64_t all_segments;   // at the same columns
  int64_t groups;         // of so many segments as a block has
  int splits;             // channel_products: blocks of a channel tile
  int row_pitch;          // words of a row in shared memory
  int shared_bytes;

  constexpr int segment_pitch(bool weight_grad) const { return weight_grad ? 8 * strips + 8 : 4 * strips + 4; }
};

// Either x and y, or x and the gradient.
ChannelTilePlan channel_tile_plan(const Geometry& g, const Placement& x, const Placement& y, bool weight_grad, int sm_count);

}  // namespace fusebackend::depthwise_conv
