// Depthwise convolution of 16-bit channels-last tensors on tensor cores, stride 1: the products of rolling_band.cuh, whose rows of x come through
// shared memory. A block rolls down sixteen strips of eight columns of sixteen channels, of which each warp has two. Two rows at a time are
// transposed from pixels, which were copied to shared memory asynchronously, to planes, while the rows before them are multiplied; results go back the
// same way, without waiting.
//
// The band's zeros, and those beside the image, are multiplied by whatever is there. Where a sum is not finite, it is computed again, tap by tap.
#pragma once
#include <climits>

#include "depthwise_conv/channel_pixels.cuh"
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/mma.cuh"
#include "depthwise_conv/tap_by_tap.cuh"

namespace fusebackend::depthwise_conv {

struct ChannelBandParams {
  ForwardParams p;
  ChannelTilePlan plan;
  ChannelTileIndex by;
  ChannelTileSides sides;
  int x_row, x_column, y_row, y_column, tap_row, tap_column;
};

// kFinishes: with an epilogue. An instantiation of its own, since without one there is not a register to spare.
template <typename T, int kTaps, bool kFinishes>
__global__ void __launch_bounds__(kChannelTileThreads, kChannelTileBlocks) depthwise_channel_band(const __grid_constant__ ChannelBandParams params) {
  constexpr int kStep = 2;                                          // rows at a time
  constexpr int kOutPitch = kStep * kFillWords + kChunkPad, kOutWords = kTileChannels * kOutPitch;
  const ForwardParams& p = params.p;
  const ChannelTilePlan& plan = params.plan;
  const ChannelTileSides& sides = params.sides;
  extern __shared__ uint32_t shared[];
  const int row_pitch = plan.row_pitch, pitch = 2 * kStep * row_pitch + kChunkPad, segment_pitch = 4 * plan.strips + 4;
  constexpr int kOut = kChannelTileAhead * kPixelPairWords * kChannelTileThreads;  // where results are, behind what is on its way
  constexpr int kIn = kOut + 2 * kOutWords;                                          // where rows of x are, behind two steps of results
  const int in_words = kTileChannels * pitch + 64;
  for (int i = threadIdx.x; i < in_words; i += kChannelTileThreads) shared[kIn + i] = 0;
  StagedAffine* const affine = reinterpret_cast<StagedAffine*>(shared + kIn + in_words);

  uint32_t rest, channel_tile, group, column_tile;
  params.by.channel_tiles.divmod(blockIdx.x, rest, channel_tile);
  params.by.column_tiles.divmod(rest, group, column_tile);
  const int first_channel = int(channel_tile) * kTileChannels, block_column = int(column_tile) * plan.strips * 8;
  const int start = block_column - sides.pad_w - plan.shift;  // an even column, that of the first word
  const int source_rows = plan.rows + kTaps - 1;

  // What a thread fills, and what it writes: a row of a step, a pair of pixels, eight channels.
  const int row_of_step = int(threadIdx.x) / kFillThreads, chunk = int(threadIdx.x) % kTileChunks;
  const bool has_channels = first_channel + 8 * chunk < sides.channels;
  const uint16_t *source;
  int fill = 0;
  int fill_row = INT_MIN;
  bool inside[2] = {false, false};
  {
    uint32_t segment, word;
    params.by.words.divmod(uint32_t(threadIdx.x % kFillThreads) / kTileChunks, segment, word);
    const Segment at = segment_at(group * plan.segments + segment, plan, params.by, sides);
    const int w = int(word) + (start < 0 ? -start / 2 : 0), column = start + 2 * w;
    if (int(segment) < plan.segments && w < segment_pitch) {
      fill = kIn + chunk * 8 * pitch + row_of_step * row_pitch + int(segment) * segment_pitch + w;
      fill_row = at.rows > 0 ? at.first_row - sides.pad_h + row_of_step : INT_MIN;
      inside[0] = has_channels && unsigned(column) < unsigned(sides.in_w), inside[1] = has_channels && unsigned(column + 1) < unsigned(sides.in_w);
    }
    source = static_cast<const uint16_t*>(p.x) + at.image * p.x_stride.n + (first_channel + 8 * chunk) + (at.first_row - sides.pad_h + row_of_step) * params.x_row +
             column * params.x_column;
  }
  uint16_t* target;
  int target_rows = 0, target_columns;
  {
    const int word = int(threadIdx.x) % kFillThreads / kTileChunks, place = word / 4, segment = place >> plan.slot_bits, strip = place & ((1 << plan.slot_bits) - 1);
    const Segment at = segment_at(group * plan.segments + segment, plan, params.by, sides);
    const int column = block_column + strip * 8 + word % 4 * 2;
    if (segment < plan.segments && strip < plan.strips && has_channels) target_rows = at.rows;
    target_columns = sides.out_w - column;
    target = static_cast<uint16_t*>(p.y) + at.image * p.y_stride.n + (first_channel + 8 * chunk) + (at.first_row + row_of_step - kTaps + 1) * params.y_row +
             column * params.y_column;
  }
  const int written = kOut + chunk * 8 * kOutPitch + row_of_step * kFillWords + int(threadIdx.x) % kFillThreads / kTileChunks;

  PixelsAhead ahead(shared);
  const auto load = [&] {
    const bool row_inside = unsigned(fill_row) < unsigned(sides.in_h);
    ahead.load(source, source + params.x_column, row_inside && inside[0], row_inside && inside[1]);
    source += kStep * params.x_row;
    if (fill_row != INT_MIN) fill_row += kStep;
  };
  const auto put = [&](int buffer) {
    const PixelPair pixels = ahead.get();
    if (fill > 0) pixels.put(shared + (fill + buffer * kStep * row_pitch), pitch);
  };
  const auto write = [&](int row, int buffer) {  // the results that were ready when source row `row` was
    const int result_row = row + row_of_step - (kTaps - 1);
    if (unsigned(result_row) < unsigned(target_rows)) {
      PixelPair results;
      results.get(shared + (written + buffer * kOutWords), kOutPitch);
      if (target_columns > 0) *reinterpret_cast<uint4*>(target) = results.first;
      if (target_columns > 1) *reinterpret_cast<uint4*>(target + params.y_column) = results.second;
    }
    target += kStep * params.y_row;
  };
#pragma unroll
  for (int i = 0; i < kChannelTileAhead; ++i) load();

  if (kFinishes && p.epilogue.is_affine && threadIdx.x < kTileChannels)
    affine[threadIdx.x] = {affine_of<T>(p.epilogue, min(first_channel + int(threadIdx.x), sides.channels - 1))};

  // A warp's channels, and its lanes' places in the products.
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, line = lane / 4, quarter = lane % 4;
  uint32_t band[2][kTaps][2];
  float bias[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int channel = min(first_channel + 2 * warp + j, sides.channels - 1);
    const uint16_t* const w = static_cast<const uint16_t*>(p.w) + channel * p.w_stride.n;
    const int first = 2 * quarter - line - plan.shift;
    load_band(band[j], w, first, kTaps, params.tap_row, params.tap_column);
    bias[j] = p.bias ? to_float(static_cast<const T*>(p.bias)[channel * p.bias_stride]) : 0.f;
  }
  int read[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) read[half] = kIn + 2 * warp * pitch + strip_of_place(line + 8 * half, plan, segment_pitch, 4) + quarter;
  const int out = kOut + 2 * warp * kOutPitch + lane;
  float sums[2][kTaps][4], finite = 0;
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < kTaps; ++i) sums[j][i][0] = sums[j][i][1] = sums[j][i][2] = sums[j][i][3] = bias[j];
  __syncthreads();
  put(0);
  load();

