// The weight's gradient of 16-bit floats on tensor cores.
//
// For a row of taps and sixteen neighbouring columns of the gradient, the sum over rows (of all images) of the outer products of a row of
// the gradient and the row of x beneath it is a matrix, of which each diagonal is one tap's: entry (i, j) belongs to tap j - i * stride.
// These matrices are added up over all columns as well, in registers, and their diagonals summed at the end. One more product, with ones,
// gives the bias's gradient.
//
// A warp has one channel, some rows of taps, and a slice of the products. A thread block goes through its part of the tiles, and writes partial
// sums, which depthwise_reduce adds up in a fixed order.
#pragma once
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/mma.cuh"
#include "depthwise_conv/outer_products_plan.h"
#include "depthwise_conv/tile.cuh"

namespace fusebackend::depthwise_conv {

struct OuterProductsParams {
  Image grad, x;
  float* partial;
  bool need_weight, need_bias;
  int multiplier, taps_h, taps_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  OuterProductsPlan plan;
  FastDiv rows_of_plane, column_blocks;  // of a tile of the gradient
};

template <typename T, int kBlocks, int kTapRows, bool kVectors>
__global__ void __launch_bounds__(256, 2) depthwise_outer_products(const __grid_constant__ OuterProductsParams p) {
  const OuterProductsPlan& plan = p.plan;
  extern __shared__ __align__(16) unsigned char shared[];
  uint16_t* const tiles = reinterpret_cast<uint16_t*>(shared);
  const int stage_elements = plan.grad.elements() + plan.x.elements();
  uint16_t* const zeros = tiles + plan.stages * stage_elements;
  for (int i = threadIdx.x; i < plan.grad.pitch; i += blockDim.x) zeros[i] = 0;

  const int64_t b0 = blockIdx.x, b1 = b0 / plan.channel_tiles;
  const int first_channel = int(b0 - b1 * plan.channel_tiles) * plan.grad.channels;
  const int split = int(b1 / plan.tap_tiles), tap_tile = int(b1 - int64_t{split} * plan.tap_tiles);
  const int64_t all = plan.tiles(), first = all * split / plan.splits, last = all * (split + 1) / plan.splits;

  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, group = lane / 4, quarter = lane % 4;
  const int slice = warp % plan.slices, rest = warp / plan.slices, tap_group = rest % plan.tap_groups, channel = rest / plan.tap_groups;
  const int first_tap = (tap_tile * plan.tap_groups + tap_group) * kTapRows;
  const int tap_rows = p.need_weight ? max(0, min(kTapRows, p.taps_h - first_tap)) : 0;
  const bool sums_bias = p.need_bias && tap_tile == 0 && tap_group == 0;
  const bool works = channel < plan.grad.channels && first_channel + channel < p.grad.channels && (tap_rows > 0 || sums_bias);

  float sums[kTapRows][kBlocks][4] = {}, bias_sums[4] = {};
  const uint32_t one = sizeof(T) == 2 ? pack<T>(1.f, 1.f) : 0;
  const int entries = plan.grad.images * plan.grad.rows, strips = (entries + 15) / 16, jobs = strips * plan.column_blocks;

  const auto load = [&](int64_t tile, int stage) {
    const int t1 = int(tile) / int(plan.column_tiles), t2 = t1 / int(plan.row_tiles);
    Corner at;
    at.channel = first_channel;
    at.column = (int(tile) - t1 * int(plan.column_tiles)) * plan.grad.columns;
    at.row = (t1 - t2 * int(plan.row_tiles)) * plan.grad.rows;
    at.image = int64_t{t2} * plan.grad.images;
    uint16_t* const grad = tiles + stage * stage_elements;
    const auto move = [&](Move how, const Image& image, const TileShape& shape, int multiplier, uint16_t* to) {
      if constexpr (kVectors) fill_vectors(how, image, shape, at, multiplier, to);
      else fill(how, image, shape, at, multiplier, to);
    };
    move(plan.fill_grad, p.grad, plan.grad, 1, grad);
    at.row = at.row * p.stride_h - p.pad_h;
    at.column = at.column * p.stride_w - p.pad_w - plan.shift;
    move(plan.fill_x, p.x, plan.x, p.multiplier, grad + plan.grad.elements());
  };

  if (first < last) load(first, 0);
  cp_async_commit();
  for (int64_t tile = first; tile < last; ++tile) {
    const int stage = plan.stages == 2 ? int(tile - first) % 2 : 0;
    if (plan.stages == 2) {
      if (tile + 1 < last) load(tile + 1, 1 - stage);
      cp_async_commit();
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    if (works) {
      const uint16_t* const grad = tiles + stage * stage_elements + channel * plan.grad.images * plan.grad.plane_pitch;
      const uint16_t* const x = tiles + stage * stage_elements + plan.grad.elements() + channel * plan.x.images * plan.x.plane_pitch;
      for (int job = slice; job < jobs; job += plan.slices) {
        uint32_t strip_of_job, column_of_job;
        p.column_blocks.divmod(uint32_t(job), strip_of_job, column_of_job);
        const int strip = int(strip_of_job), column = int(column_of_job);
        const int grad_row = strip * 16 + lane % 8 + lane / 16 * 8;
        const uint16_t* const grad_line = grad_row < entries ? grad + grad_row * plan.grad.pitch + column * 16 : zeros;
        uint32_t g[4];
        load_matrices_transposed(g[0], g[1], g[2], g[3], shared_address(grad_line + lane / 8 % 2 * 8));
        if (sums_bias) mma_k16<T>(bias_sums, g[0], g[1], g[2], g[3], one, one);
        uint32_t image, row;
        p.rows_of_plane.divmod(uint32_t(min(strip * 16 + lane % 16, entries - 1)), image, row);
        uint32_t line = shared_address(x + (int(image) * plan.x.rows + int(row) * p.stride_h + first_tap * p.dilation_h) * plan.x.pitch +
                                       column * 16 * p.stride_w + lane / 16 * 8);
#pragma unroll
        for (int a = 0; a < kTapRows; ++a) {
          if (a >= tap_rows) break;
          uint32_t b[kBlocks][2];
#pragma unroll
          for (int n = 0; n + 1 < kBlocks; n += 2) load_matrices_transposed(b[n][0], b[n][1], b[n + 1][0], b[n + 1][1], line + n * 16);
          if constexpr (kBlocks % 2) load_two_matrices_transposed(b[kBlocks - 1][0], b[kBlocks - 1][1], line + (kBlocks - 1) * 16);
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) mma_k16<T>(sums[a][n], g[0], g[1], g[2], g[3], b[n][0], b[n][1]);
          line += uint32_t(p.dilation_h * plan.x.pitch * 2);
        }
      }
    }
    __syncthreads();
    if (plan.stages == 1 && tile + 1 < last) {
      load(tile + 1, 0);
      cp_async_commit();
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  // Diagonals, one row of taps at a time.
  constexpr int kPitch = 8 * kBlocks + 1;
  float* const products = reinterpret_cast<float*>(shared) + warp * 16 * kPitch;
  float* const tap_sums = reinterpret_cast<float*>(shared) + int(blockDim.x) / 32 * 16 * kPitch;
  const int lines = plan.tap_groups * kTapRows;  // rows of taps of the block
  float* const bias_sum = tap_sums + plan.slices * plan.grad.channels * lines * p.taps_w;
  if (works) {
#pragma unroll
    for (int a = 0; a < kTapRows; ++a) {
      if (a >= tap_rows) break;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int k = 0; k < 4; ++k) products[(group + k / 2 * 8) * kPitch + n * 8 + 2 * quarter + k % 2] = sums[a][n][k];
      }
      __syncwarp();
      for (int b = lane; b < p.taps_w; b += 32) {
        float sum = 0;
        for (int i = 0; i < 16; ++i) sum += products[i * kPitch + i * p.stride_w + plan.shift + b * p.dilation_w];
        tap_sums[((slice * plan.grad.channels + channel) * lines + tap_group * kTapRows + a) * p.taps_w + b] = sum;
      }
      __syncwarp();
    }
    if (sums_bias) {
      float sum = bias_sums[0] + bias_sums[2];
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) bias_sum[slice * plan.grad.channels + channel] = sum;
    }
  }
  __syncthreads();
  const int block_lines = min(lines, p.taps_h - tap_tile * lines), block_taps = block_lines * p.taps_w, taps = p.taps_h * p.taps_w;
  for (int i = threadIdx.x; i < plan.grad.channels * (block_taps + 1); i += blockDim.x) {
    const int c = i / (block_taps + 1), tap = i - c * (block_taps + 1);
    if (first_channel + c >= p.grad.channels) break;
    float* const to = p.partial + (int64_t{split} * p.grad.channels + first_channel + c) * (taps + 1);
    float sum = 0;
    if (tap < block_taps) {
      if (!p.need_weight) continue;
      for (int s = 0; s < plan.slices; ++s) sum += tap_sums[(s * plan.grad.channels + c) * lines * p.taps_w + tap];
      to[tap_tile * lines * p.taps_w + tap] = sum;
    } else if (tap_tile == 0 && p.need_bias) {
      for (int s = 0; s < plan.slices; ++s) sum += bias_sum[s * plan.grad.channels + c];
      to[taps] = sum;
    }
  }
}

}  // namespace fusebackend::depthwise_conv
