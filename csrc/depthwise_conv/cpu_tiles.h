// The tiles of planes that the vector kernels have in scratch (cpu_planes.h): the same whatever the width of vectors.
#pragma once
#include <algorithm>
#include <cstdint>

#include "common/integer_math.h"
#include "depthwise_conv/params.h"

namespace fusebackend::depthwise_conv {

struct TilePlan {
  int64_t rows, columns;               // of results
  int64_t tiles_down, tiles_across;    // of a plane
  int64_t width;                       // floats of a row of x of one of stride.w tiles
  int64_t pitch;                       // of all of them
  int64_t most_x_rows;

  int64_t tiles() const { return tiles_down * tiles_across; }
  int64_t x_rows(const Geometry& g, int64_t rows_of_results) const { return (rows_of_results - 1) * g.stride.h + std::max<int64_t>(g.taps.h - 1, 0) * g.dilation.h + 1; }
  int64_t tile_floats() const { return most_x_rows * pitch + 64; }
  int64_t grad_pitch() const { return round_up(columns, 16); }
};

// Tiles fit into the second-level cache where taps allow it.
inline TilePlan tile_plan(const Geometry& g) {
  constexpr int64_t kMostLanes = 16, kFloats = int64_t{1} << 15, kColumns = 1024;
  TilePlan t = {};
  t.columns = std::min(g.out.w, kColumns), t.tiles_across = ceil_div(g.out.w, t.columns);
  t.width = round_up(round_up(t.columns, kMostLanes) + ceil_div(std::max<int64_t>(g.taps.w - 1, 0) * g.dilation.w, g.stride.w) + 1, kMostLanes);
  t.pitch = t.width * g.stride.w;
  const int64_t halo = std::max<int64_t>(g.taps.h - 1, 0) * g.dilation.h;
  t.rows = std::clamp<int64_t>((kFloats / t.pitch - halo) / g.stride.h, std::min<int64_t>(16, g.out.h), g.out.h);
  t.tiles_down = ceil_div(g.out.h, t.rows), t.rows = ceil_div(g.out.h, t.tiles_down);
  t.most_x_rows = t.x_rows(g, t.rows);
  return t;
}

}  // namespace fusebackend::depthwise_conv
