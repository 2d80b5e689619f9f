#include "depthwise_conv/register_window_plan.h"

#include <algorithm>

namespace fusebackend::depthwise_conv {
namespace {

constexpr int kForwardSharedBytes = 48 * 1024, kGradSharedBytes = 100 * 1024;
constexpr int kTileColumns = 128;

// Rows of 16-byte vectors: an odd number of these apart, so that neighbouring rows are in different banks.
int odd_vectors(int64_t columns) { return int(ceil_div(columns, 4) | 1) * 4; }

void cut_columns(RegisterWindowPlan& p, const Geometry& g, int multiple) {
  p.column_tiles = ceil_div(g.out.w, kTileColumns);
  p.columns = int(round_up(ceil_div(g.out.w, p.column_tiles), multiple));
  p.column_tiles = ceil_div(g.out.w, p.columns);
}

}  // namespace

bool has_register_window(const Geometry& g) {
  const bool square = g.taps.h <= kMaxWindowTaps && (g.taps.w == 3 || g.taps.w == 5 || g.taps.w == 7);
  const bool plain = g.stride.h == 1 && g.stride.w == 1 && g.dilation.h == 1 && g.dilation.w == 1 && g.multiplier == 1;
  return square && plain;
}

RegisterWindowPlan register_window_forward_plan(const Geometry& g, int sm_count) {
  RegisterWindowPlan p = {};
  cut_columns(p, g, kForwardColumns);
  p.x_pitch = odd_vectors(p.columns - kForwardColumns + forward_window(int(g.taps.w)));
  const auto shared = [&](int images, int rows) { return 4 * (int64_t{images} * (rows + g.taps.h - 1) * p.x_pitch + 8 * g.taps.h); };
  for (int parts = 1;; ++parts) {
    p.rows = int(round_up(ceil_div(g.out.h, parts), kForwardRows));
    if (shared(1, p.rows) <= kForwardSharedBytes) break;
    if (p.rows <= kForwardRows) return p;
  }
  p.row_tiles = ceil_div(g.out.h, p.rows);
  const int each = p.rows / kForwardRows * (p.columns / kForwardColumns);
  p.images = 1;
  while (p.row_tiles == 1 && p.images < g.batch && (p.images + 1) * each <= 256 && shared(p.images + 1, p.rows) <= kForwardSharedBytes &&
         g.channels * ceil_div(g.batch, p.images + 1) * p.column_tiles >= 8 * int64_t{sm_count})
    ++p.images;
  p.x_rows = p.rows + int(g.taps.h) - 1;
  p.tasks = p.images * each;
  p.image_tiles = ceil_div(g.batch, p.images);
  p.threads = int(std::min<int64_t>(round_up(p.tasks, 32), 256));
  p.shared_bytes = int(shared(p.images, p.rows));
  p.fits = p.tiles() * g.channels <= INT32_MAX;
  return p;
}

RegisterWindowPlan register_window_weight_grad_plan(const Geometry& g, int sm_count) {
  RegisterWindowPlan p = {};
  cut_columns(p, g, kGradColumns);
  p.x_pitch = odd_vectors(p.columns - kGradColumns + grad_window(int(g.taps.w)));
  p.grad_pitch = odd_vectors(p.columns);
  const auto shared = [&](int64_t images, int64_t rows) { return 4 * images * ((rows + g.taps.h - 1) * p.x_pitch + rows * p.grad_pitch); };
  for (int parts = 1;; ++parts) {
    p.rows = int(ceil_div(g.out.h, parts));
    if (shared(1, p.rows) <= kGradSharedBytes) break;
    if (p.rows == 1) return p;
  }
  p.row_tiles = ceil_div(g.out.h, p.rows);
  p.threads = 256;
  // As many images as leave the fewest threads idle.
  const int each = p.rows * (p.columns / kGradColumns);
  double best = 0;
  p.images = 1;
  for (int images = 1; images <= g.batch && images <= 64 && (images == 1 || p.row_tiles == 1) && shared(images, p.rows) <= kGradSharedBytes; ++images) {
    const double busy = double(images * each) / double(round_up(images * each, p.threads));
    if (busy > best + .02) best = busy, p.images = images;
  }
  p.x_rows = p.rows + int(g.taps.h) - 1;
  p.tasks = p.images * each;
  p.image_tiles = ceil_div(g.batch, p.images);
  const int64_t slots = 2 * int64_t{sm_count};
  double least = 0;
  for (int s = 1; s <= 256 && s <= p.tiles(); ++s) {
    const double cost = double(ceil_div(g.channels * s, slots)) * (double(ceil_div(p.tiles(), s)) + 1);
    if (s == 1 || cost < least) least = cost, p.splits = s;
  }
  p.shared_bytes = int(std::max<int64_t>(shared(p.images, p.rows), 4 * 8 * (kMaxWindowTaps * kMaxWindowTaps + 1)));
  p.fits = g.channels * p.splits <= INT32_MAX && p.tiles() > 0;
  return p;
}

}  // namespace fusebackend::depthwise_conv
