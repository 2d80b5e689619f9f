#include "depthwise_conv/outer_products_plan.h"

#include <algorithm>

namespace fusebackend::depthwise_conv {
namespace {

constexpr int kWarps = 8, kBlocksPerSm = 2;
constexpr int kSharedBytes = 100 * 1024;  // of a block: two fit into a multiprocessor
constexpr int kMostSharedBytes = 200 * 1024;

int modulo(int64_t n, int64_t d) { return int(n % d < 0 ? n % d + d : n % d); }

void set_tile(OuterProductsPlan& p, const Geometry& g, int channels, int images, int rows) {
  p.grad.channels = p.x.channels = channels;
  p.grad.images = p.x.images = images;
  p.grad.rows = rows;
  p.x.rows = int((rows - 1) * g.stride.h + (g.taps.h - 1) * g.dilation.h + 1);
  p.grad.columns = 16 * p.column_blocks;
  p.x.columns = int(16 * g.stride.w * (p.column_blocks - 1) + 8 * p.blocks);
  p.grad.pitch = odd_pitch(p.grad.columns), p.x.pitch = odd_pitch(p.x.columns);
  p.grad.plane_pitch = p.grad.rows * p.grad.pitch, p.x.plane_pitch = p.x.rows * p.x.pitch;
  const int64_t elements = int64_t{p.grad.planes()} * p.grad.plane_pitch + int64_t{p.x.planes()} * p.x.plane_pitch;
  // A row of zeros follows the tiles. Afterwards the same memory holds products and sums.
  const int64_t tiles = 2 * (p.stages * elements + p.grad.pitch);
  const int64_t lines = int64_t{channels} * p.tap_groups * p.per_warp * p.slices;
  const int64_t after = 4 * (int64_t{kWarps} * 16 * (8 * p.blocks + 1) + lines * g.taps.w + channels * p.slices);
  const int64_t bytes = std::max(tiles, after);
  p.shared_bytes = bytes > INT32_MAX / 2 ? INT32_MAX / 2 : int(bytes);
}

}  // namespace

OuterProductsPlan outer_products_plan(const Geometry& g, const Placement& grad, const Placement& x, int sm_count) {
  OuterProductsPlan p = {};
  if (g.stride.w > 2 || g.stride.h > 8 || g.taps.h * g.dilation.h > 512 || g.taps.w * g.dilation.w > 64) return p;
  p.fill_grad = move_of(grad, 4), p.fill_x = g.multiplier == 1 ? move_of(x, 4) : Move::kElements;
  const bool side_by_side = g.multiplier == 1 && (along_channels(p.fill_grad) || along_channels(p.fill_x));
  p.shift = modulo(-g.pad.w, columns_of(p.fill_x));
  const int64_t columns = 15 * g.stride.w + p.shift + (g.taps.w - 1) * g.dilation.w + 1;
  p.blocks = columns <= 24 ? 3 : 6;
  if (columns > 8 * p.blocks) return p;
  p.per_warp = p.blocks == 3 && g.taps.h > 4 ? 7 : 4;
  const int groups = int(ceil_div(g.taps.h, p.per_warp));

  int channels = side_by_side ? 8 : 1;
  if (side_by_side && g.channels < 8) channels = int(g.channels);
  p.vectors = columns_of(p.fill_grad) > 1 && columns_of(p.fill_x) > 1;
  const int all_blocks = int(ceil_div(g.out.w, 16)), most_blocks = g.out.h == 1 ? 32 : 8;
  bool found = false;
  const auto choose = [&](int limit) {
    p.tap_groups = std::min(groups, kWarps / channels);
    p.tap_tiles = ceil_div(groups, p.tap_groups);
    p.slices = kWarps / (channels * p.tap_groups);
    for (p.stages = p.vectors ? 2 : 1; p.stages >= 1 && !found; --p.stages) {
      for (int column_parts = 1; column_parts <= all_blocks && !found; ++column_parts) {
        p.column_blocks = int(ceil_div(all_blocks, column_parts));
        if (p.column_blocks > most_blocks) continue;
        for (int parts = 1; parts <= g.out.h; ++parts) {
          const int rows = int(ceil_div(g.out.h, parts));
          set_tile(p, g, channels, 1, rows);
          if ((found = p.shared_bytes <= limit)) break;
          if (rows <= 8) break;
        }
        if (found) break;
        if (p.column_blocks <= 4) break;
      }
      if (found) break;
    }
    return found;
  };
  if (!choose(kSharedBytes) && !choose(kMostSharedBytes)) {
    if (channels == 1) return p;
    channels = 1;
    if (!choose(kMostSharedBytes)) return p;
  }
  for (Move* fill : {&p.fill_grad, &p.fill_x})
    if (channels % 8 && *fill == Move::kChannels) *fill = Move::kElements;
  const int rows = p.grad.rows;
  p.row_tiles = ceil_div(g.out.h, rows);
  p.column_tiles = ceil_div(all_blocks, p.column_blocks);
  p.channel_tiles = ceil_div(g.outputs(), channels);
  int images = 1;
  for (int next = 2; p.row_tiles == 1 && next <= g.batch && next <= 64 && images * rows < 128; ++next) {
    set_tile(p, g, channels, next, rows);
    if (p.shared_bytes > 72 * 1024) break;
    images = next;
  }
  set_tile(p, g, channels, images, rows);
  p.image_tiles = ceil_div(g.batch, images);
  // As many splits as fill the multiprocessors most evenly.
  const int64_t base = p.channel_tiles * p.tap_tiles, slots = int64_t{kBlocksPerSm} * sm_count;
  double least = 0;
  for (int s = 1; s <= 256 && s <= p.tiles(); ++s) {
    const double cost = double(ceil_div(base * s, slots)) * (double(ceil_div(p.tiles(), s)) + 1);
    if (s == 1 || cost < least) least = cost, p.splits = s;
  }
  p.threads = kWarps * 32;
  p.fits = p.grid() <= INT32_MAX && p.tiles() > 0 && p.tiles() <= INT32_MAX;
  return p;
}

}  // namespace fusebackend::depthwise_conv
