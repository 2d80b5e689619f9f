// The weight's gradient without tiles, stride 1 or 2: a thread walks down strips of a few columns of a few channels, with all sums of its channels in
// registers, and the last rows of the gradient, which a row of x meets. A thread block adds its threads up at the end; depthwise_reduce the blocks.
#pragma once
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/rolling_row.cuh"

namespace fusebackend::depthwise_conv {

struct RollingGradParams {
  const void *grad, *x;
  float* partial;
  Strides grad_stride, x_stride;
  RollingWindowPlan plan;
  RollingSides sides;
  RollingIndex index;
  int channels, grad_row, grad_column, x_row, x_column;
  int64_t grad_step, x_step;  // from column to column, in bytes
  bool need_bias;
};

template <typename T, int kTaps, Rolling kForm>
__global__ void __launch_bounds__(kRollingThreads, rolling_grad_blocks(kTaps))
depthwise_rolling_weight_grad(const __grid_constant__ RollingGradParams p) {
  constexpr bool kPlanes = kForm == Rolling::kPlanes;
  constexpr int kChannels = rolling_channels(kTaps, kForm), kColumns = rolling_columns(kTaps, kForm), kStep = rolling_step(kForm);
  constexpr int kFront = kPlanes ? 4 - kTaps / 2 : 0, kCount = rolling_window_columns(kTaps, kForm), kRing = rolling_ring(kTaps, kForm);
  constexpr int kWindow = (kColumns - 1) * kStep + kTaps;
  constexpr int kRowsAsked = rolling_rows_asked(kForm);
  using Row = RollingRow<T, kChannels, kCount, kPlanes>;
  using GradRow = RollingRow<T, kChannels, kColumns, kPlanes>;
  const RollingWindowPlan& plan = p.plan;
  const RollingSides& sides = p.sides;
  uint32_t split, channel_tile, line, group;
  p.index.channel_tiles.divmod(blockIdx.x, split, channel_tile);
  p.index.groups.divmod(threadIdx.x, line, group);
  const int channel = (int(channel_tile) * plan.groups + int(group)) * kChannels;
  const bool works = line < plan.lines && channel < p.channels;
  const uint32_t first = uint32_t(plan.strips * split / plan.strip_tiles), last = works ? uint32_t(plan.strips * (split + 1) / plan.strip_tiles) : 0;

  float sums[kTaps][kTaps][kChannels] = {}, bias_sums[kChannels] = {};
  for (uint32_t strip = first + line; strip < last; strip += plan.lines) {
    const RollingPlace at = p.index.find(strip, plan, kColumns);
    const int first_source = at.first_row * kStep - sides.pad_h, source_column = at.column * kStep - sides.pad_w - kFront;
    const int source_rows = (at.rows - 1) * kStep + kTaps;
    const uint32_t mask = columns_inside(source_column, kCount, kPlanes ? 4 : 1, sides.in_w);
    const uint32_t grad_mask = columns_inside(at.column, kColumns, kPlanes ? 4 : 1, sides.out_w);
    const T* source = static_cast<const T*>(p.x) + at.image * p.x_stride.n + channel * p.x_stride.c + first_source * p.x_row + source_column * p.x_column;
    const T* grad = static_cast<const T*>(p.grad) + at.image * p.grad_stride.n + channel * p.grad_stride.c + at.first_row * p.grad_row + at.column * p.grad_column;
    Row row;
    GradRow grad_row;
    const auto load = [&](int r, bool has_grad) {
      const bool inside = r < source_rows && unsigned(first_source + r) < unsigned(sides.in_h);
      row.load(source, p.x_step, inside ? mask : 0);
      if constexpr (kPlanes) {
        const int later = r + kRowsAsked;
        if (later < source_rows && unsigned(first_source + later) < unsigned(sides.in_h)) ask_for(source + kRowsAsked * p.x_row + 4);
        if (later < at.rows) ask_for(grad + kRowsAsked * p.grad_row);
      }
      source += p.x_row;
      if (!has_grad) return;
      grad_row.load(grad, p.grad_step, r < at.rows * kStep ? grad_mask : 0);
      grad += p.grad_row;
    };
    load(0, true);
    float grads[kRing][kColumns][kChannels] = {};
    for (int r0 = 0; r0 < source_rows; r0 += kStep * kRing) {
#pragma unroll
      for (int s = 0; s < kStep * kRing; ++s) {
        const int r = r0 + s;
        float window[kWindow][kChannels];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
#pragma unroll
          for (int i = 0; i < kWindow; ++i) window[i][c] = row.get(i + kFront, c);
#pragma unroll
          for (int j = 0; j < kColumns && s % kStep == 0; ++j) {
            float& grad_here = grads[(s + kStep * kTaps) / kStep % kRing][j][c];
            grad_here = grad_row.get(j, c);
            bias_sums[c] += grad_here;
          }
        }
        load(r + 1, (s + 1) % kStep == 0);
        if (unsigned(first_source + r) < unsigned(sides.in_h)) {
#pragma unroll
          for (int a = 0; a < kTaps; ++a) {
            if ((s - a) % kStep != 0) continue;
            if (kTaps > 3 && unsigned(r - a) >= unsigned(at.rows * kStep)) continue;  // zeros
#pragma unroll
            for (int b = 0; b < kTaps; ++b)
#pragma unroll
              for (int j = 0; j < kColumns; ++j)
#pragma unroll
                for (int c = 0; c < kChannels; ++c) {
                  const float grad_there = grads[(s - a + kStep * kTaps) / kStep % kRing][j][c];
                  sums[a][b][c] = fmaf(grad_there, window[j * kStep + b][c], sums[a][b][c]);
                }
          }
        }
      }
    }
  }

  // Adds up the block's strips, a row of taps at a time, in a fixed order.
  __shared__ float shared[kTaps * kChannels][kRollingThreads];
  const int all = kTaps * kTaps + 1;
  float* const to = p.partial + int64_t{split} * p.channels * all;
#pragma unroll
  for (int a = 0; a <= kTaps; ++a) {
    if (a == kTaps && !p.need_bias) break;
    const int numbers = a == kTaps ? 1 : kTaps;
#pragma unroll
    for (int b = 0; b < kTaps; ++b)
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        if (b < numbers) shared[b * kChannels + c][threadIdx.x] = a == kTaps ? bias_sums[c] : sums[a % kTaps][b][c];
    __syncthreads();
    for (int i = threadIdx.x; i < numbers * plan.groups * kChannels; i += kRollingThreads) {
      const int b = i / (plan.groups * kChannels), rest = i % (plan.groups * kChannels), of_group = rest / kChannels, c = rest % kChannels;
      const int of_channel = (int(channel_tile) * plan.groups + of_group) * kChannels + c;
      if (of_channel >= p.channels) continue;
      float sum = 0;
      for (int l = 0; l < plan.lines; ++l) sum += shared[b * kChannels + c][l * plan.groups + of_group];
      to[int64_t{of_channel} * all + (a == kTaps ? kTaps * kTaps : a * kTaps + b)] = sum;
    }
    __syncthreads();
  }
}

}  // namespace fusebackend::depthwise_conv
