// Depthwise convolution without tiles, stride 1 or 2: a thread walks down a few columns of a few channels, with the taps and all sums that a row of
// x has a part in in registers. Each thread loads the columns that it needs, straight from global memory: neighbouring lanes have
// neighbouring channels where these are innermost in memory, else neighbouring columns.
//
// For x's gradient at stride 1 it runs on the incoming gradient, with reversed taps.
#pragma once
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/rolling_row.cuh"
#include "depthwise_conv/tap_by_tap.cuh"

namespace fusebackend::depthwise_conv {

struct RollingWindowParams {
  ForwardParams p;
  RollingWindowPlan plan;
  RollingSides sides;
  RollingIndex index;
  int x_row, x_column, y_row, y_column;
  int64_t x_step, y_step;  // from column to column, in bytes
};

// A strip of results tap by tap, for taps that are not finite: padding is not multiplied by these.
template <typename T>
__device__ __noinline__ void roll_tap_by_tap(const ForwardParams& p, const RollingPlace& at, int columns) {
  const Geometry& g = p.g;
  const T* const w = static_cast<const T*>(p.w) + at.channel * p.w_stride.n;
  const T* const x = static_cast<const T*>(p.x) + at.image * p.x_stride.n + at.channel * p.x_stride.c;
  T* const y = static_cast<T*>(p.y) + at.image * p.y_stride.n + at.channel * p.y_stride.c;
  const float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[at.channel * p.bias_stride]) : 0.f;
  for (int row = at.first_row; row < at.first_row + at.rows; ++row) {
    for (int column = at.column; column < at.column + columns && column < int(g.out.w); ++column) {
      const float sum = add_tap_by_tap(bias, p, x, w, row, column, g.stride);
      y[row * p.y_stride.h + column * p.y_stride.w] = from_float<T>(finished<T>(sum, p.epilogue, at.channel));
    }
  }
}