  int buffer = 0;
  bool more = true;
  for (int r0 = 0; more; r0 += kStep * kTaps) {
#pragma unroll
    for (int s = 0; s < kTaps; ++s) {
      const int r = r0 + kStep * s;
      __syncthreads();
      if (r > 0) write(r - kStep, buffer ^ 1);
      if (r >= source_rows) {
        more = false;
        break;
      }
#pragma unroll
      for (int u = 0; u < kStep; ++u) {
        const int now = kStep * s + u;  // modulo kTaps, which sum is which
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = j * pitch + (buffer * kStep + u) * row_pitch;
          const uint32_t a0 = shared[read[0] + at], a1 = shared[read[1] + at], a2 = shared[read[0] + at + 4], a3 = shared[read[1] + at + 4];
#pragma unroll
          for (int a = kTaps - 1; a >= 0; --a) mma_k16<T>(sums[j][(now - a + 2 * kTaps) % kTaps], a0, a1, a2, a3, band[j][a][0], band[j][a][1]);
          float(&done)[4] = sums[j][(now + 1) % kTaps];
          const int to = out + buffer * kOutWords + j * kOutPitch + u * kFillWords;
          if constexpr (kFinishes) {
#pragma unroll
            for (int i = 0; i < 4; ++i) finite = fmaf(done[i], 0.f, finite);
            finish<T>(done, p.epilogue, affine[2 * (int(threadIdx.x) / 32) + j].get());
          }
          shared[to] = pack<T>(done[0], done[1]), shared[to + 32] = pack<T>(done[2], done[3]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (!kFinishes) finite = fmaf(done[i], 0.f, finite);
            done[i] = bias[j];
          }
        }
      }
      put(buffer ^ 1);
      load();
      buffer ^= 1;
    }
  }
  __syncthreads();  // what other threads have written is read
  if (finite == 0.f) return;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int place = line + 8 * half, segment = place >> plan.slot_bits, strip = place & ((1 << plan.slot_bits) - 1);
    const int column = block_column + strip * 8 + 2 * quarter;
    if (segment >= plan.segments || strip >= plan.strips) continue;
    const Segment at = segment_at(group * plan.segments + segment, plan, params.by, sides);
#pragma unroll 1
    for (int channel = first_channel + 2 * warp; channel < min(first_channel + 2 * warp + 2, sides.channels); ++channel)
      mend_pixels<T, kFinishes>(p, at.image, at.first_row, at.rows, channel, column);
  }
}

}  // namespace fusebackend::depthwise_conv
