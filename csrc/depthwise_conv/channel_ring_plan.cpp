#include "depthwise_conv/channel_ring_plan.h"

#include <algorithm>
#include <cstdlib>

namespace fusebackend::depthwise_conv {
namespace {

// Shared memory of a block, of as many as there are registers for: that of a multiprocessor of compute capability 9.0 less what each is charged beside its own.
constexpr int kMostSharedBytes = (228 << 10) / kChannelRingBlocks - (1 << 10) - 512;
constexpr int kAlignment = 1024;      // of shared memory, for swizzled copies
constexpr int kStepsToBegin = 2;      // what a block takes until rows come as fast as it reads them, as so many steps more
constexpr int kMostParts = 32;

// What a tensor map can say: 16 bytes are eight channels of a pixel, and strides are not 0.
bool is_mapped(const Placement& t, const Geometry& g, int64_t rows, int64_t columns) {
  const Strides& s = t.stride;
  const auto is_stride = [](int64_t stride, int64_t size) { return size == 1 || (stride > 0 && stride % 8 == 0 && stride < int64_t{1} << 38); };
  return t.address % 16 == 0 && s.c == 1 && is_stride(s.n, g.batch) && is_stride(s.h, rows) && is_stride(s.w, columns);
}

// Which strips a segment has: as few places and blocks of columns as possible.
void set_columns(ChannelRingPlan& p, const Geometry& g) {
  const int64_t all = ceil_div(g.out.w, 8);
  int64_t least = 0;
  for (int strips = 1; strips <= kChannelRingStrips / 2; ++strips) {
    int bits = 0;
    while (1 << bits < strips) ++bits;
    const int64_t tiles = ceil_div(all, strips), cost = tiles * ((1 << bits) + strips + 1);
    if (p.strips > 0 && cost > least) continue;
    least = cost, p.strips = strips, p.slot_bits = bits, p.column_tiles = int(tiles);
  }
  p.segments = kChannelRingStrips >> p.slot_bits;
  // A block of columns that is all of the image has all that its results need.
  const bool is_one = g.out.w <= 8 && g.in.w <= 8;
  p.blocks = is_one ? 1 : p.strips + 1, p.first_column = is_one ? 0 : int(-g.pad.w);
  p.segment_units = kChannelRingRows * p.blocks;
  // Of the eight strips that are read at once, those of the next segment lie behind the last one's banks.
  const int places = 1 << p.slot_bits;
  while (places < 8 && p.segment_units % (2 * places) != places) ++p.segment_units;
}

}  // namespace

ChannelRingPlan channel_ring_plan(const Geometry& g, const Placement& x, const Placement& y, int sm_count) {
  ChannelRingPlan p = {};
  if (g.stride.h != 1 || g.stride.w != 1 || g.dilation.h != 1 || g.dilation.w != 1 || g.multiplier != 1) return p;
  const int taps = int(g.taps.h);
  if (g.taps.h != g.taps.w || (taps != 5 && taps != 7) || g.channels % 8 || std::abs(g.pad.h) > 32 || std::abs(g.pad.w) > 32) return p;
  if (g.batch < 1 || g.in.h < 1 || g.in.w < 1 || g.out.h < 1 || g.out.w < 1 || g.batch > INT32_MAX / 2 || g.channels > INT32_MAX / 2) return p;
  if (!is_mapped(x, g, g.in.h, g.in.w) || !is_mapped(y, g, g.out.h, g.out.w)) return p;

  set_columns(p, g);
  p.channel_tiles = int(ceil_div(g.channels, kChannelRingChannels)), p.groups = int(ceil_div(g.batch, p.segments));
  // Parts of the rows, of which the multiprocessors get equally many: whatever a block has, it reads the rows around its own, and begins.
  const int64_t slots = int64_t{kChannelRingBlocks} * sm_count;
  int64_t least = 0;
  for (int parts = 1; parts <= kMostParts && parts <= ceil_div(g.out.h, kChannelRingRows); ++parts) {
    const int64_t rows = round_up(ceil_div(g.out.h, parts), kChannelRingRows), row_tiles = ceil_div(g.out.h, rows);
    const int64_t waves = ceil_div(int64_t{p.channel_tiles} * p.column_tiles * p.groups * row_tiles, slots);
    const int64_t cost = waves * ((std::min(rows, g.out.h) + taps) / kChannelRingRows + kStepsToBegin);
    if (parts > 1 && cost >= least) continue;
    least = cost, p.rows = int(rows), p.row_tiles = int(row_tiles);
  }

  const int fixed = kAlignment + kChannelRingBuffers * (p.place_bytes() + p.planes_bytes() + kChannelRingResultBytes);
  p.slots = std::min((kMostSharedBytes - fixed) / p.slot_bytes(), kChannelRingMostSlots);
  p.shared_bytes = fixed + p.slots * p.slot_bytes();
  if (p.slots < 2 || p.thread_blocks() > INT32_MAX) return {};
  // Few blocks, and segments of no image, are left to kernels whose blocks have parts of images as segments.
  p.fits = p.thread_blocks() >= sm_count && 2 * g.batch > int64_t{p.groups} * p.segments;
  return p;
}

}  // namespace fusebackend::depthwise_conv
