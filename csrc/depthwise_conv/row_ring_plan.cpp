#include "depthwise_conv/row_ring_plan.h"

#include <algorithm>

namespace fusebackend::depthwise_conv {
namespace {

// Shared memory of a multiprocessor of compute capability 9.0, what each of its blocks is charged beside its own, and the most that a block can have.
constexpr int kSharedBytes = 228 << 10, kChargedBytes = 1 << 10, kMostOfBlock = 227 << 10;
constexpr int kCopyBytes = 16;           // copies are of multiples of it, at multiples
constexpr int kLeastCopyBytes = 1 << 10; // a copy has a cost of its own
constexpr int kMostSlots = 32, kMostTiles = 64, kMostSegments = 64;
constexpr int kRowsToFill = 4;           // what a block takes until rows come as fast as it reads them, as so many rows more
// How much of a block's time may go to what is beside its own pixels. A 16-bit forward has more products a byte than others.
constexpr double least_efficiency(RowRingResult result, int item) { return result == RowRingResult::kForward && item == 2 ? .6 : .5; }

// Pixels of (batch, height, width, channels), adjacent to one another.
bool is_dense(const Placement& t, const Geometry& g) {
  const Strides& s = t.stride;
  const bool rows = g.in.h == 1 || s.h == g.in.w * g.channels, images = g.batch == 1 || s.n == g.in.h * g.in.w * g.channels;
  return s.c == 1 && (g.in.w == 1 || s.w == g.channels) && rows && images && t.address % kCopyBytes == 0;
}

bool is_same_padded(const Geometry& g) {
  const bool taps = g.taps.h == kRingTaps && g.taps.w == kRingTaps && g.pad.h == kRingBeside && g.pad.w == kRingBeside;
  return taps && g.stride.h == 1 && g.stride.w == 1 && g.dilation.h == 1 && g.dilation.w == 1 && g.multiplier == 1 && g.in.h == g.out.h && g.in.w == g.out.w;
}

}  // namespace

RowRingPlan row_ring_plan(const Geometry& g, DType dtype, const Placement& source, const Placement& target, const Placement* other, int sm_count) {
  RowRingPlan best = {};
  const int item = element_size(dtype);
  const RowRingResult result = other ? RowRingResult::kGradients : RowRingResult::kForward;
  const int movers = ring_movers(result), places = result == RowRingResult::kForward ? kRingPlaces : 0;
  if (!is_same_padded(g) || (item != 2 && item != 4) || g.channels * item % kCopyBytes) return best;
  if (!is_dense(source, g) || !is_dense(target, g) || (other && !is_dense(*other, g))) return best;
  const int64_t rows = g.batch * g.in.h, groups = ceil_div(g.in.w, kRingColumns);
  // What shared memory holds at once is read before a ring is in motion.
  if (double(rows) * double(g.in.w * g.channels * item) * (other ? 2 : 1) < double(sm_count) * kSharedBytes) return best;
  if (rows <= 0 || rows > INT32_MAX / 2 || g.channels > INT32_MAX / 64 || groups > INT32_MAX / 64) return best;

  // As many threads at work as possible, on as few columns beside their own and rows beside the block's.
  double most = 0;
  for (int tiles = 1; tiles <= kMostTiles; ++tiles) {
    const int64_t channels = g.channels / tiles, lanes_of_group = channels / kRingChannels;
    if (tiles > 1 && channels * item < kLeastCopyBytes) break;  // pixels are copied one by one
    if (g.channels % tiles || channels * item % kCopyBytes) continue;
    for (int segments = 1; segments <= groups && segments <= kMostSegments; ++segments) {
      RowRingPlan p = {};
      p.channels = int(channels), p.channel_tiles = tiles;
      p.groups = int(ceil_div(groups, segments)), p.segments = segments;
      if (std::min<int64_t>(p.columns(), g.in.w) * channels * item < kLeastCopyBytes) break;
      const int64_t lanes = lanes_of_group * p.groups;
      if (ceil_div(groups, p.groups) != segments || round_up(lanes, 32) + movers > kRingThreads) continue;
      p.threads = int(round_up(lanes, 32));
      p.slot_bytes = int(round_up(int64_t{ring_pixels(p.columns(), result)} * channels * item, 128));
      p.place_bytes = int(round_up(int64_t{p.columns()} * channels * item, 128));
      const int fixed = places * p.place_bytes + 16 * (kMostSlots + places) + int(channels) * (kRingTaps * kRingTaps + 3) * 4;  // barriers, taps, epilogue
      // As many blocks as there are registers for, if shared memory has as many rows as are read at once and as many more on their way.
      const int least_slots = result == RowRingResult::kForward ? 3 : 2 * kRingTaps - 1;
      for (int blocks = kRingThreads / (p.threads + movers); blocks >= 1; --blocks) {
        p.slots = std::min((std::min(kMostOfBlock, kSharedBytes / blocks - kChargedBytes) - fixed) / p.slot_bytes, kMostSlots);
        if (p.slots < least_slots) continue;
        const int64_t all_blocks = int64_t{blocks} * sm_count;
        p.shared_bytes = fixed + p.slots * p.slot_bytes;
        p.parts = int(std::clamp<int64_t>(all_blocks / (segments * tiles), 1, rows));
        const double columns = double(g.in.w) / double(segments * (p.columns() + 2 * kRingBeside)), part = double(ceil_div(rows, p.parts));
        const double efficiency = columns * part / (part * double(g.in.h + kRingBeside) / double(g.in.h) + 2 * kRingBeside + kRowsToFill);
        const double score = efficiency * double(p.blocks()) * double(lanes);
        if (score <= most) break;
        most = score, best = p, best.fits = efficiency >= least_efficiency(result, item);
        break;
      }
    }
  }
  return best;
}

}  // namespace fusebackend::depthwise_conv
