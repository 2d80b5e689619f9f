// The vector kernels of (batch, height, width, channels) tensors: the lanes are channels, one output each. No padding is loaded: columns at the edges,
// which fewer taps reach, are computed one by one.
#pragma once
#include <algorithm>
#include <vector>

#include "common/cpu_channel_epilogue.h"
#include "depthwise_conv/cpu_inner_loops.h"
#include "depthwise_conv/params.h"

namespace fusebackend::depthwise_conv {
namespace {

// The first channel of a vector: the last one overlaps the one before it where channels are no whole vectors.
inline int64_t first_channel(int64_t vector, int64_t channels) { return std::min(vector * kLanes, channels - kLanes); }

// Columns of one row, all of whose taps are inside; R at a time.
template <int R, typename T>
void convolve_row(T* y, int64_t y_step, const T* x, int64_t x_step, const Lines& lines, const float* w, const Geometry& g, Vec bias, const Finish& finish,
                  int64_t columns) {
  for (; columns >= R; columns -= R, y += R * y_step, x += R * g.stride.w * x_step) {
    Vec sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = bias;
    add_taps(sums, x, x_step, lines, Channels{w, g.channels}, g.taps.w, g.stride.w, g.dilation.w);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) vstore_as<float>(y + r * y_step, finish(sums[r], y));
  }
  if constexpr (R > 1) convolve_row<R / 2>(y, y_step, x, x_step, lines, w, g, bias, finish, columns);
}

// One column, of whose taps those in [b.begin, b.end) are inside, in N vectors of channels.
template <int N, typename T>
void convolve_edge(T* y, const T* x, const ForwardParams& p, const float* w, const float* bias, const AffineMaps<float>& maps, int64_t vector,
                   int64_t n, Range b) {
  const int64_t channels = p.g.channels;
  Vec sums[N];
  int64_t c[N];
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) c[v] = first_channel(vector + v, channels), sums[v] = vload(bias + c[v]);
  for (int64_t a = 0; a < n; ++a) {
    for (int64_t k = b.begin; k < b.end; ++k) {
      const float* tap = w + (a * p.g.taps.w + k) * channels;
      const T* from = x + a * p.g.dilation.h * p.x_stride.h + k * p.g.dilation.w * p.x_stride.w;
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) sums[v] += vload(tap + c[v]) * vload_as<float>(from + c[v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) vstore_as<float>(y + c[v], Finish::of_channels(p.epilogue, maps, c[v])(sums[v], y));
}

// A unit is one row of results. p.g.multiplier is 1, and there are kLanes channels or more.
template <typename T>
void forward_channels(const ForwardParams& p, int64_t begin, int64_t end) {
  const Geometry& g = p.g;
  const int64_t channels = g.channels, vectors = (channels + kLanes - 1) / kLanes;
  std::vector<float> taps(g.tap_count() * channels), bias(channels, 0.f);
  for (int64_t a = 0; a < g.taps.h; ++a) {
    for (int64_t b = 0; b < g.taps.w; ++b) {
      const T* from = static_cast<const T*>(p.w) + a * p.w_stride.h + b * p.w_stride.w;
      float* to = taps.data() + (a * g.taps.w + b) * channels;
      for (int64_t c = 0; c < channels; ++c) to[c] = widen(from[c * p.w_stride.n]);
    }
  }
  for (int64_t c = 0; c < channels && p.bias; ++c) bias[c] = widen(static_cast<const T*>(p.bias)[c * p.bias_stride]);
  const AffineMaps<float> maps = AffineMaps<float>::of(p.epilogue, channels, static_cast<const T*>(p.w));
  // Columns that all taps reach.
  Range whole = {inside(g.out.w, g.stride.w, -g.pad.w, g.in.w).begin, inside(g.out.w, g.stride.w, (g.taps.w - 1) * g.dilation.w - g.pad.w, g.in.w).end};
  whole.end = std::max(whole.begin, whole.end);
  std::vector<int64_t> offsets(g.taps.h);
  for (int64_t a = 0; a < g.taps.h; ++a) offsets[a] = a * g.dilation.h * p.x_stride.h;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t i = unit % g.out.h, n = unit / g.out.h, top = i * g.stride.h - g.pad.h;
    const Range a = inside(g.taps.h, g.dilation.h, top, g.in.h);
    const float* w = taps.data() + a.begin * g.taps.w * channels;
    const Lines lines = {offsets.data(), a.end - a.begin, g.taps.w * channels};
    const T* x = static_cast<const T*>(p.x) + n * p.x_stride.n + (top + a.begin * g.dilation.h) * p.x_stride.h - g.pad.w * p.x_stride.w;
    T* y = static_cast<T*>(p.y) + n * p.y_stride.n + i * p.y_stride.h;
    for (int64_t v = 0; v < vectors && whole.begin < whole.end; ++v) {
      const int64_t c = first_channel(v, channels);
      const T* from = x + c + whole.begin * g.stride.w * p.x_stride.w;
      T* to = y + c + whole.begin * p.y_stride.w;
      convolve_row<kPositions>(to, p.y_stride.w, from, p.x_stride.w, lines, w + c, g, vload(bias.data() + c),
                               Finish::of_channels(p.epilogue, maps, c), whole.end - whole.begin);
    }
    for (int64_t j = 0; j < g.out.w; ++j) {
      if (j == whole.begin) j = whole.end;
      if (j >= g.out.w) break;
      const Range b = inside(g.taps.w, g.dilation.w, j * g.stride.w - g.pad.w, g.in.w);
      const T* from = x + j * g.stride.w * p.x_stride.w;
      int64_t v = 0;
      for (; v + 4 <= vectors; v += 4) convolve_edge<4>(y + j * p.y_stride.w, from, p, w, bias.data(), maps, v, lines.count, b);
      for (; v < vectors; ++v) convolve_edge<1>(y + j * p.y_stride.w, from, p, w, bias.data(), maps, v, lines.count, b);
    }
  }
}

constexpr int64_t kVectorsOfUnit = 4;
inline int64_t channel_blocks(int64_t channels) { return (channels + kVectorsOfUnit * kLanes - 1) / (kVectorsOfUnit * kLanes); }

// sums[j] += the products of a row of gradients and of x for taps b + j, j in [0, count).
template <typename T>
void correlate_columns(Vec* sums, const WeightGradParams& p, const T* grad, const T* x, int64_t b, int64_t count) {
  const Geometry& g = p.g;
  const auto columns = [&](int64_t tap) { return inside(g.out.w, g.stride.w, tap * g.dilation.w - g.pad.w, g.in.w); };
  Range common = {columns(b).begin, columns(b + count - 1).end};
  common.end = std::max(common.begin, common.end);
  const int64_t g_step = p.grad_stride.w, step = p.x_stride.w;
  correlate(sums, grad + common.begin * g_step, g_step, x + (common.begin * g.stride.w + b * g.dilation.w) * step, step, common.end - common.begin, count,
            g.stride.w, g.dilation.w);
  for (int64_t k = 0; k < count; ++k) {
    const Range all = columns(b + k);
    for (int64_t j = all.begin; j < all.end; ++j) {
      if (j == common.begin) j = std::max(j, common.end);
      if (j >= all.end) break;
      sums[k] += vload_as<float>(grad + j * g_step) * vload_as<float>(x + (j * g.stride.w + (b + k) * g.dilation.w) * step);
    }
  }
}

// A unit is some vectors of channels of a part of the batch. Sums of a row are added up in fp32 for an image (the bias's gradient: in double), and in
// double for the batch, whose parts go to partial[part][channel][tap], the bias's gradient being the last tap's.
template <typename T>
void weight_grad_channels(const WeightGradParams& p, double* partial, int64_t parts, int64_t begin, int64_t end) {
  const Geometry& g = p.g;
  const int64_t channels = g.channels, vectors = (channels + kLanes - 1) / kLanes, taps = p.dw ? g.tap_count() : 0, blocks = channel_blocks(channels);
  const int64_t most = taps_of_part(g.taps.w), columns = kVectorsOfUnit * kLanes;
  std::vector<float> image(taps * columns);
  std::vector<double> sums((taps + 1) * columns);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t part = unit / blocks, first = unit % blocks * kVectorsOfUnit, count = std::min(kVectorsOfUnit, vectors - first);
    std::fill(sums.begin(), sums.end(), 0.);
    for (int64_t n = g.batch * part / parts; n < g.batch * (part + 1) / parts; ++n) {
      std::fill(image.begin(), image.end(), 0.f);
      for (int64_t i = 0; i < g.out.h; ++i) {
        const int64_t top = i * g.stride.h - g.pad.h;
        const Range a = inside(g.taps.h, g.dilation.h, top, g.in.h);
        for (int64_t v = 0; v < count; ++v) {
          const int64_t c = first_channel(first + v, channels);
          const T* grad = static_cast<const T*>(p.grad) + n * p.grad_stride.n + i * p.grad_stride.h + c;
          float* totals = image.data() + v * kLanes;
          for (int64_t k = a.begin; k < a.end && taps > 0; ++k) {
            const T* x = static_cast<const T*>(p.x) + n * p.x_stride.n + (top + k * g.dilation.h) * p.x_stride.h - g.pad.w * p.x_stride.w + c;
            for (int64_t b = 0; b < g.taps.w; b += most) {
              Vec row[kTaps] = {};
              const int64_t together = std::min(most, g.taps.w - b);
              correlate_columns(row, p, grad, x, b, together);
              for (int64_t j = 0; j < together; ++j) {
                float* to = totals + (k * g.taps.w + b + j) * columns;
                vstore(to, vload(to) + row[j]);
              }
            }
          }
          if (!p.db) continue;
          Vec row[kTaps] = {};
          for (int64_t j = 0; j < g.out.w; ++j) row[j % kTaps] += vload_as<float>(grad + j * p.grad_stride.w);
          const Vec all = (row[0] + row[1]) + (row[2] + row[3]);
          for (int lane = 0; lane < kLanes; ++lane) sums[taps * columns + v * kLanes + lane] += double(all[lane]);
        }
      }
      for (size_t s = 0; s < image.size(); ++s) sums[s] += image[s];
    }
    for (int64_t v = 0; v < count; ++v) {
      const int64_t c = first_channel(first + v, channels);
      for (int64_t lane = (first + v) * kLanes - c; lane < kLanes; ++lane) {  // the others are of the vector before it
        for (int64_t t = 0; t <= taps; ++t) partial[(part * channels + c + lane) * (taps + 1) + t] = sums[t * columns + v * kLanes + lane];
      }
    }
  }
}

}  // namespace
}  // namespace fusebackend::depthwise_conv
