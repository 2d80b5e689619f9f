#include "depthwise_conv/dilated_rows_plan.h"

#include <algorithm>

#include "depthwise_conv/toeplitz_plan.h"

namespace fusebackend::depthwise_conv {
namespace {

int vector_length(DType dtype) { return dtype == DType::kFloat32 ? 4 : 8; }

// Elements between the last multiple of 16 bytes and the first row; -1 if that differs between rows.
int lead_of(const Placement& t, const Geometry& g, int64_t rows, int length) {
  const auto differs = [&](int64_t size, int64_t step) { return size > 1 && step % length != 0; };
  if (differs(g.batch, t.stride.n) || differs(t.channels, t.stride.c) || differs(rows, t.stride.h)) return -1;
  return int(t.address / uint64_t(kDilatedRowsBytes / length) % uint64_t(length));
}

// Which kernels take the convolution of `source` to `target`, whose vectors threads share; with no `items` in all yet.
DilatedRowsPlan rows_plan(const Geometry& g, DType dtype, const Placement& source, const Placement& target) {
  DilatedRowsPlan p = {};
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16) return p;
  // A row of the source is convolved to one of the target.
  if (g.taps.h != 1 || g.stride.h != 1 || g.pad.h != 0 || g.in.h != g.out.h) return p;
  // Without dilation others are faster: there the taps of a result are one load.
  if (g.stride.w != 1 || g.multiplier != 1 || g.dilation.w < 2 || g.taps.w < 2 || g.taps.w > kDilatedRowsTaps) return p;
  if (source.stride.w != 1 || target.stride.w != 1) return p;
  const int length = vector_length(dtype);
  p.aligned = lead_of(target, g, g.out.h, length) == 0 && lead_of(source, g, g.in.h, length) == 0 && g.in.w % length == 0 && g.out.w % length == 0 &&
              g.pad.w % length == 0 && g.dilation.w % length == 0;
  p.fits = g.out.w > 0;
  return p;
}

// Cuts a channel's rows of `columns` into the shares of threads, of so many vectors each.
void share(DilatedRowsPlan& p, const Geometry& g, DType dtype, const Placement& target, int64_t columns, int vectors_each) {
  const int length = vector_length(dtype), lead = lead_of(target, g, g.out.h, length);
  const int64_t vectors = ceil_div(columns + (lead < 0 ? length - 1 : lead), length);
  p.part = int(ceil_div(vectors, vectors_each));
  p.items = g.batch * g.out.h * p.part;
}

void count_in_32_bits(DilatedRowsPlan& p) { p.fits = p.fits && p.items > 0 && p.items <= INT32_MAX / 2; }

// As many splits of a channel as fill the multiprocessors most evenly; a block has some steps' time to begin and end.
void split(DilatedRowsPlan& p, int64_t channels, int64_t slots) {
  constexpr int kEnds = 2, kMostSplits = 256;
  double least = 0;
  for (int s = 1; s <= kMostSplits && s <= ceil_div(p.items, kDilatedRowsSumThreads); ++s) {
    const double cost = double(ceil_div(channels * s, slots)) * double(ceil_div(p.items, int64_t{s} * kDilatedRowsSumThreads) + kEnds);
    if (s == 1 || cost < least) least = cost, p.splits = s;
  }
  p.fits = channels * p.splits <= INT32_MAX;
}

}  // namespace

DilatedRowsPlan dilated_rows_plan(const Geometry& g, DType dtype, const Placement& source, const Placement& target) {
  DilatedRowsPlan p = rows_plan(g, dtype, source, target);
  if (!p.fits) return p;
  // To shift so many windows of 16 bits in registers takes longer than toeplitz.cuh's products, where these can be had.
  constexpr int kMostShifted = 5;
  p.fits = p.aligned || !is_half(dtype) || g.taps.w <= kMostShifted || !toeplitz_plan(g, false, source, target, 1).fits;
  share(p, g, dtype, target, g.out.w, dilated_rows_vectors(int(g.taps.w), p.aligned));
  p.items *= g.channels;
  count_in_32_bits(p);
  return p;
}

DilatedRowsPlan dilated_rows_weight_grad_plan(const Geometry& g, DType dtype, const Placement& grad, const Placement& x, int sm_count) {
  DilatedRowsPlan p = rows_plan(g, dtype, x, grad);
  if (!p.fits) return p;
  share(p, g, dtype, grad, g.out.w, dilated_rows_weight_grad_vectors(int(g.taps.w), p.aligned));
  count_in_32_bits(p);
  if (p.fits) split(p, g.channels, int64_t{dilated_rows_weight_grad_blocks(int(g.taps.w), p.aligned)} * sm_count);
  return p;
}

DilatedRowsPlan dilated_rows_gradients_plan(const Geometry& g, DType dtype, const Placement& grad, const Placement& x, const Placement& dx, bool need_bias, int sm_count) {
  const Geometry r = reversed(g);
  DilatedRowsPlan p = rows_plan(r, dtype, grad, dx);
  // Windows begin at columns from -pad on, by steps of the dilation: where none does at or before the first, the gradient's first columns are in no sum.
  if (!p.fits || x.stride.w != 1 || (need_bias && r.pad.w < 0)) return {};
  p.aligned = p.aligned && lead_of(x, r, r.out.h, vector_length(dtype)) == 0;
  p.bias_tap = need_bias ? int(std::min(r.pad.w / r.dilation.w, r.taps.w - 1)) : -1;
  p.columns = int(need_bias ? std::max(r.out.w, r.in.w + r.pad.w - p.bias_tap * r.dilation.w) : r.out.w);
  share(p, r, dtype, dx, p.columns, 1);
  count_in_32_bits(p);
  if (p.fits) split(p, r.channels, int64_t{dilated_rows_gradients_blocks(int(r.taps.w), p.aligned, is_half(dtype))} * sm_count);
  return p;
}

}  // namespace fusebackend::depthwise_conv
