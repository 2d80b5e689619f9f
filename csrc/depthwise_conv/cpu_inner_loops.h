// The inner loops of the vector kernels, forward and weight gradient. Both walk along *positions*, `step` elements of x apart: columns where the lanes
// of vectors are channels (cpu_channels.h), rows or vectors of columns where they are columns (cpu_planes.h). Neighbouring taps lie one
// position apart, and neighbouring results S positions, so both share the vectors of x that are loaded.
#pragma once
#include "common/cpu_vectors.h"

namespace fusebackend::depthwise_conv {
namespace {

using Vec = V<float>;
constexpr int kLanes = VecOf<float>::kSize;
constexpr int kPositions = 8;  // results of a block: as many sums as it takes to hide the latency of one
constexpr int kTaps = 4;       // that are in registers at a time
constexpr int kGrads = 4;      // positions of the incoming gradient that are in registers at a time

// A row of n taps, in equal parts of at most kTaps.
constexpr int64_t taps_of_part(int64_t n) { return n <= kTaps ? n : (n + (n + kTaps - 1) / kTaps - 1) / ((n + kTaps - 1) / kTaps); }

// Taps of one channel, the same in all lanes, or of as many channels as there are lanes.
struct OneChannel {
  const float* taps;
  int64_t step;
  Vec operator[](int64_t j) const { return in_all(taps[j * step]); }
};
struct Channels {
  const float* taps;
  int64_t step;
  Vec operator[](int64_t j) const { return vload(taps + j * step); }
};

// sums[r] += sum_j taps[j] * x[r * S + j] for j in [0, J).
template <int J, int S, int R, typename T, typename Taps>
inline void add_part(Vec (&sums)[R], const T* x, int64_t step, const Taps& taps) {
  Vec w[J];
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) w[j] = taps[j];
#pragma GCC unroll 32
  for (int i = 0; i < (R - 1) * S + J; ++i) {
    if (i % S >= J) continue;
    Vec value = vload_as<float>(x + i * step);
    asm("" : FUSE_IN_REGISTER(value));  // else the compiler would load it again at each use
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) {
      if (i >= j && (i - j) % S == 0 && (i - j) / S < R) sums[(i - j) / S] += w[j] * value;
    }
  }
}

// The lines of taps that a block of results meets: rows where positions are columns, and the other way around.
struct Lines {
  const int64_t* offsets;  // of each in x
  int64_t count;
  int64_t taps_step;       // from line to line of the taps
};

// sums[r] += the J taps of each line, from registers. Each part's sums are made for themselves: shorter sums round less.
template <int J, int S, int R, typename T, typename Taps>
inline void add_lines(Vec (&sums)[R], const T* x, int64_t step, const Lines& lines, Taps taps) {
  Vec part[R] = {};
#pragma GCC unroll 1
  for (int64_t k = 0; k < lines.count; ++k, taps.taps += lines.taps_step) add_part<J, S>(part, x + lines.offsets[k], step, taps);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r] += part[r];
}

template <int S, int R, typename T, typename Taps>
inline void add_lines(Vec (&sums)[R], const T* x, int64_t step, const Lines& lines, const Taps& taps, int64_t count) {
  switch (count) {
    case 1: return add_lines<1, S>(sums, x, step, lines, taps);
    case 2: return add_lines<2, S>(sums, x, step, lines, taps);
    case 3: return add_lines<3, S>(sums, x, step, lines, taps);
    default: return add_lines<4, S>(sums, x, step, lines, taps);
  }
}

// sums[r] += sum over lines and j in [0, n) of taps[j] * x[r * stride + j * dilation], in positions.
template <int R, typename T, typename Taps>
inline void add_taps(Vec (&sums)[R], const T* x, int64_t step, const Lines& lines, const Taps& taps, int64_t n, int64_t stride, int64_t dilation) {
  if (dilation == 1 && stride <= 2) {
    const int64_t most = taps_of_part(n);
    for (int64_t j = 0; j < n; j += most) {
      const int64_t count = n - j < most ? n - j : most;
      const Taps part{taps.taps + j * taps.step, taps.step};
      if (stride == 1) add_lines<1>(sums, x + j * step, step, lines, part, count);
      else add_lines<2>(sums, x + j * step, step, lines, part, count);
    }
    return;
  }
  for (int64_t j = 0; j < n; ++j) {
    Vec part[R] = {};
    const float* tap = taps.taps + j * taps.step;
#pragma GCC unroll 1
    for (int64_t k = 0; k < lines.count; ++k, tap += lines.taps_step) {
      const Vec w = Taps{tap, taps.step}[0];
      const T* from = x + lines.offsets[k] + j * dilation * step;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) part[r] += w * vload_as<float>(from + r * stride * step);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] += part[r];
  }
}

