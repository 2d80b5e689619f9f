#include "depthwise_conv/rolling_window_plan.h"

#include <algorithm>

namespace fusebackend::depthwise_conv {
namespace {

// Offsets in an image are counted in 32 bits.
bool is_small(const Strides& s, Pair sides) {
  return s.h >= 0 && s.w >= 0 && (sides.h + 64) * s.h + (sides.w + 64) * s.w <= INT32_MAX / 4;
}

bool have_vectors(const Placement& t, int bytes, int64_t elements, bool planes) {
  const Strides& s = t.stride;
  const bool steps = s.n % elements == 0 && s.h % elements == 0 && (planes ? s.c : s.w) % elements == 0;
  return steps && t.address % (bytes * elements) == 0;
}

}  // namespace

RollingWindowPlan rolling_window_plan(const Geometry& g, DType dtype, const Placement& x, const Placement& y, RollingResult result, int sm_count) {
  RollingWindowPlan p = {};
  const bool weight_grad = result == RollingResult::kWeightGrad, input_grad = result == RollingResult::kInputGrad;
  if (g.stride.h != g.stride.w || g.stride.h > 2 || (input_grad && g.stride.h != 2) || g.dilation.h != 1 || g.dilation.w != 1 || g.multiplier != 1) return p;
  const int taps = int(g.taps.h), item = int(element_size(dtype));
  if (g.taps.h != g.taps.w || (taps != 3 && taps != 5 && taps != 7)) return p;
  const bool planes = x.stride.w == 1 && y.stride.w == 1 && g.stride.w == 1;
  p.form = planes ? Rolling::kPlanes : g.stride.w == 2 ? Rolling::kStrided : Rolling::kChannels;
  if (planes) {
    if (dtype != DType::kFloat32 || g.pad.w != taps / 2 || g.in.w % 4 || g.out.w != g.in.w) return p;
    if (!have_vectors(x, item, 4, true) || !have_vectors(y, item, 4, true)) return p;
  } else if (x.stride.c != 1 || y.stride.c != 1) {
    return p;
  }
  const int channels = rolling_channels(taps, p.form), step = rolling_step(p.form);
  if (!planes && (g.channels % channels || !have_vectors(x, item, channels, false) || !have_vectors(y, item, channels, false))) return p;
  const Pair most_sides = {std::max(g.in.h, g.out.h), std::max(g.in.w, g.out.w)};
  if (!is_small(x.stride, most_sides) || !is_small(y.stride, most_sides) || std::abs(g.pad.h) > 32 || std::abs(g.pad.w) > 32) return p;

  // The threads of a block: as many channels side by side as leave few threads idle. Whole sectors of memory are worth more than a few threads.
  const int64_t groups = g.channels / channels;
  double most = 0;
  for (int n = 1; n <= (planes ? 1 : 64); ++n) {
    const double busy = double(kRollingThreads / n * n) / kRollingThreads * double(groups) / double(round_up(groups, n));
    const int64_t bytes = int64_t{n} * channels * item;
    const double score = busy * (n < groups && bytes % 32 ? .8 : bytes >= 64 ? 1 : .9);
    if (score >= most) most = score, p.groups = n;
  }
  p.lines = kRollingThreads / p.groups;
  p.channel_tiles = int(ceil_div(groups, p.groups));
  const int first_column = first_of_pairs(int(g.pad.w)), first_row = first_of_pairs(int(g.pad.h));
  if (input_grad && (g.in.h + g.pad.h <= 0 || g.in.w + g.pad.w <= 0)) return p;  // all of x is cropped
  p.all_rows = int(input_grad ? ceil_div(g.in.h + g.pad.h - first_row, 2) : g.out.h);
  const auto slots_of = [&](Rolling form) {
    return int64_t{weight_grad ? rolling_grad_blocks(taps) : input_grad ? kRollingInputBlocks : rolling_blocks(taps, form)} * sm_count;
  };
  double least = 0;
  const auto cut = [&](Rolling form) {
    const int columns = rolling_columns(taps, form);
    const int column_strips = int(input_grad ? ceil_div(g.in.w + g.pad.w - first_column, 2 * kRollingInputColumns) : ceil_div(g.out.w, columns));
    for (int parts = 1; parts <= 64 && parts <= ceil_div(p.all_rows, ceil_div(taps, step)); ++parts) {
      const int rows = int(ceil_div(p.all_rows, parts));
      const int64_t strips = g.batch * column_strips * ceil_div(p.all_rows, rows), tiles = ceil_div(strips, p.lines), slots = slots_of(form);
      // What the busiest thread walks down, or all blocks in whole waves.
      const int64_t rounds = weight_grad ? ceil_div(ceil_div(strips, std::max<int64_t>(slots / p.channel_tiles, 1)), p.lines) : round_up(tiles * p.channel_tiles, slots);
      const double cost = double(rounds) * double(rows * step + taps + 1) * columns;
      if (least == 0 || cost < least * .98) least = cost, p.form = form, p.rows = rows, p.column_strips = column_strips;
    }
  };
  cut(p.form);
  if (planes && result == RollingResult::kForward && taps == kRollingWideTaps) cut(Rolling::kWidePlanes);
  p.row_tiles = int(ceil_div(p.all_rows, p.rows));
  p.strips = g.batch * p.column_strips * p.row_tiles;
  p.strip_tiles = ceil_div(p.strips, p.lines);
  if (weight_grad) p.strip_tiles = std::clamp<int64_t>(slots_of(p.form) / p.channel_tiles, 1, std::min<int64_t>(p.strip_tiles, 1024));
  p.fits = p.strips > 0 && p.strips <= INT32_MAX / 2 && p.strip_tiles * p.channel_tiles <= INT32_MAX;
  return p;
}

}  // namespace fusebackend::depthwise_conv
