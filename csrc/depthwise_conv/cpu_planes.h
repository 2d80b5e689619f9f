// The vector kernels of (batch, channels, height, width) tensors: the lanes are columns. Tiles of planes come to scratch as floats, with zeros around
// them, and with a stride of s columns as s tiles of every s-th column, so that all loads are of neighbouring columns.
//
// Zeros around a plane may meet finite numbers only: where taps (forward), or the incoming gradient or x (weight gradient), are not
// finite, plain loops compute what they reach.
#pragma once
#include <algorithm>
#include <vector>

#include "depthwise_conv/cpu_channels.h"
#include "depthwise_conv/cpu_inner_loops.h"
#include "depthwise_conv/cpu_loops.h"
#include "depthwise_conv/cpu_tiles.h"

namespace fusebackend::depthwise_conv {
namespace {

constexpr int64_t kFewRows = 4;  // with fewer, results side by side are the positions of the inner loops

// to[i] <- from[i] as floats.
template <typename T>
inline void copy_columns(float* to, const T* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) vstore(to + i, vload_as<float>(from + i));
  for (; i < n; ++i) to[i] = widen(from[i]);
}

// even[i] <- from[2 i], odd[i] <- from[2 i + 1]; n columns in all.
template <size_t... I>
inline void split_pairs(float* even, float* odd, Vec a, Vec b, std::index_sequence<I...>) {
  vstore(even, __builtin_shuffle(a, b, V<int32_t>{int32_t(2 * I)...}));
  vstore(odd, __builtin_shuffle(a, b, V<int32_t>{int32_t(2 * I + 1)...}));
}
template <typename T>
inline void split_columns(float* even, float* odd, const T* from, int64_t n) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes)
    split_pairs(even + i / 2, odd + i / 2, vload_as<float>(from + i), vload_as<float>(from + i + kLanes), std::make_index_sequence<kLanes>());
  for (; i < n; ++i) (i % 2 ? odd : even)[i / 2] = widen(from[i]);
}

// Rows [first, first + rows) of a plane of `high` by `wide`, and of them columns from `column` on, in tiles of every s-th column; zeros outside the plane.
template <typename T>
void load_tile(float* to, const T* plane, int64_t row_stride, int64_t high, int64_t wide, int64_t first, int64_t rows, int64_t column, int64_t s,
               const TilePlan& plan) {
  // Positions in the tile that hold columns of the plane.
  const int64_t begin = std::clamp<int64_t>(-column, 0, plan.pitch), end = std::clamp<int64_t>(wide - column, begin, plan.pitch);
  for (int64_t r = 0; r < rows; ++r, to += plan.pitch) {
    const int64_t row = first + r;
    if (row < 0 || row >= high || begin == end) {
      std::fill(to, to + plan.pitch, 0.f);
      continue;
    }
    const T* from = plane + row * row_stride + column;
    if (s == 1) {
      std::fill(to, to + begin, 0.f);
      copy_columns(to + begin, from + begin, end - begin);
      std::fill(to + end, to + plan.pitch, 0.f);
      continue;
    }
    std::fill(to, to + plan.pitch, 0.f);
    int64_t q = begin;
    if (s == 2) {
      if (q % 2) to[plan.width + q / 2] = widen(from[q]), ++q;
      if (q < end) split_columns(to + q / 2, to + plan.width + q / 2, from + q, end - q);
    } else {
      for (; q < end; ++q) to[q % s * plan.width + q / s] = widen(from[q]);
    }
  }
}

inline bool all_finite(const float* numbers, int64_t n) {
  Vec zeros = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) zeros += vload(numbers + i) * 0.f;
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += zeros[j];
  for (; i < n; ++i) sum += numbers[i] * 0.f;
  return sum == 0;
}

// Where a row of taps begins in a tile, for each column of taps.
inline std::vector<int64_t> tap_offsets(const Geometry& g, const TilePlan& plan) {
  std::vector<int64_t> offsets(g.taps.w);
  for (int64_t b = 0; b < g.taps.w; ++b) offsets[b] = b * g.dilation.w % g.stride.w * plan.width + b * g.dilation.w / g.stride.w;
  return offsets;
}

