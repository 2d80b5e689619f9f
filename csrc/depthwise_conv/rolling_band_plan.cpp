#include "depthwise_conv/rolling_band_plan.h"

#include <algorithm>

namespace fusebackend::depthwise_conv {
namespace {

constexpr int kWindow = 16, kBlock = 8;  // source columns that a product reads, results that it makes

}  // namespace

RollingBandPlan rolling_band_plan(const Geometry& g, const Placement& source, const Placement& target, int sm_count) {
  RollingBandPlan p = {};
  if (g.stride.h != 1 || g.stride.w != 1 || g.dilation.h != 1 || g.dilation.w != 1) return p;
  if (g.taps.h != 3 && g.taps.h != 5 && g.taps.h != 7) return p;
  if (source.stride.w != 1 || target.stride.w != 1) return p;
  p.words = move_of(source, 2) == Move::kPairs && move_of(target, 2) == Move::kPairs;
  p.shift = p.words && g.pad.w % 2 != 0;
  if (p.shift + kBlock - 1 + g.taps.w > kWindow) return p;
  p.column_blocks = int(ceil_div(g.out.w, kBlock));
  p.groups = ceil_div(g.batch * p.column_blocks, 16);
  // Parts of the rows as long as possible, of which the multiprocessors get equally many.
  const int64_t columns = p.groups * g.outputs();
  const int64_t slots = int64_t{rolling_band_blocks(int(g.taps.h), p.words)} * (kRollingBandThreads / 32) * sm_count;
  double least = 0;
  for (int parts = 1; parts <= 32 && parts <= ceil_div(g.out.h, g.taps.h); ++parts) {
    const int rows = int(ceil_div(g.out.h, parts));
    const double cost = double(ceil_div(columns * ceil_div(g.out.h, rows), slots)) * double(rows + 2 * g.taps.h);
    if (parts == 1 || cost < least) least = cost, p.rows = rows;
  }
  p.row_tiles = ceil_div(g.out.h, p.rows);
  p.warps = columns * p.row_tiles;
  p.fits = p.warps > 0 && p.warps <= INT32_MAX && g.batch * p.column_blocks + 16 <= INT32_MAX;
  return p;
}

}  // namespace fusebackend::depthwise_conv
