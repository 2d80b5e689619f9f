#include "depthwise_conv/plane_ring_plan.h"

#include <algorithm>

namespace fusebackend::depthwise_conv {
namespace {

constexpr int kWindow = 16, kBlock = 8, kStrips = 16;  // source columns that a product reads, results that it makes, strips of these
constexpr int kRowsOfStage = 8;                        // that take as long as what is done once a stage
constexpr int kStagesDealt = 2;                        // to a block

// Bytes of a tensor in a stage, at most: the fewer warps a block has, the more blocks there should be.
constexpr int most_bytes(bool sums) { return sums ? 9216 : 8192; }

constexpr int round_down(int n, int multiple) { return n / multiple * multiple; }

bool has_whole_rows(const Placement& t) { return t.stride.h == t.width && move_of(t, 2) == Move::kPairs; }
bool is_read(const Placement& t, int64_t batch, int64_t rows) { return has_whole_rows(t) && is_copied(t, batch, rows); }

PlaneRingPlan plan_of(const Geometry& g, bool sums, const PlaneRingDevice& device) {
  PlaneRingPlan p = {};
  if (g.stride.h != 1 || g.stride.w != 1 || g.dilation.h != 1 || g.dilation.w != 1 || g.multiplier != 1) return p;
  if ((g.taps.h != 3 && g.taps.h != 5 && g.taps.h != 7) || g.pad.h < 0 || g.pad.h >= g.taps.h) return p;
  p.shift = g.pad.w % 2 != 0;
  if (p.shift + kBlock - 1 + g.taps.w > kWindow) return p;
  // A row's strips are those of one product, and results may take the place of what was read.
  if (g.out.w > std::min<int64_t>(kStrips * kBlock, g.in.w) || g.batch == 0 || g.in.h == 0) return p;
  p.tensors = sums ? 2 : 1;
  p.column_blocks = int(ceil_div(g.out.w, kBlock)), p.chunk_columns = int(round_up(g.in.w, 16));
  p.images = int(std::min<int64_t>(kStrips / p.column_blocks, g.batch));
  // An image's rows begin at any two of 16 bytes, and are read in whole parts of sixteen columns; strips of different images lie in different banks.
  p.row_bytes = int(g.in.w * 2);
  const int banks = kRingBanks, place = 16 * p.column_blocks % banks, beside = 14 + 2 * int(p.chunk_columns - g.in.w);
  // Rows of a stage: as few as may be are multiplied in vain.
  const int64_t most_rows = (round_down(most_bytes(sums) / p.images - place, banks) + place - beside) / p.row_bytes - g.taps.h + 1;
  if (most_rows < 1) return p;
  int64_t least = 0;
  const int64_t fewest_tiles = ceil_div(g.out.h, most_rows);
  for (int64_t tiles = fewest_tiles; tiles < fewest_tiles + 8 && tiles <= g.out.h; ++tiles) {
    const int64_t rows = ceil_div(g.out.h, tiles);
    const int64_t cost = ceil_div(g.out.h, rows) * (rows + g.taps.h - 1 + kRowsOfStage + (sums ? round_up(rows, kPlaneRingSumRows) : 0));
    if (p.rows == 0 || cost < least) least = cost, p.rows = int(rows);
  }
  const int64_t bytes = (p.rows + g.taps.h - 1) * p.row_bytes + beside;
  p.slot_bytes = ring_slot_bytes(bytes, place);
  p.result_bytes = sums ? int(round_up(p.rows * g.out.w * 2 + 14, 16)) : 0;
  p.row_tiles = int(ceil_div(g.out.h, p.rows)), p.groups = int(ceil_div(g.batch, p.images));
  const int64_t stages = int64_t{p.row_tiles} * p.groups;
  const int blocks = std::clamp(device.shared_bytes / (p.shared_bytes() + kPlaneRingBlockBytes), 1, plane_ring_blocks(sums, int(g.taps.h)));
  const int64_t slots = int64_t{device.sm_count} * blocks;
  // A convolution gains by what is loaded while something else is computed: where blocks have several stages. Both gradients gain by what is read once.
  if (stages > INT32_MAX / 2 || (!sums && g.channels * stages <= slots)) return p;
  p.stages = int(stages), p.splits = ring_splits(g.channels, stages, slots, sums ? 0 : kStagesDealt);
  p.fits = true;
  return p;
}

}  // namespace

bool is_copied(const Placement& t, int64_t batch, int64_t rows) {
  const Strides& s = t.stride;
  const int64_t end = (batch - 1) * s.n + (t.channels - 1) * s.c + rows * t.width;
  return s.n >= 0 && s.c >= 0 && t.address % 16 == 0 && end % 8 == 0;
}

int ring_splits(int64_t channels, int64_t stages, int64_t slots, int stages_dealt) {
  int splits = 1;
  int64_t least = 0;
  const int64_t most_splits = std::clamp<int64_t>(4 * slots / channels, 1, std::min<int64_t>(stages, 1024));
  for (int s = 1; s <= most_splits; ++s) {
    const int64_t cost = ceil_div(channels * s, slots) * (ceil_div(stages, s) + 1);
    if (s == 1 || cost < least) least = cost, splits = s;
  }
  // Memory serves some multiprocessors faster than others. So it is better still to deal out many small blocks as multiprocessors have room: where there are
  // several waves of them, all end together. Of fewer waves the last one takes more than that gains, and of a stage each, what a block begins with.
  constexpr int kWavesDealt = 5;
  const int64_t dealt = stages_dealt ? ceil_div(stages, int64_t{stages_dealt}) : 0;
  return channels * dealt >= kWavesDealt * slots ? int(dealt) : splits;
}

PlaneRingPlan plane_ring_plan(const Geometry& g, const Placement& source, const Placement& target, const PlaneRingDevice& device) {
  return is_read(source, g.batch, g.in.h) && has_whole_rows(target) ? plan_of(g, false, device) : PlaneRingPlan{};
}

PlaneRingPlan plane_ring_gradients_plan(const Geometry& g, const Placement& grad, const Placement& x, const Placement& dx, const PlaneRingDevice& device) {
  const bool same = g.in.h == g.out.h && g.in.w == g.out.w && g.pad.h == g.taps.h / 2 && g.pad.w == g.taps.w / 2 && g.taps.h == g.taps.w;
  return same && is_read(grad, g.batch, g.out.h) && is_read(x, g.batch, g.in.h) && has_whole_rows(dx) ? plan_of(g, true, device) : PlaneRingPlan{};
}

}  // namespace fusebackend::depthwise_conv