// A tile of results that is computed.
template <typename T>
struct Results {
  T* data;
  int64_t row, column;   // strides
  int64_t rows, columns;
  Finish finish;
  T* last;               // whole vectors may be stored up to here, beyond a row's end: later rows, still to come, lie there; null if not

  void store(int64_t i, int64_t j, Vec v) const {
    T* to = data + i * row + j * column;
    v = finish(v, to);
    if (column == 1 && (columns - j >= kLanes || to + kLanes <= last)) vstore_as<float>(to, v);
    else store_some(to, column, v, std::min<int64_t>(kLanes, columns - j));
  }
};

// A plane's taps, and where they lie in its tile.
struct PlaneTaps {
  const float* taps;
  const int64_t* columns;  // offsets of each column of taps
  const int64_t* all;      // of each tap
};

// One vector of columns, R rows at a time.
template <int R, typename T>
void convolve_column(const Results<T>& y, int64_t i, int64_t j, const float* x, const PlaneTaps& w, const Geometry& g, int64_t pitch, Vec bias) {
  for (; y.rows - i >= R; i += R) {
    Vec sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = bias;
    add_taps(sums, x + i * g.stride.h * pitch + j, pitch, Lines{w.columns, g.taps.w, 1}, OneChannel{w.taps, g.taps.w}, g.taps.h, g.stride.h, g.dilation.h);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) y.store(i + r, j, sums[r]);
  }
  if constexpr (R > 1) convolve_column<R / 2>(y, i, j, x, w, g, pitch, bias);
}

// R vectors of columns of row i at a time.
template <int R, typename T>
void convolve_vectors(const Results<T>& y, int64_t i, int64_t j, const float* x, const PlaneTaps& w, const Geometry& g, int64_t pitch, Vec bias) {
  constexpr int64_t kChain = 32;  // longer sums are made of so long ones, which round less
  for (; y.columns - j >= R * kLanes || (R == 1 && j < y.columns); j += R * kLanes) {
    Vec sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = bias;
    for (int64_t t = 0; t < g.tap_count(); t += kChain)
      add_lines<1, 1>(sums, x + i * g.stride.h * pitch + j, kLanes, Lines{w.all + t, std::min(kChain, g.tap_count() - t), 1}, OneChannel{w.taps + t, 0});
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) y.store(i, j + r * kLanes, sums[r]);
  }
  if constexpr (R > 1) convolve_vectors<R / 2>(y, i, j, x, w, g, pitch, bias);
}

template <typename T>
void convolve_tile(const Results<T>& y, const float* x, const PlaneTaps& w, const Geometry& g, int64_t pitch, float bias) {
  const Vec start = in_all(bias);
  if (y.rows < kFewRows) {
    for (int64_t i = 0; i < y.rows; ++i) convolve_vectors<kPositions>(y, i, 0, x, w, g, pitch, start);
    return;
  }
  for (int64_t j = 0; j < y.columns; j += kLanes) {
    // The last vector overlaps the one before it where columns are no whole vectors.
    convolve_column<kPositions>(y, 0, y.columns < kLanes ? 0 : std::min(j, y.columns - kLanes), x, w, g, pitch, start);
  }
}

