// x's gradient without tiles, stride 2, channels innermost: a thread walks down a few columns of the incoming gradient, of one or two channels, with the
// taps and all sums that a row of it has a part in in registers. These are of twice as many columns and rows: with rows and columns counted from the
// first of the padding, row i of the gradient has a part in rows 2i to 2i + taps - 1, of which the first two are complete then.
#pragma once
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/rolling_row.cuh"
#include "depthwise_conv/tap_by_tap.cuh"

namespace fusebackend::depthwise_conv {

struct RollingInputParams {
  InputGradParams p;
  RollingWindowPlan plan;
  RollingSides sides;
  RollingIndex index;
  int grad_row, grad_column, dx_row, dx_column;
  int64_t grad_step, dx_step;  // from column to column, in bytes
};

template <typename T, int kTaps>
__global__ void __launch_bounds__(kRollingThreads, kRollingInputBlocks) depthwise_rolling_input_grad(const __grid_constant__ RollingInputParams params) {
  constexpr int kChannels = rolling_channels(kTaps, Rolling::kStrided), kColumns = kRollingInputColumns;
  constexpr int kRing = (kTaps + 1) / 2, kBefore = kRing - 1, kCount = kColumns + kBefore;  // pairs of rows; columns before the first
  using Row = RollingRow<T, kChannels, kCount, false>;
  const InputGradParams& p = params.p;
  const RollingWindowPlan& plan = params.plan;
  const RollingSides& sides = params.sides;
  extern __shared__ float taps[];  // of the block's channels

  uint32_t strip_tile, channel_tile, line, group;
  params.index.channel_tiles.divmod(blockIdx.x, strip_tile, channel_tile);
  params.index.groups.divmod(threadIdx.x, line, group);
  const int first_channel = int(channel_tile) * plan.groups * kChannels, block_channels = min(plan.groups * kChannels, int(p.g.channels) - first_channel);
  stage_taps<T, kTaps>(taps, p.w, p.w_stride, first_channel, block_channels);
  const uint32_t strip = strip_tile * plan.lines + line;
  if (line >= plan.lines || strip >= plan.strips || int(group) * kChannels >= block_channels) return;
  const RollingPlace at = params.index.find(strip, plan, kColumns);
  const int channel = first_channel + int(group) * kChannels;
  // Of dx, from the first row and column of it on; these may be outside.
  const int first_row = 2 * at.first_row + first_of_pairs(sides.pad_h) - sides.pad_h, first_column = 2 * at.column + first_of_pairs(sides.pad_w) - sides.pad_w;

  float w[kTaps][kTaps][kChannels];
  const bool finite = read_taps(w, taps + int(group) * kChannels * kTaps * kTaps);
  if (!finite) {
    for (int c = 0; c < kChannels; ++c) roll_back_tap_by_tap<T>(p, at.image, channel + c, first_row, 2 * at.rows, first_column, 2 * kColumns);
    return;
  }

  const int first_source = at.first_row + first_of_pairs(sides.pad_h) / 2 - kBefore, source_column = at.column + first_of_pairs(sides.pad_w) / 2 - kBefore;
  const int source_rows = at.rows + kBefore;
  const uint32_t mask = columns_inside(source_column, kCount, 1, sides.out_w), target_mask = columns_inside(first_column, 2 * kColumns, 1, sides.in_w);
  const T* source = static_cast<const T*>(p.grad) + at.image * p.grad_stride.n + channel * p.grad_stride.c + first_source * params.grad_row + source_column * params.grad_column;
  T* target = static_cast<T*>(p.dx) + at.image * p.dx_stride.n + channel * p.dx_stride.c + first_row * params.dx_row + first_column * params.dx_column;
  int row = first_row - 2 * kBefore;  // of dx, that is complete first with the row that is loaded
  Row next;
  const auto load = [&](int r) {
    const bool inside = r < source_rows && unsigned(first_source + r) < unsigned(sides.out_h);
    next.load(source, params.grad_step, inside ? mask : 0);
    source += params.grad_row;
  };
  load(0);

  float sums[kRing][2][2 * kColumns][kChannels] = {};
  for (int r0 = 0; r0 < source_rows; r0 += kRing) {
#pragma unroll
    for (int s = 0; s < kRing; ++s) {
      const int r = r0 + s;
      float window[kCount][kChannels];
#pragma unroll
      for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int c = 0; c < kChannels; ++c) window[i][c] = next.get(i, c);
      load(r + 1);
#pragma unroll
      for (int a = 0; a < kTaps; ++a)
#pragma unroll
        for (int b = 0; b < kTaps; ++b)
#pragma unroll
          for (int j = 0; j < kColumns; ++j)
#pragma unroll
            for (int c = 0; c < kChannels; ++c) {
              float& sum = sums[(s + a / 2) % kRing][a % 2][2 * j + b % 2][c];  // of columns 2j and 2j + 1
              sum = fmaf(w[a][b][c], window[j + kBefore - b / 2][c], sum);
            }
      float(&done)[2][2 * kColumns][kChannels] = sums[s];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (r >= kBefore && r < source_rows && unsigned(row + half) < unsigned(sides.in_h)) {
          char* to = reinterpret_cast<char*>(target + half * params.dx_row);
#pragma unroll
          for (int j = 0; j < 2 * kColumns; ++j, to += params.dx_step) {
            Vec<T, kChannels> value;
#pragma unroll
            for (int c = 0; c < kChannels; ++c) value.v[c] = from_float<T>(done[half][j][c]);
            if (target_mask >> j & 1) *reinterpret_cast<Vec<T, kChannels>*>(to) = value;
          }
        }
#pragma unroll
        for (int j = 0; j < 2 * kColumns; ++j)
#pragma unroll
          for (int c = 0; c < kChannels; ++c) done[half][j][c] = 0;
      }
      if (r >= kBefore) target += 2 * params.dx_row;
      row += 2;
    }
  }
}

}  // namespace fusebackend::depthwise_conv
