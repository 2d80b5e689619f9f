#include "depthwise_conv/channel_tile_plan.h"

#include <algorithm>
#include <cstdlib>

namespace fusebackend::depthwise_conv {
namespace {

// Offsets in an image are counted in 32 bits, and 16 bytes are eight channels of a pixel.
bool is_loadable(const Placement& t, int64_t rows) {
  const Strides& s = t.stride;
  const bool aligned = s.n % 8 == 0 && s.h % 8 == 0 && s.w % 8 == 0 && t.address % 16 == 0;
  return aligned && s.c == 1 && s.h >= 0 && s.w >= 0 && (rows + 64) * s.h + (t.width + 64) * s.w <= INT32_MAX / 4;
}

}  // namespace

ChannelTilePlan channel_tile_plan(const Geometry& g, const Placement& x, const Placement& y, bool weight_grad, int sm_count) {
  ChannelTilePlan p = {};
  if (g.stride.h != 1 || g.stride.w != 1 || g.dilation.h != 1 || g.dilation.w != 1 || g.multiplier != 1) return p;
  const int taps = int(g.taps.h);
  // Windows of 3x3 are left to kernels that multiply and add: their nine products a result are few.
  if (g.taps.h != g.taps.w || (taps != 5 && taps != 7) || g.channels % 8) return p;
  const int64_t rows = std::max(g.in.h, g.out.h);
  if (!is_loadable(x, rows) || !is_loadable(y, rows) || std::abs(g.pad.h) > 32 || std::abs(g.pad.w) > 32) return p;

  // Strips of a segment: as few places of the products empty as possible.
  const int places = weight_grad ? kProductStrips : kBandStrips, most_words = kFillWords;
  const int blocks = int(ceil_div(g.out.w, 8));
  const auto words_of = [&](int strips) {
    const int64_t words = weight_grad ? std::min<int64_t>(std::max(g.in.w, g.out.w), 8 * strips + 8) : std::min<int64_t>(ceil_div(g.in.w, 2), 4 * strips + 4);
    return int(words);
  };
  int least = 0;
  for (int tiles = 1; tiles <= blocks; ++tiles) {
    const int strips = int(ceil_div(blocks, tiles));
    int bits = 0;
    while (1 << bits < strips) ++bits;
    const int words = words_of(strips);
    if (1 << bits > places || words > most_words) continue;
    const int segments = std::min(places >> bits, most_words / words);
    const int cost = tiles * (places / segments + 1);
    if (p.segments == 0 || cost < least) least = cost, p.strips = strips, p.slot_bits = bits, p.segments = segments, p.words = words, p.column_tiles = tiles;
    if (strips == 1) break;
  }
  if (p.segments == 0) return p;
  p.column_tiles = int(ceil_div(blocks, p.strips));
  p.shift = weight_grad ? 0 : int(g.pad.w & 1);
  p.channel_tiles = int(ceil_div(g.channels, kTileChannels));

  // Parts of the rows as long as possible, of which the multiprocessors get equally many.
  const int64_t slots = int64_t{kChannelTileBlocks} * sm_count;
  const int of_group = weight_grad ? 2 * p.segments : p.segments;
  double cheapest = 0;
  for (int parts = 1; parts <= 32 && parts <= ceil_div(g.out.h, taps); ++parts) {
    const int part_rows = int(ceil_div(g.out.h, parts));
    const int64_t groups = ceil_div(g.batch * ceil_div(g.out.h, part_rows), of_group);
    const int64_t splits = std::clamp<int64_t>(slots / (int64_t{p.channel_tiles} * p.column_tiles), 1, groups);
    const int64_t waves = weight_grad ? ceil_div(groups, splits) * ceil_div(splits * p.channel_tiles * p.column_tiles, slots)
                                      : ceil_div(groups * p.channel_tiles * p.column_tiles, slots);
    const double cost = double(waves) * double(part_rows + 2 * taps);
    if (parts > 1 && cost >= cheapest) continue;
    cheapest = cost, p.rows = part_rows, p.groups = groups, p.splits = int(std::min<int64_t>(splits, 1024)) * p.column_tiles;
  }
  p.row_tiles = int(ceil_div(g.out.h, p.rows));
  p.all_segments = g.batch * p.row_tiles;
  p.row_pitch = int(round_up(p.segments * p.segment_pitch(weight_grad), 4));
  const int in_words = kTileChannels * ((weight_grad ? 2 : 4) * p.row_pitch + kChunkPad) + 64;
  const int out_words = kTileChannels * (2 * 64 + kChunkPad);
  const int on_their_way = kChannelTileAhead * kPixelPairWords * kChannelTileThreads;
  p.shared_bytes = 4 * (on_their_way + in_words + (weight_grad ? out_words : 2 * out_words));
  p.fits = p.all_segments > 0 && p.all_segments <= INT32_MAX / 2 && p.groups * p.column_tiles * p.channel_tiles <= INT32_MAX &&
           int64_t{p.splits} * p.channel_tiles <= INT32_MAX;
  return p;
}

}  // namespace fusebackend::depthwise_conv