// A unit is one tile of results of one plane.
template <typename T>
void forward_planes(const ForwardParams& p, int64_t begin, int64_t end) {
  const Geometry& g = p.g;
  const TilePlan plan = tile_plan(g);
  const std::vector<int64_t> offsets = tap_offsets(g, plan);
  std::vector<int64_t> all(g.tap_count());
  for (int64_t t = 0; t < g.tap_count(); ++t) all[t] = t / g.taps.w * g.dilation.h * plan.pitch + offsets[t % g.taps.w];
  std::vector<float> tile(plan.tile_floats()), taps(g.tap_count());
  const AffineMaps<float> maps = AffineMaps<float>::of(p.epilogue, g.outputs(), static_cast<const T*>(p.w));
  int64_t of_taps = -1;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t plane = unit / plan.tiles(), o = plane % g.outputs(), n = plane / g.outputs();
    const int64_t i = unit % plan.tiles() / plan.tiles_across * plan.rows, j = unit % plan.tiles_across * plan.columns;
    const int64_t rows = std::min(plan.rows, g.out.h - i), columns = std::min(plan.columns, g.out.w - j);
    if (of_taps != o) {
      for (int64_t t = 0; t < g.tap_count(); ++t)
        taps[t] = widen(static_cast<const T*>(p.w)[o * p.w_stride.n + t / g.taps.w * p.w_stride.h + t % g.taps.w * p.w_stride.w]);
      of_taps = o;
    }
    if (!all_finite(taps.data(), g.tap_count())) {
      if (j == 0) loops_forward(p, plane * g.out.h + i, plane * g.out.h + i + rows);
      continue;
    }
    const T* x = static_cast<const T*>(p.x) + n * p.x_stride.n + o / g.multiplier * p.x_stride.c;
    load_tile(tile.data(), x, p.x_stride.h, g.in.h, g.in.w, i * g.stride.h - g.pad.h, plan.x_rows(g, rows), j * g.stride.w - g.pad.w, g.stride.w, plan);
    T* y = static_cast<T*>(p.y) + n * p.y_stride.n + o * p.y_stride.c + i * p.y_stride.h + j * p.y_stride.w;
    const bool dense = p.y_stride.w == 1 && p.y_stride.h == columns;
    const Results<T> results = {y, p.y_stride.h, p.y_stride.w, rows, columns, Finish::of_channel(p.epilogue, maps, o), dense ? y + rows * columns : nullptr};
    const float bias = p.bias ? float(widen(static_cast<const T*>(p.bias)[o * p.bias_stride])) : 0.f;
    convolve_tile(results, tile.data(), PlaneTaps{taps.data(), offsets.data(), all.data()}, g, plan.pitch, bias);
  }
}

// sums[t] += the products of a tile of gradients and of x for tap t, one vector each.
inline void correlate_tile(float* sums, const float* grad, int64_t g_pitch, const float* x, int64_t pitch, const int64_t* offsets, const Geometry& g, int64_t rows,
                           int64_t columns) {
  const int64_t most = taps_of_part(g.taps.h), vectors = (columns + kLanes - 1) / kLanes;
  const auto add = [&](int64_t a, int64_t b, Vec v) {
    float* to = sums + (a * g.taps.w + b) * kLanes;
    vstore(to, vload(to) + v);
  };
  for (int64_t b = 0; b < g.taps.w; ++b) {
    if (rows < kFewRows) {
      for (int64_t a = 0; a < g.taps.h; ++a) {
        Vec sum[1] = {};
        for (int64_t i = 0; i < rows; ++i)
          correlate(sum, grad + i * g_pitch, kLanes, x + (i * g.stride.h + a * g.dilation.h) * pitch + offsets[b], kLanes, vectors, 1, 1, 1);
        add(a, b, sum[0]);
      }
      continue;
    }
    for (int64_t a = 0; a < g.taps.h; a += most) {
      const int64_t count = std::min(most, g.taps.h - a);
      Vec part[kTaps] = {};
      for (int64_t v = 0; v < vectors; ++v)
        correlate(part, grad + v * kLanes, g_pitch, x + a * g.dilation.h * pitch + offsets[b] + v * kLanes, pitch, rows, count, g.stride.h, g.dilation.h);
      for (int64_t k = 0; k < count; ++k) add(a + k, b, part[k]);
    }
  }
}

