// The weight's gradient without tiles, stride 1: a thread walks down strips of a few columns of a few channels, with all sums of its channels in
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

template <typename T, int kTaps, bool kPlanes>
__global__ void __launch_bounds__(kRollingThreads, rolling_grad_blocks(kTaps))
depthwise_rolling_weight_grad(const __grid_constant__ RollingGradParams p) {
  constexpr int kChannels = rolling_channels(kTaps, kPlanes), kColumns = rolling_columns(kTaps, kPlanes);
  constexpr int kFront = kPlanes ? 4 - kTaps / 2 : 0, kCount = kPlanes ? 12 : kColumns + kTaps - 1;
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
    const RollingPlace at = p.index.find(strip, plan, sides, kColumns);
    const int first_source = at.first_row - sides.pad_h, source_column = at.column - sides.pad_w - kFront, source_rows = at.rows + kTaps - 1;
    const uint32_t mask = columns_inside(source_column, kCount, kPlanes ? 4 : 1, sides.in_w);
    const uint32_t grad_mask = columns_inside(at.column, kColumns, kPlanes ? 4 : 1, sides.out_w);
    const T* source = static_cast<const T*>(p.x) + at.image * p.x_stride.n + channel * p.x_stride.c + first_source * p.x_row + source_column * p.x_column;
    const T* grad = static_cast<const T*>(p.grad) + at.image * p.grad_stride.n + channel * p.grad_stride.c + at.first_row * p.grad_row + at.column * p.grad_column;
    Row row;
    GradRow grad_row;
    const auto load = [&](int r) {
      const bool inside = r < source_rows && unsigned(first_source + r) < unsigned(sides.in_h);
      row.load(source, p.x_step, inside ? mask : 0);
      grad_row.load(grad, p.grad_step, r < at.rows ? grad_mask : 0);
      source += p.x_row, grad += p.grad_row;
    };
    load(0);
    float grads[kTaps][kColumns][kChannels] = {};
    for (int r0 = 0; r0 < source_rows; r0 += kTaps) {
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
        const int r = r0 + s;
        float window[kColumns + kTaps - 1][kChannels];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
#pragma unroll
          for (int i = 0; i < kColumns + kTaps - 1; ++i) window[i][c] = row.get(i + kFront, c);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            grads[s][j][c] = grad_row.get(j, c);
            bias_sums[c] += grads[s][j][c];
          }
        }
        load(r + 1);
        if (unsigned(first_source + r) < unsigned(sides.in_h)) {
#pragma unroll
          for (int a = 0; a < kTaps; ++a) {
            if (kTaps > 3 && unsigned(r - a) >= unsigned(at.rows)) continue;  // zeros
#pragma unroll
            for (int b = 0; b < kTaps; ++b)
#pragma unroll
              for (int j = 0; j < kColumns; ++j)
#pragma unroll
                for (int c = 0; c < kChannels; ++c) sums[a][b][c] = fmaf(grads[(s - a + kTaps) % kTaps][j][c], window[j + b][c], sums[a][b][c]);
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
