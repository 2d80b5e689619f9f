#include "depthwise_conv/toeplitz_plan.h"

#include <algorithm>

namespace fusebackend::depthwise_conv {
namespace {

constexpr int kSharedBytes = 40 * 1024;       // of a block: several fit into a multiprocessor, and overlap loads with products
constexpr int kMostSharedBytes = 160 * 1024;  // where the halo needs it
constexpr int kTileColumns = 128, kFlatTileColumns = 512;
constexpr int kMaxSpan = 6;

int floor_div(int64_t n, int64_t d) { return int(n >= 0 ? n / d : -((d - 1 - n) / d)); }
int modulo(int64_t n, int64_t d) { return int(n - floor_div(n, d) * d); }

// Blocks of source columns that a warp loads, for `blocks` blocks of results; they are loaded by twos.
int loaded_blocks(const ToeplitzPlan& p) {
  const int n = p.step == ColumnStep::kHalf ? p.blocks / 2 - 1 + p.span : (p.blocks - 1) * (p.step == ColumnStep::kTwo ? 2 : 1) + p.span;
  return int(round_up(n, 2));
}

// Completes the plan for tiles of so many channels, images, rows and segments.
void set_tile(ToeplitzPlan& p, const Geometry& g, bool transposed, int channels, int images, int rows) {
  const int per_segment = p.step == ColumnStep::kHalf ? p.blocks * 4 : p.blocks * 8 * (p.step == ColumnStep::kTwo ? 2 : 1);
  const int reach = int((g.taps.h - 1) * g.dilation.h);
  const int top = transposed ? floor_div(g.stride.h - 1 + g.pad.h, g.stride.h) - p.row_base : reach;
  p.source.channels = p.target.channels = channels;
  p.source.images = p.target.images = images;
  p.target.rows = rows;
  p.source.rows = (rows / p.phases - 1) * p.row_step + top + 1;
  p.source.columns = (p.segments - 1) * per_segment + loaded_blocks(p) * 8;
  p.source.pitch = odd_pitch(p.source.columns);
  p.target.columns = p.segments * p.blocks * 8;
  p.target.pitch = odd_pitch(p.target.columns);
  p.source.plane_pitch = p.source.rows * p.source.pitch;
  p.target.plane_pitch = p.target.rows * p.target.pitch;
  p.in_place = channels > 1 && p.phases == 1 && images * rows * p.segments <= 16 && rows <= p.source.rows && p.target.columns <= p.source.pitch;
  if (p.in_place) p.target.pitch = p.source.pitch, p.target.plane_pitch = p.source.plane_pitch;
  const int64_t table = int64_t{channels} * g.taps.h * p.table_length * 4 + p.phases * g.taps.h * 4;
  const int64_t bytes = 2 * (int64_t{p.source.planes()} * p.source.plane_pitch + (p.in_place ? 0 : int64_t{p.target.planes()} * p.target.plane_pitch)) + table;
  p.shared_bytes = bytes > INT32_MAX / 2 ? INT32_MAX / 2 : int(bytes);
}

}  // namespace

ToeplitzPlan toeplitz_plan(const Geometry& g, bool transposed, const Placement& source, const Placement& target, int sm_count) {
  ToeplitzPlan p = {};
  if (g.stride.w > 2 || g.stride.h > 8 || (transposed && g.multiplier > 1)) return p;
  if (g.taps.h * g.dilation.h > 512 || g.taps.w * g.dilation.w > 512) return p;
  const Pair to = transposed ? g.in : g.out;
  const int64_t channels = g.outputs();
  p.step = g.stride.w == 1 ? ColumnStep::kOne : transposed ? ColumnStep::kHalf : ColumnStep::kTwo;
  p.fill = g.multiplier == 1 ? move_of(source, 4) : Move::kElements;
  p.store = move_of(target, 8);

  // Columns.
  const int64_t reach_w = (g.taps.w - 1) * g.dilation.w;
  const int raw = transposed ? floor_div(g.pad.w - reach_w, g.stride.w) : int(-g.pad.w);
  p.shift = modulo(raw, columns_of(p.fill));
  p.column_base = raw - p.shift;
  p.column_factor = transposed ? 1 : int(g.stride.w), p.column_divisor = transposed ? int(g.stride.w) : 1;
  const int64_t last = p.step == ColumnStep::kHalf ? (g.pad.w - 2 * p.column_base + 15) / 2 : 7 * p.column_factor + p.shift + reach_w;
  p.span = int(last / 8 + 1);
  p.span = p.step == ColumnStep::kTwo ? (p.span <= 3 ? 3 : 6) : p.span <= 2 ? 2 : p.span <= 3 ? 3 : p.step == ColumnStep::kHalf ? 6 : p.span <= 5 ? 5 : 7;
  if (p.span > kMaxSpan || (p.step == ColumnStep::kHalf && p.span > 3) || last / 8 + 1 > p.span) return p;
  p.table_length = p.step == ColumnStep::kHalf ? 16 * p.span + 14 : 8 * p.span + 7 * p.column_factor;
  const int all_blocks = int(ceil_div(to.w, 8));
  p.blocks = all_blocks <= 2 ? 2 : all_blocks <= 4 || p.step != ColumnStep::kOne ? 4 : 8;
  const int all_segments = int(ceil_div(all_blocks, p.blocks));
  const int most_segments = (to.h == 1 ? kFlatTileColumns : kTileColumns) / (8 * p.blocks);
  p.column_tiles = ceil_div(all_segments, most_segments);
  p.segments = int(ceil_div(all_segments, p.column_tiles));
  p.column_tiles = ceil_div(all_segments, p.segments);

  // Rows.
  p.phases = transposed ? int(g.stride.h) : 1;
  p.row_step = transposed ? 1 : int(g.stride.h);
  p.row_factor = transposed ? 1 : int(g.stride.h), p.row_divisor = p.phases;
  p.row_base = transposed ? floor_div(g.pad.h - (g.taps.h - 1) * g.dilation.h, g.stride.h) : int(-g.pad.h);

  // The tile: many channels where these lie side by side in memory.
  const bool side_by_side = g.multiplier == 1 && (along_channels(p.fill) || along_channels(p.store));
  const int all_rows = int(round_up(to.h, p.phases));
  int tile_channels = side_by_side ? (channels % 16 == 0 || channels > 64 ? 16 : 8) : 1;
  if (tile_channels == 8 && channels < 8 && p.fill != Move::kChannels && p.store != Move::kChannels) tile_channels = int(channels);
  const int most = side_by_side ? 72 * 1024 : kSharedBytes;
  // In many channels' tiles a plane's results should be the rows of one product: they can then take their sources' place.
  const int most_rows = side_by_side && p.phases == 1 ? std::max(16 / p.segments, 4) : all_rows;
  const auto choose_rows = [&](int limit, int least) {
    for (int parts = 1;; ++parts) {
      const int rows = int(round_up(ceil_div(all_rows, parts), p.phases));
      if (rows > most_rows) continue;
      set_tile(p, g, transposed, tile_channels, 1, rows);
      if (p.shared_bytes <= limit) return true;
      if (rows <= std::max(least, p.phases)) return false;
    }
  };
  bool found = choose_rows(most, 8);
  if (!found && tile_channels == 16) tile_channels = 8, found = choose_rows(most, 8);
  if (!found) found = choose_rows(kMostSharedBytes, 4);
  if (!found && tile_channels > 1) {
    tile_channels = 1;
    found = choose_rows(kMostSharedBytes, 1);
  }
  if (!found) return p;
  if (tile_channels % 8) {
    if (p.fill == Move::kChannels) p.fill = Move::kElements;
    if (p.store == Move::kChannels) p.store = Move::kElements;
  }
  const int rows = p.target.rows;
  p.row_tiles = ceil_div(all_rows, rows);
  p.channel_tiles = ceil_div(channels, tile_channels);
  // Several images, where they fit and there are blocks enough.
  int images = 1;
  if (p.row_tiles == 1) {
    for (int next = 2; next <= g.batch && next <= 64; ++next) {
      set_tile(p, g, transposed, tile_channels, next, rows);
      if (p.shared_bytes > kSharedBytes || (side_by_side && p.phases == 1 && !p.in_place)) break;
      if (p.channel_tiles * p.column_tiles * ceil_div(g.batch, next) < 8 * int64_t{sm_count}) break;
      images = next;
    }
  }
  set_tile(p, g, transposed, tile_channels, images, rows);
  p.image_tiles = ceil_div(g.batch, images);
  const int64_t jobs = int64_t{tile_channels} * p.phases * ceil_div(int64_t{images} * (rows / p.phases) * p.segments, 16);
  p.threads = jobs >= 16 ? 256 : jobs >= 3 ? 128 : 64;
  p.fits = p.grid() <= INT32_MAX;
  return p;
}

}  // namespace fusebackend::depthwise_conv