// The same, tap by tap, where something is not finite.
template <typename T>
void correlate_within(double* sums, const T* grad, const T* x, const WeightGradParams& p, Range rows, Range columns) {
  const Geometry& g = p.g;
  for (int64_t t = 0; t < g.tap_count(); ++t) {
    const int64_t up = t / g.taps.w * g.dilation.h - g.pad.h, left = t % g.taps.w * g.dilation.w - g.pad.w;
    const Range i = inside(g.out.h, g.stride.h, up, g.in.h), j = inside(g.out.w, g.stride.w, left, g.in.w);
    for (int64_t r = std::max(i.begin, rows.begin); r < std::min(i.end, rows.end); ++r) {
      for (int64_t c = std::max(j.begin, columns.begin); c < std::min(j.end, columns.end); ++c)
        sums[t] += double(widen(grad[r * p.grad_stride.h + c])) * double(widen(x[(r * g.stride.h + up) * p.x_stride.h + c * g.stride.w + left]));
    }
  }
}

// A unit is one output channel of a part of the batch; `partial` as in cpu_channels.h.
template <typename T>
void weight_grad_planes(const WeightGradParams& p, double* partial, int64_t parts, int64_t begin, int64_t end) {
  constexpr int64_t kTilesInFloat = 8;  // whose sums are added up in fp32
  const Geometry& g = p.g;
  const TilePlan plan = tile_plan(g);
  const std::vector<int64_t> offsets = tap_offsets(g, plan);
  const int64_t taps = p.dw ? g.tap_count() : 0, outputs = g.outputs(), tiles = plan.tiles();
  TilePlan grads = plan;
  grads.pitch = grads.width = plan.grad_pitch();
  std::vector<float> tile(plan.tile_floats()), grad_tile(plan.rows * grads.pitch), sums(taps * kLanes);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t part = unit / outputs, o = unit % outputs;
    double* to = partial + unit * (taps + 1);
    std::fill(to, to + taps + 1, 0.);
    int64_t summed = 0;
    const auto flush = [&] {
      for (int64_t t = 0; t < taps; ++t) {
        for (int lane = 0; lane < kLanes; ++lane) to[t] += sums[t * kLanes + lane];
      }
      std::fill(sums.begin(), sums.end(), 0.f);
    };
    std::fill(sums.begin(), sums.end(), 0.f);
    for (int64_t n = g.batch * part / parts; n < g.batch * (part + 1) / parts; ++n) {
      const T* grad = static_cast<const T*>(p.grad) + n * p.grad_stride.n + o * p.grad_stride.c;
      const T* x = static_cast<const T*>(p.x) + n * p.x_stride.n + o / g.multiplier * p.x_stride.c;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t i = t / plan.tiles_across * plan.rows, j = t % plan.tiles_across * plan.columns;
        const int64_t rows = std::min(plan.rows, g.out.h - i), columns = std::min(plan.columns, g.out.w - j), x_rows = plan.x_rows(g, rows);
        load_tile(grad_tile.data(), grad, p.grad_stride.h, g.out.h, j + columns, i, rows, j, 1, grads);
        if (p.db) {
          for (int64_t r = 0; r < rows; ++r) {
            Vec all = {};
            for (int64_t k = 0; k < grads.pitch; k += kLanes) all += vload(grad_tile.data() + r * grads.pitch + k);
            for (int lane = 0; lane < kLanes; ++lane) to[taps] += double(all[lane]);
          }
        }
        if (taps > 0) {
          load_tile(tile.data(), x, p.x_stride.h, g.in.h, g.in.w, i * g.stride.h - g.pad.h, x_rows, j * g.stride.w - g.pad.w, g.stride.w, plan);
          if (all_finite(grad_tile.data(), rows * grads.pitch) && all_finite(tile.data(), x_rows * plan.pitch))
            correlate_tile(sums.data(), grad_tile.data(), grads.pitch, tile.data(), plan.pitch, offsets.data(), g, rows, columns);
          else correlate_within(to, grad, x, p, {i, i + rows}, {j, j + columns});
        }
        if (++summed % kTilesInFloat == 0) flush();
      }
    }
    flush();
  }
}

}  // namespace
}  // namespace fusebackend::depthwise_conv
