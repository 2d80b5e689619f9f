#include "depthwise_conv/strided_ring_plan.h"

#include <algorithm>

namespace fusebackend::depthwise_conv {
namespace {

constexpr int kRowsOfStage = 4;                 // that take as long as what a thread does once a stage
constexpr int kWarpsInVain = 6;                 // of a multiprocessor, that would do no more than wait for what they read
constexpr int kTilings = 3, kMostSegments = 8;  // that are tried
constexpr int kStagesDealt = 4;                 // to a block

// Bytes of a stage, at most: so that a multiprocessor has several blocks.
constexpr int most_bytes(bool sums) { return sums ? 30 << 10 : 24 << 10; }

bool has_dense_rows(const Placement& t) { return (t.stride.w == 1 || t.width == 1) && t.stride.h == t.width; }

bool is_read(const Placement& t, int64_t batch, int64_t rows) { return has_dense_rows(t) && is_copied(t, batch, rows); }

bool has_words(const Placement& t) { return move_of(t, 2) == Move::kPairs; }

// Images are so far apart that threads of neighbouring ones, `step` bytes a column, are in different banks.
int slot_bytes(int64_t bytes, int64_t columns, int step) {
  return ring_slot_bytes(bytes, round_up(columns * step, 16) % kRingBanks);
}

// That a multiprocessor has at once.
int blocks_of(const StridedRingPlan& p, bool sums, int taps, const PlaneRingDevice& device) {
  const int in_shared = device.shared_bytes / (p.shared_bytes() + kStridedRingBlockBytes);
  const int in_registers = strided_ring_blocks(sums, taps) * (kStridedRingThreads + 32) / (p.threads + 32);
  return std::max(std::min(in_shared, in_registers), 1);
}

StridedRingPlan plan_of(const Geometry& g, bool sums, bool words, const PlaneRingDevice& device) {
  StridedRingPlan best = {};
  if (g.stride.h != 2 || g.stride.w != 2 || g.dilation.h != 1 || g.dilation.w != 1 || g.multiplier != 1) return best;
  if (g.taps.h != g.taps.w || (g.taps.h != 3 && g.taps.h != 5)) return best;
  if (g.pad.h < 0 || g.pad.h >= g.taps.h || g.pad.w < 0 || g.pad.w >= g.taps.w || g.batch * g.in.h * g.in.w == 0) return best;
  const int taps = int(g.taps.h), live = strided_ring_live(taps), behind = sums ? live - 1 : 0;
  if (g.out.h > INT32_MAX / 4 || g.in.h > INT32_MAX / 4 || g.in.w > 4 * kStridedRingThreads) return best;
  const int shift = words ? int(g.pad.w % 2) : 0;
  const int lines = int(g.out.h) + behind, columns = int(std::max(ceil_div(g.out.w, 2), sums ? ceil_div(g.in.w + g.pad.w - shift, 4) : 0));
  double most = 0;
  for (int segments = 1; segments <= kMostSegments; segments *= 2) {
    int tried = 0;
    for (int tiles = 1; tiles <= lines && tried < kTilings; ++tiles) {
      StridedRingPlan p = {};
      p.words = words, p.shift = shift, p.lines = lines, p.columns = columns, p.segments = segments;
      p.rows = int(ceil_div(lines, tiles)), p.segment_rows = int(ceil_div(p.rows, segments));
      const int64_t source_rows = std::min<int64_t>(2 * p.rows + (sums ? 0 : taps - 2), g.in.h);
      const int64_t grad_rows = std::min<int64_t>(p.rows + behind, g.out.h);
      // Rows begin at any two of 16 bytes.
      p.source_bytes = slot_bytes(source_rows * g.in.w * 2 + 30, columns, 8);
      p.grad_bytes = sums ? slot_bytes(grad_rows * g.out.w * 2 + 30, columns, 4) : 0;
      p.result_bytes = sums ? p.source_bytes : slot_bytes(p.rows * g.out.w * 2 + 30, columns, 4);
      const int64_t fit = most_bytes(sums) / (p.source_bytes + p.grad_bytes + p.result_bytes);
      if (fit == 0) continue;
      ++tried;
      p.images = int(std::min({int64_t{kStridedRingThreads / (segments * columns)}, fit, g.batch}));
      if (p.images == 0) break;
      const int busy = p.images * segments * columns;
      p.threads = int(round_up(busy, 32));
      // Of what a multiprocessor's warps do, the part that results come from.
      const double used = double(busy) / (p.threads + 32) * lines / (double(tiles) * segments * p.segment_rows);
      const double walked = double(p.segment_rows) / (p.segment_rows + live - 1 + kRowsOfStage);
      const double read = 2.0 * p.rows / (2.0 * p.rows + taps - 2);
      const double warps = double(blocks_of(p, sums, taps, device)) * p.threads / 32;
      const double score = used * walked * read * warps / (warps + kWarpsInVain);
      if (score <= most) continue;
      most = score;
      p.row_tiles = int(ceil_div(lines, p.rows)), p.groups = int(ceil_div(g.batch, p.images));
      best = p;
    }
  }
  if (most == 0) return best;
  const int64_t stages = int64_t{best.row_tiles} * best.groups;
  const int64_t slots = int64_t{device.sm_count} * blocks_of(best, sums, taps, device);
  if (stages > INT32_MAX / 2 || g.channels * stages < device.sm_count) return best;
  best.stages = int(stages), best.splits = ring_splits(g.channels, stages, slots, sums ? 0 : kStagesDealt), best.fits = true;
  return best;
}

}  // namespace

StridedRingPlan strided_ring_plan(const Geometry& g, const Placement& x, const Placement& y, const PlaneRingDevice& device) {
  return is_read(x, g.batch, g.in.h) && has_dense_rows(y) ? plan_of(g, false, has_words(x), device) : StridedRingPlan{};
}

StridedRingPlan strided_ring_gradients_plan(const Geometry& g, const Placement& grad, const Placement& x, const Placement& dx, const PlaneRingDevice& device) {
  const bool taken = is_read(grad, g.batch, g.out.h) && is_read(x, g.batch, g.in.h) && has_dense_rows(dx);
  return taken ? plan_of(g, true, has_words(x) && has_words(dx), device) : StridedRingPlan{};
}

}  // namespace fusebackend::depthwise_conv