// sums[j] += sum_r g[r] * x[r * S + j] for r in [0, n) and j in [0, J).
template <int J, int S, typename G, typename T>
inline void correlate_part(Vec* sums, const G* g, int64_t g_step, const T* x, int64_t step, int64_t n) {
  Vec acc[2][J] = {};
  int64_t r = 0;
  for (; r + kGrads <= n; r += kGrads) {
    Vec grads[kGrads];
#pragma GCC unroll 4
    for (int u = 0; u < kGrads; ++u) grads[u] = vload_as<float>(g + (r + u) * g_step);
#pragma GCC unroll 32
    for (int i = 0; i < (kGrads - 1) * S + J; ++i) {
      if (i % S >= J) continue;
      Vec value = vload_as<float>(x + (r * S + i) * step);
      asm("" : FUSE_IN_REGISTER(value));
#pragma GCC unroll 4
      for (int u = 0; u < kGrads; ++u) {
        if (i >= u * S && i - u * S < J) acc[u % 2][i - u * S] += grads[u] * value;
      }
    }
  }
  for (; r < n; ++r) {
    const Vec grad = vload_as<float>(g + r * g_step);
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) acc[0][j] += grad * vload_as<float>(x + (r * S + j) * step);
  }
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) sums[j] += acc[0][j] + acc[1][j];
}

// sums[j] += sum_r g[r] * x[r * stride + j * dilation] for r in [0, n) and j in [0, taps), in positions. Few taps at a time: taps <= kTaps, or any
// number where dilation is not 1.
template <typename G, typename T>
inline void correlate(Vec* sums, const G* g, int64_t g_step, const T* x, int64_t step, int64_t n, int64_t taps, int64_t stride, int64_t dilation) {
  if (dilation == 1 && stride <= 2 && taps > 1) {
    if (stride == 1) {
      if (taps == 2) return correlate_part<2, 1>(sums, g, g_step, x, step, n);
      if (taps == 3) return correlate_part<3, 1>(sums, g, g_step, x, step, n);
      return correlate_part<4, 1>(sums, g, g_step, x, step, n);
    }
    if (taps == 2) return correlate_part<2, 2>(sums, g, g_step, x, step, n);
    if (taps == 3) return correlate_part<3, 2>(sums, g, g_step, x, step, n);
    return correlate_part<4, 2>(sums, g, g_step, x, step, n);
  }
  for (int64_t j = 0; j < taps; ++j) {
    Vec acc[kGrads] = {};
    const T* from = x + j * dilation * step;
    int64_t r = 0;
    for (; r + kGrads <= n; r += kGrads) {
#pragma GCC unroll 4
      for (int u = 0; u < kGrads; ++u) acc[u] += vload_as<float>(g + (r + u) * g_step) * vload_as<float>(from + (r + u) * stride * step);
    }
    for (; r < n; ++r) acc[0] += vload_as<float>(g + r * g_step) * vload_as<float>(from + r * stride * step);
    sums[j] += (acc[0] + acc[1]) + (acc[2] + acc[3]);
  }
}

// At most kLanes elements, from memory and to it; the other lanes are 0.
template <typename T>
inline Vec load_some(const T* from, int64_t n) {
  T some[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) some[i] = from[i];
  return vload_as<float>(some);
}
template <typename T>
inline void store_some(T* to, int64_t step, Vec v, int64_t n) {
  T some[kLanes];
  vstore_as<float>(some, v);
  for (int64_t i = 0; i < n; ++i) to[i * step] = some[i];
}

// The j in [0, out) for which j * stride + offset is in [0, in).
struct Range {
  int64_t begin, end;
};
inline Range inside(int64_t out, int64_t stride, int64_t offset, int64_t in) {
  const int64_t begin = offset >= 0 ? 0 : (stride - 1 - offset) / stride;
  const int64_t end = in <= offset ? 0 : (in - offset + stride - 1) / stride;
  const int64_t first = begin < out ? begin : out;
  return {first, end < first ? first : (end < out ? end : out)};
}

}  // namespace
}  // namespace fusebackend::depthwise_conv
