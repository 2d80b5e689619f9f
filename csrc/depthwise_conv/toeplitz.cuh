// Depthwise convolution of 16-bit floats on tensor cores, forward and for x's gradient.
//
// Eight neighbouring results of a row are, for each row of taps, a row of the source times a banded Toeplitz matrix of these taps. A warp
// multiplies 16 such rows, of any images and heights, at once, and `kBlocks` neighbouring blocks of eight columns, which share source
// blocks: those of block i are i * step ... i * step + kSpan - 1. The matrices' fragments are looked up in a table of pairs of taps, padded
// by zeros.
//
// A thread block has a tile: some rows of the planes of some channels and images, in shared memory with its halo, whatever the memory order
// outside. Results go through shared memory as well, and leave in the order that is wanted.
//
// The band's zeros are multiplied by whatever is beside it. Where a sum is not finite, a warp therefore sums again, tap by tap.
#pragma once
#include "common/channel_epilogue.cuh"
#include "depthwise_conv/device_math.cuh"
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/mma.cuh"
#include "depthwise_conv/tile.cuh"
#include "depthwise_conv/toeplitz_plan.h"

namespace fusebackend::depthwise_conv {

struct ToeplitzParams {
  Image source, target;
  const void *w, *bias;
  int64_t w_channel, w_row, w_column, bias_stride;
  int multiplier, taps_h, taps_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  bool transposed;
  ChannelEpilogue epilogue;
  ToeplitzPlan plan;
  FastDiv rows_of_plane, segments, strips;  // of a tile's target, in one phase
  FastDiv channel_tiles, column_tiles, row_tiles, window_columns, window_rows;
};

// One result, tap by tap.
template <typename T>
__device__ __noinline__ float sum_tap_by_tap(const ToeplitzParams& p, const uint16_t* plane, const T* w, float sum, int row, int column,
                                             int first_row, int first_column) {
  for (int a = 0; a < p.taps_h; ++a) {
    int i = p.transposed ? row + p.pad_h - a * p.dilation_h : row * p.stride_h - p.pad_h + a * p.dilation_h;
    if (p.transposed) {
      if (i % p.stride_h) continue;
      i /= p.stride_h;
    }
    if (i < 0 || i >= p.source.height) continue;
    for (int b = 0; b < p.taps_w; ++b) {
      int j = p.transposed ? column + p.pad_w - b * p.dilation_w : column * p.stride_w - p.pad_w + b * p.dilation_w;
      if (p.transposed) {
        if (j % p.stride_w) continue;
        j /= p.stride_w;
      }
      if (j < 0 || j >= p.source.width) continue;
      const T x = reinterpret_cast<const T*>(plane)[(i - first_row) * p.plan.source.pitch + j - first_column];
      sum = fmaf(to_float(w[a * p.w_row + b * p.w_column]), to_float(x), sum);
    }
  }
  return sum;
}

// Thread blocks that a multiprocessor is to have registers for.
constexpr int toeplitz_blocks(int span, int blocks) { return blocks < 8 ? 4 : span < 5 ? 3 : 2; }

template <typename T, ColumnStep kStep, int kSpan, int kBlocks>
__global__ void __launch_bounds__(256, toeplitz_blocks(kSpan, kBlocks)) depthwise_toeplitz(const __grid_constant__ ToeplitzParams p) {
  constexpr int kStride = kStep == ColumnStep::kTwo ? 2 : 1;  // of source blocks
  constexpr int kVariants = kStep == ColumnStep::kHalf ? 2 : 1;
  constexpr int kLoaded = ((kStep == ColumnStep::kHalf ? kBlocks / 2 - 1 + kSpan : (kBlocks - 1) * kStride + kSpan) + 1) / 2 * 2;
  constexpr int kSegmentColumns = kStep == ColumnStep::kHalf ? kBlocks * 4 : kBlocks * 8 * kStride;  // of the source

  const ToeplitzPlan& plan = p.plan;
  extern __shared__ __align__(16) unsigned char shared[];
  uint16_t* const source = reinterpret_cast<uint16_t*>(shared);
  uint16_t* const target = plan.in_place ? source : source + plan.source.elements();
  uint32_t* const table = reinterpret_cast<uint32_t*>(target + (plan.in_place ? plan.source.elements() : plan.target.elements()));
  const int table_lines = plan.source.channels * p.taps_h, table_entries = table_lines * plan.table_length;
  int* const row_offset = reinterpret_cast<int*>(table + table_entries);

  // Which tile.
  Corner at;
  {
    uint32_t rest, rest2, image_tile, channel_tile, column_tile, row_tile;
    p.channel_tiles.divmod(blockIdx.x, rest, channel_tile);
    p.column_tiles.divmod(rest, rest2, column_tile);
    p.row_tiles.divmod(rest2, image_tile, row_tile);
    at.channel = int(channel_tile) * plan.target.channels, at.column = int(column_tile) * plan.target.columns;
    at.row = int(row_tile) * plan.target.rows, at.image = int64_t{image_tile} * plan.target.images;
  }
  Corner from = at;
  from.row = at.row / plan.row_divisor * plan.row_factor + plan.row_base;
  from.column = at.column / plan.column_divisor * plan.column_factor + plan.column_base;
  fill(plan.fill, p.source, plan.source, from, p.multiplier, source);
  cp_async_commit();

  // The table of taps: entry e of a row of taps is the pair of those `first + each * e` source columns away, and `second` further.
  const T* const w = static_cast<const T*>(p.w);
  for (int i = threadIdx.x; i < table_entries; i += blockDim.x) table[i] = 0;
  for (int i = threadIdx.x; i < plan.phases * p.taps_h; i += blockDim.x) {
    const int phase = i / p.taps_h, a = i - phase * p.taps_h, up = phase + p.pad_h - a * p.dilation_h;
    row_offset[i] = !p.transposed ? a * p.dilation_h : up % p.stride_h ? -1 : up / p.stride_h - plan.row_base;
  }
  __syncthreads();
  {
    const bool flipped = kStep == ColumnStep::kOne && p.transposed;
    const int first = kStep == ColumnStep::kHalf ? p.pad_w - 2 * plan.column_base - 2 * (8 * kSpan - 1)
                      : flipped                  ? (p.taps_w - 1) * p.dilation_w + plan.shift + 7
                                                 : -7 * kStride - plan.shift;
    const int each = flipped ? -1 : 1, second = kStep == ColumnStep::kHalf ? -2 : each;
    for (int i = threadIdx.x; i < table_lines * p.taps_w; i += blockDim.x) {
      uint32_t line, b, channel, a;
      p.window_columns.divmod(uint32_t(i), line, b);
      p.window_rows.divmod(line, channel, a);
      if (at.channel + int(channel) >= p.target.channels) break;
      const T* const tap = w + (at.channel + int(channel)) * p.w_channel + int(a) * p.w_row + int(b) * p.w_column;
      const uint16_t bits = *reinterpret_cast<const uint16_t*>(tap);
      const int low = each * (int(b) * p.dilation_w - first), high = low - each * second;
      uint16_t* const entries = reinterpret_cast<uint16_t*>(table + line * plan.table_length);
      if (low >= 0 && low < plan.table_length) entries[2 * low] = bits;
      if (high >= 0 && high < plan.table_length) entries[2 * high + 1] = bits;
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  const int lane = int(threadIdx.x) % 32, group = lane / 4, quarter = lane % 4, warps = int(blockDim.x) / 32;
  const int phase_rows = plan.target.rows / plan.phases, entries = plan.target.images * phase_rows * plan.segments;
  const int strips = (entries + 15) / 16, jobs = plan.target.channels * plan.phases * strips;
  const int table_lane = kStep == ColumnStep::kHalf ? group - 4 * quarter + 16 * kSpan - 2 : 2 * quarter - kStride * group + 7 * kStride;
  constexpr int kTableBlock = kStep == ColumnStep::kHalf ? -16 : 8;

  for (int job = int(threadIdx.x) / 32; job < jobs; job += warps) {
    uint32_t rest, strip_of_job;
    p.strips.divmod(uint32_t(job), rest, strip_of_job);
    const int strip = int(strip_of_job), channel = plan.phases == 1 ? int(rest) : int(rest) / plan.phases, phase = int(rest) - channel * plan.phases;
    if (at.channel + channel >= p.target.channels) break;
    // Row m of the product: a segment of a row of an image.
    const auto place = [&](int m, int& image, int& row, int& segment) {
      uint32_t line, s, i, r;
      p.segments.divmod(uint32_t(m), line, s);
      p.rows_of_plane.divmod(line, i, r);
      image = int(i), row = int(r), segment = int(s);
    };
    int image, row, segment;
    place(min(strip * 16 + lane % 16, entries - 1), image, row, segment);
    const uint32_t address = shared_address(source + (channel * plan.source.images + image) * plan.source.plane_pitch + row * plan.row_step * plan.source.pitch +
                                            segment * kSegmentColumns) + (lane / 16) * 16;
    const float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[(at.channel + channel) * p.bias_stride]) : 0.f;
    float sums[kBlocks][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = bias;

    const uint32_t* taps = table + channel * p.taps_h * plan.table_length + table_lane;
    for (int a = 0; a < p.taps_h; ++a, taps += plan.table_length) {
      const int offset = row_offset[phase * p.taps_h + a];
      if (offset < 0) continue;
      uint32_t band[kVariants][kSpan], x[kLoaded][2];
#pragma unroll
      for (int v = 0; v < kVariants; ++v)
#pragma unroll
        for (int d = 0; d < kSpan; ++d) band[v][d] = taps[8 * v + kTableBlock * d];
      const uint32_t line = address + uint32_t(offset * plan.source.pitch * 2);
#pragma unroll
      for (int i = 0; i < kLoaded; i += 2) load_matrices(x[i][0], x[i][1], x[i + 1][0], x[i + 1][1], line + i * 16);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int first = kStep == ColumnStep::kHalf ? i / 2 : i * kStride, v = kStep == ColumnStep::kHalf ? i % 2 : 0;
#pragma unroll
        for (int d = 0; d + 1 < kSpan; d += 2)
          mma_k16<T>(sums[i], x[first + d][0], x[first + d][1], x[first + d + 1][0], x[first + d + 1][1], band[v][d], band[v][d + 1]);
        if constexpr (kSpan % 2) mma_k8<T>(sums[i], x[first + kSpan - 1][0], x[first + kSpan - 1][1], band[v][kSpan - 1]);
      }
    }

    float finite = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) finite = fmaf(sums[i][k], 0.f, finite);
    if (__any_sync(~0u, finite != 0.f)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        place(min(strip * 16 + group + 8 * half, entries - 1), image, row, segment);
        const int target_row = row * plan.phases + phase, column = segment * kBlocks * 8 + 2 * quarter;
        const uint16_t* const plane = source + (channel * plan.source.images + image) * plan.source.plane_pitch;
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i)
          sums[i / 2][2 * half + i % 2] = sum_tap_by_tap<T>(p, plane, w + (at.channel + channel) * p.w_channel, bias, at.row + target_row,
                                                            at.column + column + i / 2 * 8 + i % 2, from.row, from.column);
      }
    }
    finish<T>(sums, p.epilogue, affine_of<T>(p.epilogue, at.channel + channel));
    __syncwarp();  // where results take the place of their sources, all lanes have read these
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = strip * 16 + group + 8 * half;
      if (m >= entries) continue;
      place(m, image, row, segment);
      uint32_t* const to = reinterpret_cast<uint32_t*>(target + (channel * plan.target.images + image) * plan.target.plane_pitch +
                                                       (row * plan.phases + phase) * plan.target.pitch + segment * kBlocks * 8 + 2 * quarter);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) to[i * 4] = pack<T>(sums[i][2 * half], sums[i][2 * half + 1]);
    }
  }
  __syncthreads();
  store(plan.store, target, plan.target, p.target, at);
}

}  // namespace fusebackend::depthwise_conv