template <typename T, int kTaps, Rolling kForm>
__global__ void __launch_bounds__(kRollingThreads, rolling_blocks(kTaps, kForm))
depthwise_rolling_window(const __grid_constant__ RollingWindowParams params) {
  constexpr bool kPlanes = is_planes(kForm);
  constexpr int kChannels = rolling_channels(kTaps, kForm), kColumns = rolling_columns(kTaps, kForm), kStep = rolling_step(kForm);
  constexpr int kFront = kPlanes ? 4 - kTaps / 2 : 0, kCount = rolling_window_columns(kTaps, kForm), kRing = rolling_ring(kTaps, kForm);
  constexpr int kWindow = (kColumns - 1) * kStep + kTaps;
  constexpr int kRowsAsked = rolling_rows_asked(kForm);
  constexpr int kAhead = kForm == Rolling::kStrided ? 2 : kTaps == 3 && !kPlanes ? 3 : 1;  // rows that are on their way
  using Row = RollingRow<T, kChannels, kCount, kPlanes>;
  const ForwardParams& p = params.p;
  const RollingWindowPlan& plan = params.plan;
  const RollingSides& sides = params.sides;
  extern __shared__ float taps[];  // of the block's channels, and their epilogue behind them

  uint32_t strip_tile, channel_tile, line, group;
  params.index.channel_tiles.divmod(blockIdx.x, strip_tile, channel_tile);
  params.index.groups.divmod(threadIdx.x, line, group);
  const int first_channel = int(channel_tile) * plan.groups * kChannels, block_channels = min(plan.groups * kChannels, int(p.g.channels) - first_channel);
  StagedAffine* const affine = reinterpret_cast<StagedAffine*>(taps + plan.groups * kChannels * kTaps * kTaps);
  if (p.epilogue.is_affine && threadIdx.x < block_channels) affine[threadIdx.x] = {affine_of<T>(p.epilogue, first_channel + int(threadIdx.x))};
  stage_taps<T, kTaps>(taps, p.w, p.w_stride, first_channel, block_channels);
  const uint32_t strip = strip_tile * plan.lines + line;
  if (line >= plan.lines || strip >= plan.strips || int(group) * kChannels >= block_channels) return;
  RollingPlace at = params.index.find(strip, plan, kColumns);
  at.channel = first_channel + int(group) * kChannels;

  float w[kTaps][kTaps][kChannels], bias[kChannels];
  const bool finite = read_taps(w, taps + int(group) * kChannels * kTaps * kTaps);
  if (!finite) {
    for (int c = 0; c < kChannels; ++c, ++at.channel) roll_tap_by_tap<T>(p, at, kColumns);
    return;
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) bias[c] = p.bias ? to_float(static_cast<const T*>(p.bias)[(at.channel + c) * p.bias_stride]) : 0.f;

  const int first_source = at.first_row * kStep - sides.pad_h, source_column = at.column * kStep - sides.pad_w - kFront;
  const int source_rows = (at.rows - 1) * kStep + kTaps;
  const uint32_t mask = columns_inside(source_column, kCount, kPlanes ? 4 : 1, sides.in_w);
  const T* source = static_cast<const T*>(p.x) + at.image * p.x_stride.n + at.channel * p.x_stride.c + first_source * params.x_row + source_column * params.x_column;
  T* target = static_cast<T*>(p.y) + at.image * p.y_stride.n + at.channel * p.y_stride.c + at.first_row * params.y_row + at.column * params.y_column;
  const int columns = sides.out_w - at.column;
  Row rows[kAhead];
  const auto load = [&](int r, Row& to) {
    const bool inside = r < source_rows && unsigned(first_source + r) < unsigned(sides.in_h);
    to.load(source, params.x_step, inside ? mask : 0);
    if constexpr (kPlanes) {
      const int later = r + kRowsAsked;
      if (later < source_rows && unsigned(first_source + later) < unsigned(sides.in_h)) ask_for(source + kRowsAsked * params.x_row + 4);
    }
    source += params.x_row;
  };
#pragma unroll
  for (int r = 0; r < kAhead; ++r) load(r, rows[r]);

  float sums[kRing][kColumns][kChannels];
#pragma unroll
  for (int i = 0; i < kRing; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sums[i][j][c] = bias[c];

  for (int r0 = 0; r0 < source_rows; r0 += kStep * kRing) {
#pragma unroll
    for (int s = 0; s < kStep * kRing; ++s) {
      const int r = r0 + s;
      float window[kWindow][kChannels];
#pragma unroll
      for (int i = 0; i < kWindow; ++i)
#pragma unroll
        for (int c = 0; c < kChannels; ++c) window[i][c] = rows[s % kAhead].get(i + kFront, c);
      load(r + kAhead, rows[s % kAhead]);
      if (unsigned(first_source + r) < unsigned(sides.in_h)) {
#pragma unroll
        for (int a = 0; a < kTaps; ++a) {
          if ((s - a) % kStep != 0) continue;
          if (kTaps > 3 && unsigned(r - a) >= unsigned(at.rows * kStep)) continue;  // no result of this thread
#pragma unroll
          for (int b = 0; b < kTaps; ++b)
#pragma unroll
            for (int j = 0; j < kColumns; ++j)
#pragma unroll
              for (int c = 0; c < kChannels; ++c) {
                float& sum = sums[(s - a + kStep * kTaps) / kStep % kRing][j][c];
                sum = fmaf(w[a][b][c], window[j * kStep + b][c], sum);
              }
        }
      }
      if ((s - kTaps + 1) % kStep != 0) continue;
      float(&done)[kColumns][kChannels] = sums[(s - kTaps + 1 + kStep * kTaps) / kStep % kRing];
      if (unsigned(r - kTaps + 1) < unsigned(at.rows * kStep)) {
        if (p.epilogue.any) {
          ChannelAffine of_channels[kChannels];
#pragma unroll
          for (int c = 0; c < kChannels; ++c) of_channels[c] = affine[kPlanes ? 0 : int(group) * kChannels + c].get();
          finish<T>(done, p.epilogue, of_channels);
        }
        if constexpr (kPlanes) {
#pragma unroll
          for (int j = 0; j < kColumns; j += 4)
            if (j == 0 || j < columns) *reinterpret_cast<float4*>(target + j) = {done[j][0], done[j + 1][0], done[j + 2][0], done[j + 3][0]};
        } else {
          char* to = reinterpret_cast<char*>(target);
#pragma unroll
          for (int j = 0; j < kColumns; ++j, to += params.y_step) {
            Vec<T, kChannels> value;
#pragma unroll
            for (int c = 0; c < kChannels; ++c) value.v[c] = from_float<T>(done[j][c]);
            if (j < columns) *reinterpret_cast<Vec<T, kChannels>*>(to) = value;
          }
        }
        target += params.y_row;
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int c = 0; c < kChannels; ++c) done[j][c] = bias[c];
    }
  }
}

}  // namespace fusebackend::depthwise_conv
