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

DilatedRowsPlan rows_plan(const Geometry& g, DType dtype, const Placement& source, const Placement& target, bool weight_grad) {
  DilatedRowsPlan p = {};
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16) return p;
  // A row of the source is convolved to one of the target.
  if (g.taps.h != 1 || g.stride.h != 1 || g.pad.h != 0 || g.in.h != g.out.h) return p;
  // Without dilation others are faster: there the taps of a result are one load.
  if (g.stride.w != 1 || g.multiplier != 1 || g.dilation.w < 2 || g.taps.w < 2 || g.taps.w > kDilatedRowsTaps) return p;
  if (source.stride.w != 1 || target.stride.w != 1) return p;
  const int length = vector_length(dtype), from = lead_of(source, g, g.in.h, length), to = lead_of(target, g, g.out.h, length);
  p.aligned = to == 0 && from == 0 && g.in.w % length == 0 && g.out.w % length == 0 && g.pad.w % length == 0 && g.dilation.w % length == 0;
  // To shift so many windows of 16 bits in registers takes longer than toeplitz.cuh's products, where these can be had.
  constexpr int kMostShifted = 5;
  if (!weight_grad && !p.aligned && is_half(dtype) && g.taps.w > kMostShifted && toeplitz_plan(g, false, source, target, 1).fits) return p;
  const int64_t vectors = ceil_div(g.out.w + (to < 0 ? length - 1 : to), length);
  p.part = int(ceil_div(vectors, weight_grad ? dilated_rows_weight_grad_vectors(int(g.taps.w), p.aligned) : dilated_rows_vectors(int(g.taps.w), p.aligned)));
  p.items = g.batch * g.out.h * p.part;
  p.fits = g.out.w > 0;
  return p;
}

bool is_counted_in_32_bits(int64_t items) { return items > 0 && items <= INT32_MAX / 2; }

}  // namespace

DilatedRowsPlan dilated_rows_plan(const Geometry& g, DType dtype, const Placement& source, const Placement& target) {
  DilatedRowsPlan p = rows_plan(g, dtype, source, target, false);
  p.items *= g.channels;
  p.fits = p.fits && is_counted_in_32_bits(p.items);
  return p;
}

DilatedRowsPlan dilated_rows_weight_grad_plan(const Geometry& g, DType dtype, const Placement& grad, const Placement& x, int sm_count) {
  DilatedRowsPlan p = rows_plan(g, dtype, x, grad, true);
  p.fits = p.fits && is_counted_in_32_bits(p.items);
  if (!p.fits) return p;
  // As many splits as fill the multiprocessors most evenly; a block has some steps' time to begin and end.
  constexpr int kEnds = 2, kMostSplits = 256;
  const int64_t slots = int64_t{dilated_rows_weight_grad_blocks(int(g.taps.w), p.aligned)} * sm_count;
  double least = 0;
  for (int s = 1; s <= kMostSplits && s <= ceil_div(p.items, kDilatedRowsThreads); ++s) {
    const double cost = double(ceil_div(g.channels * s, slots)) * double(ceil_div(p.items, int64_t{s} * kDilatedRowsThreads) + kEnds);
    if (s == 1 || cost < least) least = cost, p.splits = s;
  }
  p.fits = g.channels * p.splits <= INT32_MAX;
  return p;
}

}  // namespace fusebackend::depthwise_conv
