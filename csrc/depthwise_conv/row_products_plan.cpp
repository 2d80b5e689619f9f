#include "depthwise_conv/row_products_plan.h"

#include <algorithm>

namespace fusebackend::depthwise_conv {
namespace {

// Offsets in an image, and the step from one to the next, are counted in 32 bits.
bool is_small(const Strides& s, int64_t rows) { return s.n >= 0 && s.n <= INT32_MAX && s.h >= 0 && (rows + 64) * s.h <= INT32_MAX / 2; }

}  // namespace

RowProductsPlan row_products_plan(const Geometry& g, const Placement& grad, const Placement& x, int sm_count) {
  RowProductsPlan p = {};
  if (g.stride.h != 1 || g.stride.w != 1 || g.dilation.h != 1 || g.dilation.w != 1 || g.multiplier != 1) return p;
  if ((g.taps.w != 3 && g.taps.w != 5 && g.taps.w != 7) || g.taps.h > 16 - kBandRows + 1) return p;
  if (grad.stride.w != 1 || x.stride.w != 1) return p;
  p.columns = move_of(x, 2) != Move::kPairs ? 1 : columns_of(move_of(grad, 4));
  // The kernel's words begin at a number of columns beside the gradient's that is known when it is compiled.
  if (g.pad.w != g.taps.w / 2 || g.pad.h < -(1 << 20) || g.pad.h > 1 << 20) return p;
  if (!is_small(grad.stride, g.out.h) || !is_small(x.stride, std::max(g.in.h, g.out.h) + 2 * std::abs(g.pad.h))) return p;
  p.bands = int(ceil_div(g.out.h, kBandRows));
  p.chunks = int(ceil_div(std::max(g.out.w, g.in.w), kChunkColumns));
  p.units = g.batch * p.bands * p.chunks;
  // As many splits as fill the multiprocessors most evenly.
  const int64_t slots = int64_t{kRowProductsBlocks} * sm_count, warps = kRowProductsThreads / 32;
  double least = 0;
  for (int s = 1; s <= 256 && s <= ceil_div(p.units, warps); ++s) {
    const double cost = double(ceil_div(g.channels * s, slots)) * (double(ceil_div(p.units, s * warps)) + 8);
    if (s == 1 || cost < least) least = cost, p.splits = s;
  }
  p.fits = p.units > 0 && p.units <= INT32_MAX / 2 && g.channels * p.splits <= INT32_MAX;
  return p;
}

}  // namespace fusebackend::depthwise_conv
