// Depthwise convolution of 16-bit planes on tensor cores, stride 1, without shared memory: a warp walks down sixteen strips of eight columns.
//
// Eight neighbouring results of a row are, for each row of taps, sixteen columns of a source row times a banded Toeplitz matrix of these taps.
// The rows of a warp's products are strips: blocks of eight columns of one channel's images, all at the same height. A fragment of a source row
// then is what the lanes load, straight from global memory, and it serves all results that it reaches while it is in registers: as many
// products as there are rows of taps, into as many sums, of which one is complete with each row.
//
// The band's zeros, and those beside the image, are multiplied by whatever is there. Where a sum is not finite, it is computed again, tap by tap.
#pragma once
#include <climits>

#include "common/cuda_common.cuh"
#include "depthwise_conv/column_pair.cuh"
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/mma.cuh"
#include "depthwise_conv/rolling_band_plan.h"
#include "depthwise_conv/tap_by_tap.cuh"

namespace fusebackend::depthwise_conv {

struct RollingBandParams {
  ForwardParams p;
  RollingBandPlan plan;
  FastDiv channels, groups, column_blocks, multiplier;
  // Of p, in the width in which the kernel counts them.
  int batch, in_h, in_w, out_h, out_w, pad_h, pad_w, taps_w, tap_row, tap_column;
};

template <typename T, int kTapRows, bool kWords>
__global__ void __launch_bounds__(kRollingBandThreads, rolling_band_blocks(kTapRows, kWords))
depthwise_rolling_band(const __grid_constant__ RollingBandParams params) {
  constexpr int kAhead = rows_ahead(kTapRows);  // source rows that are on their way
  static_assert(kAhead % kTapRows == 0, "registers are named by the row modulo both");
  const ForwardParams& p = params.p;
  const RollingBandPlan& plan = params.plan;
  const int lane = int(threadIdx.x) % 32, strip_of_lane = lane / 4, quarter = lane % 4;
  const uint32_t warp = blockIdx.x * (kRollingBandThreads / 32) + threadIdx.x / 32;
  if (warp >= plan.warps) return;
  uint32_t rest, channel, row_tile, group;
  params.channels.divmod(warp, rest, channel);
  params.groups.divmod(rest, row_tile, group);
  const int first_row = int(row_tile) * plan.rows, rows = min(plan.rows, params.out_h - first_row);
  const int first_source = first_row - params.pad_h, source_rows = rows + kTapRows - 1;

  // A lane's columns; none where there is no strip.
  const uint16_t* source[2];
  uint16_t* target[2];
  int source_column[2], column[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t image, block;
    params.column_blocks.divmod(group * 16 + strip_of_lane + half * 8, image, block);
    column[half] = int(block) * 8 + 2 * quarter;
    source_column[half] = int(block) * 8 - params.pad_w - plan.shift + 2 * quarter;
    source[half] = static_cast<const uint16_t*>(p.x) + image * p.x_stride.n + params.multiplier.div(channel) * p.x_stride.c + first_source * p.x_stride.h +
                   source_column[half];
    target[half] = static_cast<uint16_t*>(p.y) + image * p.y_stride.n + channel * p.y_stride.c + first_row * p.y_stride.h + column[half];
    if (image >= unsigned(params.batch)) source_column[half] = INT_MIN, column[half] = INT_MAX;
  }

  ColumnPair<kWords> x[kAhead][4];  // fragments: of strips 0 to 7, of 8 to 15; then the same eight columns further
  const auto load = [&](int r, ColumnPair<kWords> (&to)[4]) {
    const bool inside = r < source_rows && unsigned(first_source + r) < unsigned(params.in_h);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i].load(source[i % 2] + i / 2 * 8, source_column[i % 2] + i / 2 * 8, params.in_w, inside);
#pragma unroll
    for (int half = 0; half < 2; ++half) source[half] += p.x_stride.h;
  };
#pragma unroll
  for (int r = 0; r < kAhead; ++r) load(r, x[r]);

  // The bands: rows are the window's columns, columns the results'.
  uint32_t band[kTapRows][2];
  {
    const uint16_t* const w = static_cast<const uint16_t*>(p.w) + channel * p.w_stride.n;
    const int first = 2 * quarter - strip_of_lane - plan.shift;
#pragma unroll
    for (int a = 0; a < kTapRows; ++a) {
      uint32_t tap[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int b = first + i / 2 * 8 + i % 2;
        tap[i] = 0;
        if (unsigned(b) < unsigned(params.taps_w)) tap[i] = w[a * params.tap_row + b * params.tap_column];
      }
      band[a][0] = tap[0] | tap[1] << 16, band[a][1] = tap[2] | tap[3] << 16;
    }
  }
  const float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[channel * p.bias_stride]) : 0.f;
  __shared__ StagedAffine affine[kRollingBandThreads / 32];
  if (p.epilogue.is_affine) {
    if (lane == 0) affine[threadIdx.x / 32] = {affine_of<T>(p.epilogue, channel)};
    __syncwarp();
  }
  float sums[kTapRows][4];
#pragma unroll
  for (int i = 0; i < kTapRows; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;

  float finite = 0;
  for (int r0 = 0; r0 < source_rows; r0 += kAhead) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const int r = r0 + s;
      const uint32_t row_of_x[4] = {x[s][0].word(), x[s][1].word(), x[s][2].word(), x[s][3].word()};
#pragma unroll
      for (int a = 0; a < kTapRows; ++a)
        mma_k16<T>(sums[(s - a + kTapRows) % kTapRows], row_of_x[0], row_of_x[1], row_of_x[2], row_of_x[3], band[a][0], band[a][1]);
      load(r + kAhead, x[s]);
      float(&done)[4] = sums[(s + 1) % kTapRows];  // of row r - kTapRows + 1
      const int row = r - kTapRows + 1;
#pragma unroll
      for (int i = 0; i < 4; ++i) finite = fmaf(done[i], 0.f, finite), done[i] += bias;
      if (p.epilogue.any) finish<T>(done, p.epilogue, affine[threadIdx.x / 32].get());
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (unsigned(row) >= unsigned(rows)) continue;
        const uint32_t both = pack<T>(done[2 * half], done[2 * half + 1]);
        if constexpr (kWords) {
          if (column[half] < params.out_w) *reinterpret_cast<uint32_t*>(target[half]) = both;
        } else {
          if (column[half] < params.out_w) target[half][0] = uint16_t(both);
          if (column[half] < params.out_w - 1) target[half][1] = uint16_t(both >> 16);
        }
        target[half] += p.y_stride.h;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) done[i] = 0;
    }
  }
  if (finite != 0.f) {
    asm volatile("" ::: "memory");  // what was stored as words is read as elements
    for (int half = 0; half < 2; ++half) {
      if (column[half] >= params.out_w) continue;
      const uint32_t image = params.column_blocks.div(group * 16 + strip_of_lane + half * 8);
      T* const y = static_cast<T*>(p.y) + image * p.y_stride.n + channel * p.y_stride.c + first_row * p.y_stride.h + column[half];
      mend_column<T>(p, image, int(channel), first_row, rows, column[half], y, p.y_stride.h);
    }
  }
}

}  // namespace fusebackend::depthwise_conv
