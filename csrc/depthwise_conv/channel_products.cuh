// The gradients of weight and bias of 16-bit channels-last tensors on tensor cores, stride 1.
//
// Sixteen columns of a row of x times eight columns of a row of the gradient, multiplied along sixteen strips, are a matrix of which each diagonal
// belongs to one tap of a row: entry (i, j) to tap i - j. Which row of taps, the distance of both rows says. A block rolls down its strips: a row of x,
// from shared memory, meets the last rows of the gradient, which are still in registers. Two strips that are neighbours in a product lie in two
// segments, so that a word of shared memory has the same column of both. A warp has two channels, and all their sums; depthwise_reduce adds up
// the blocks. Where a row of taps needs no more than fifteen columns, the sixteenth is one, which gives the bias's gradient.
#pragma once
#include "depthwise_conv/channel_pixels.cuh"
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/mma.cuh"

namespace fusebackend::depthwise_conv {

struct ChannelProductsParams {
  const uint16_t *grad, *x;
  float* partial;
  ChannelTilePlan plan;
  ChannelTileIndex by;
  ChannelTileSides sides;
  int64_t grad_image, x_image;
  int grad_row, grad_column, x_row, x_column;
  bool need_bias;
};

template <typename T, int kTaps>
__global__ void __launch_bounds__(kChannelTileThreads, kChannelTileBlocks) depthwise_channel_products(const __grid_constant__ ChannelProductsParams params) {
  constexpr int kGradRow = 64, kGradPitch = 2 * kGradRow + kChunkPad, kGradWords = kTileChannels * kGradPitch;
  constexpr int kGrad = kChannelTileAhead * kPixelPairWords * kChannelTileThreads;  // where the gradient's rows are, behind what is on its way
  const ChannelTilePlan& plan = params.plan;
  const ChannelTileSides& sides = params.sides;
  extern __shared__ uint32_t shared[];
  const int row_pitch = plan.row_pitch, pitch = 2 * row_pitch + kChunkPad, segment_pitch = 8 * plan.strips + 8;
  constexpr int kX = kGrad + kGradWords;  // where rows of x are
  const int words = kGradWords + kTileChannels * pitch + 64;
  for (int i = threadIdx.x; i < words; i += kChannelTileThreads) shared[kGrad + i] = 0;

  uint32_t split, channel_tile, part, column_tile;
  params.by.channel_tiles.divmod(blockIdx.x, split, channel_tile);
  params.by.column_tiles.divmod(split, part, column_tile);
  const int parts = plan.splits / plan.column_tiles;
  const int first_group = int(plan.groups * part / parts), last_group = int(plan.groups * (part + 1) / parts);
  const int first_channel = int(channel_tile) * kTileChannels, block_column = int(column_tile) * plan.strips * 8;
  const int start = block_column - sides.pad_w, source_rows = plan.rows + kTaps - 1;

  // What a thread fills: a row of x or of the gradient, a column of two segments, eight channels.
  const bool fills_grad = int(threadIdx.x) >= kFillThreads;
  const int chunk = int(threadIdx.x) % kTileChunks;
  uint32_t pair, word;
  params.by.words.divmod(uint32_t(threadIdx.x % kFillThreads) / kTileChunks, pair, word);
  const int w = int(word) + (!fills_grad && start < 0 ? -start : 0), column = (fills_grad ? block_column : start) + w;
  const bool fills = int(pair) < plan.segments && w < (fills_grad ? 8 * plan.strips : segment_pitch);
  const bool inside = fills && first_channel + 8 * chunk < sides.channels && unsigned(column) < unsigned(fills_grad ? sides.out_w : sides.in_w);
  const int step = fills_grad ? params.grad_row : params.x_row;
  const int fill = fills_grad ? kGrad + chunk * 8 * kGradPitch + ((int(pair) << plan.slot_bits) * 8 + w) : kX + chunk * 8 * pitch + int(pair) * segment_pitch + w;
  const int fill_pitch = fills_grad ? kGradPitch : pitch, fill_row_pitch = fills_grad ? kGradRow : row_pitch;
  const uint16_t* const base = (fills_grad ? params.grad : params.x) + (first_channel + 8 * chunk) + column * (fills_grad ? params.grad_column : params.x_column);

  // A lane's places in the products: of both halves of the strips. The gradient of a place without a strip is zero.
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, line = lane / 4, quarter = lane % 4;
  int read[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) read[half] = kX + 2 * warp * pitch + strip_of_place(quarter + 4 * half, plan, segment_pitch, 8) + line;
  const int read_grad = kGrad + 2 * warp * kGradPitch + quarter * 8 + line;
  const uint32_t one = pack<T>(1.f, 1.f);
  const bool is_ones = line == 7;

  PixelsAhead ahead(shared);
  float sums[2][kTaps][4] = {};
  for (int group = first_group; group < last_group; ++group) {
    const uint16_t* source[2];
    int first_row[2], rows[2];  // that are inside: `rows` from row -first_row on
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Segment at = segment_at(uint32_t(group * plan.segments + int(pair)) * 2 + i, plan, params.by, sides);
      const int first = fills_grad ? at.first_row : at.first_row - sides.pad_h;
      source[i] = base + at.image * (fills_grad ? params.grad_image : params.x_image) + first * step;
      first_row[i] = fills_grad ? 0 : first;
      rows[i] = !inside || at.rows == 0 ? 0 : fills_grad ? at.rows : sides.in_h;
    }
    int next = 0;
    const auto load = [&] {
      ahead.load(source[0], source[1], unsigned(first_row[0] + next) < unsigned(rows[0]), unsigned(first_row[1] + next) < unsigned(rows[1]));
      source[0] += step, source[1] += step, ++next;
    };
    const auto put = [&](int buffer) {
      const PixelPair pixels = ahead.get();
      if (fills) pixels.put(shared + (fill + buffer * fill_row_pitch), fill_pitch);
    };
    ahead.forget();
#pragma unroll
    for (int i = 0; i < kChannelTileAhead; ++i) load();
    __syncthreads();
    put(0);
    load();
    uint32_t grads[2][kTaps][2] = {};
    int buffer = 0;
    bool more = true;
    for (int r0 = 0; more; r0 += kTaps) {
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
        if (r0 + s >= source_rows) {
          more = false;
          break;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = j * pitch + buffer * row_pitch, grad_at = j * kGradPitch + buffer * kGradRow;
          uint32_t a[4] = {shared[read[0] + at], shared[read[0] + at + 8], shared[read[1] + at], shared[read[1] + at + 8]};
          grads[j][s][0] = shared[read_grad + grad_at], grads[j][s][1] = shared[read_grad + grad_at + 32];
          if (is_ones) a[1] = a[3] = one;
#pragma unroll
          for (int t = 0; t < kTaps; ++t) {
            const uint32_t(&b)[2] = grads[j][(s - t + kTaps) % kTaps];
            mma_k16<T>(sums[j][t], a[0], a[1], a[2], a[3], b[0], b[1]);
          }
        }
        put(buffer ^ 1);
        load();
        buffer ^= 1;
      }
    }
  }

  // Diagonals, a matrix of a warp at a time.
  ahead.forget();
  __syncthreads();
  float(&products)[16][9] = reinterpret_cast<float(*)[16][9]>(shared)[warp];
  const int taps = kTaps * kTaps;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int channel = first_channel + 2 * warp + j;
    float* const to = params.partial + (int64_t{split} * sides.channels + channel) * (taps + 1);
#pragma unroll
    for (int a = 0; a < kTaps; ++a) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products[line + i / 2 * 8][2 * quarter + i % 2] = sums[j][a][i];
      __syncwarp();
      const bool is_bias = lane == kTaps;
      if (channel < sides.channels && (lane < kTaps || (is_bias && a == 0 && params.need_bias))) {
        float sum = 0;
        for (int n = 0; n < 8; ++n) sum += products[is_bias ? 15 : n + lane][n];
        to[is_bias ? taps : a * kTaps + lane] = sum;
      }
      __syncwarp();
    }
  }
}

}  // namespace fusebackend::depthwise_conv
