// Depthwise convolution of 16-bit channels-last tensors on tensor cores, stride 1: the products of channel_band.cuh, whose pixels come and go by copies of
// the tensor memory accelerator. A block has sixteen channels of some segments, which are strips of eight columns beside one another in some rows of
// neighbouring images, and rolls down them, two rows at a time. Its last four warps move: they transpose pixels to planes in shared memory, and results
// back, 8x8 at a time (ldmatrix, stmatrix). The others multiply, two channels each, and nothing else. They wait for one another by barriers of each buffer.
//
// What is outside of images arrives as zeros, and is not written. Where a sum is not finite, it is computed again, tap by tap.
#pragma once
#include <cuda.h>

#include "common/bulk_copy_sm90.cuh"
#include "common/cuda_common.cuh"
#include "common/mbarrier_sm90.cuh"
#include "depthwise_conv/channel_ring_plan.h"
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/mma.cuh"
#include "depthwise_conv/ptx_channel_ring_sm90.cuh"
#include "depthwise_conv/tap_by_tap.cuh"

namespace fusebackend::depthwise_conv {

struct ChannelRingParams {
  ForwardParams p;
  CUtensorMap from, to;  // boxes of a block's segments in two rows, of x and of results
  ChannelRingPlan plan;
  FastDiv channel_tiles, column_tiles, row_tiles;
  uint32_t by_segment_blocks, by_strips;  // small_divisor of the blocks of columns of a segment in a step, and of the strips of a row
  int channels, batch, out_h, pad_h, pad_w, tap_row, tap_column;
};

// n / d is n * small_divisor(d) >> 16, for n and d below 256: one constant, since the warps that move have few registers.
constexpr uint32_t small_divisor(int d) { return 65536 / d + 1; }

// Where a block is: its first channel and image, and the place of its segments in each image.
struct ChannelRingPlace {
  int channel, image, row, rows, column;

  __device__ __forceinline__ explicit ChannelRingPlace(const ChannelRingParams& p) {
    uint32_t rest, channel_tile, column_tile, row_tile, group;
    p.channel_tiles.divmod(blockIdx.x, rest, channel_tile);
    p.column_tiles.divmod(rest, rest, column_tile);
    p.row_tiles.divmod(rest, group, row_tile);
    channel = int(channel_tile) * kChannelRingChannels, image = int(group) * p.plan.segments;
    row = int(row_tile) * p.plan.rows, rows = min(p.plan.rows, p.out_h - row), column = int(column_tile) * p.plan.strips * 8;
  }
};

// Shared memory: what has arrived, results on their way, and both as planes, each in buffers that a barrier tells full and another empty.
struct ChannelRingMemory {
  uint32_t raw, out, planes, results, full, planes_full, planes_empty, results_full, results_empty, stored;
  static constexpr int kBarriers = kChannelRingMostSlots + 4 * kChannelRingBuffers + 1;

  __device__ __forceinline__ ChannelRingMemory(const ChannelRingPlan& plan, const void* shared, const uint64_t* barriers) {
    raw = (shared_address(shared) + 1023) & ~1023u;
    out = raw + plan.slots * plan.slot_bytes(), planes = out + kChannelRingBuffers * plan.place_bytes(), results = planes + kChannelRingBuffers * plan.planes_bytes();
    full = shared_address(barriers), planes_full = full + 8 * kChannelRingMostSlots, planes_empty = planes_full + 8 * kChannelRingBuffers;
    results_full = planes_empty + 8 * kChannelRingBuffers, results_empty = results_full + 8 * kChannelRingBuffers;
    stored = results_empty + 8 * kChannelRingBuffers;
  }
  __device__ __forceinline__ void init() const {  // by one thread
    for (int i = 0; i < kChannelRingMostSlots; ++i) mbarrier::init(full + 8 * i, 1);
    for (int i = 0; i < kChannelRingBuffers; ++i) {
      mbarrier::init(planes_full + 8 * i, kChannelRingMoveWarps), mbarrier::init(planes_empty + 8 * i, kChannelRingMultiplyWarps);
      mbarrier::init(results_full + 8 * i, kChannelRingMultiplyWarps), mbarrier::init(results_empty + 8 * i, kChannelRingMoveWarps);
    }
    mbarrier::init(stored, 1);
    mbarrier::init_fence();
  }
};

// The barrier, by number, of the warps that move.
constexpr int kOfMovers = 1;

// Steps that complete no result.
constexpr int steps_before_results(int taps) { return (taps - 1) / kChannelRingRows; }

// What the warps that move do.
template <int kTaps>
__device__ __forceinline__ void move_channel_ring(const ChannelRingParams& params, const ChannelRingMemory& m, const ChannelRingPlace& at, int steps) {
  constexpr int kBefore = steps_before_results(kTaps);
  const ChannelRingPlan& plan = params.plan;
  const int warp = int(threadIdx.x) / 32 - kChannelRingMultiplyWarps, lane = int(threadIdx.x) % 32;
  const bool leads = warp == 0 && lane == 0;
  const int slot_bytes = plan.slot_bytes();
  const auto fill = [&](int step, int slot) {
    mbarrier::expect_bytes(m.full + 8 * slot, slot_bytes);
    load_box(m.raw + slot * slot_bytes, &params.from, m.full + 8 * slot, at.channel, at.column + plan.first_column, at.row - params.pad_h + step * kChannelRingRows, at.image);
  };
  if (leads)
    for (int step = 0; step < min(plan.slots, steps); ++step) fill(step, step);
  __syncwarp();

  // Blocks of eight pixels lie in the order (image, row, column); a warp transposes four of them at a time, eight channels of each. Their matrices' rows
  // are pixels, of 32 bytes, in which copies exchange 16 bytes with 16 in every other 128; those of planes are channels.
  const int chunk = warp % 2, first_group = warp / 2, matrix = lane / 8, line = lane % 8;
  const uint32_t pixel_at = matrix * kChannelRingBlockBytes + line * 32 + (((line & 4) * 4) ^ (chunk * 16));
  const uint32_t plane_at = (line + 8 * chunk) * plan.plane_units() * 16, result_at = (line + 8 * chunk) * kChannelRingResultUnits * 16;
  const int groups = plan.units() / 4, result_groups = plan.result_units() / 4;
  int slot = 0, parity = 0;
  for (int step = 0; step <= steps; ++step) {
    const int buffer = step % kChannelRingBuffers, used = slot;
    if (step < steps) {
      mbarrier::wait(m.full + 8 * slot, parity);
      if (step >= kChannelRingBuffers) mbarrier::wait(m.planes_empty + 8 * buffer, (step / kChannelRingBuffers - 1) & 1);
      __syncwarp();
      const uint32_t from = m.raw + slot * slot_bytes + pixel_at, to = m.planes + buffer * plan.planes_bytes() + plane_at;
#pragma unroll 2
      for (int i = first_group; i < groups; i += 2) {
        const uint32_t block = 4 * i + matrix, unit = block + (block * params.by_segment_blocks >> 16) * (plan.segment_units - kChannelRingRows * plan.blocks);
        transpose_matrices(to + unit * 16, from + i * 4 * kChannelRingBlockBytes);
      }
      __syncwarp();
      if (lane == 0) mbarrier::arrive(m.planes_full + 8 * buffer);
      if (++slot == plan.slots) slot = 0, parity ^= 1;
    }
    // Results of the step before.
    const int count = step - 1 - kBefore, place = count % kChannelRingBuffers;
    if (leads) wait_until_read<1>();
    if (count >= 0) mbarrier::wait(m.results_full + 8 * place, (count / kChannelRingBuffers) & 1);
    __syncwarp();
    wait_for_threads<kOfMovers, 32 * kChannelRingMoveWarps>();  // all have left the step's pixels, and the place for results is free
    if (leads && step + plan.slots < steps) {
      fence_async_proxy();
      fill(step + plan.slots, used);
    }
    __syncwarp();
    if (count < 0) continue;
    const uint32_t out = m.out + place * plan.place_bytes(), from = m.results + place * kChannelRingResultBytes + result_at;
#pragma unroll 2
    for (int i = first_group; i < result_groups; i += 2) {
      const uint32_t block = 4 * i + matrix, row = block * params.by_strips >> 16, strip = block - row * plan.strips;  // row: of all segments' rows
      const uint32_t unit = row % kChannelRingRows * kChannelRingStrips + (row / kChannelRingRows << plan.slot_bits) + strip;
      transpose_matrices(out + pixel_at + i * 4 * kChannelRingBlockBytes, from + unit * 16);
    }
    __syncwarp();
    if (lane == 0) mbarrier::arrive(m.results_empty + 8 * place);
    fence_async_proxy();
    __syncwarp();
    wait_for_threads<kOfMovers, 32 * kChannelRingMoveWarps>();
    if (leads) {
      store_box(&params.to, out, at.channel, at.column, at.row + count * kChannelRingRows, at.image);
      commit_stores();
    }
    __syncwarp();
  }
  if (leads) {
    wait_until_stored();
    mbarrier::arrive(m.stored);
  }
  __syncwarp();
}

// kFinishes: with an epilogue. An instantiation of its own, as in channel_band.cuh.
template <typename T, int kTaps, bool kFinishes>
__global__ void __launch_bounds__(kChannelRingThreads, kChannelRingBlocks) depthwise_channel_ring(const __grid_constant__ ChannelRingParams params) {
  constexpr int kBefore = steps_before_results(kTaps);
  const ForwardParams& p = params.p;
  const ChannelRingPlan& plan = params.plan;
  extern __shared__ char shared[];
  __shared__ uint64_t barriers[ChannelRingMemory::kBarriers];
  __shared__ StagedAffine affine[kFinishes ? kChannelRingChannels : 1];
  const ChannelRingMemory m(plan, shared, barriers);
  const ChannelRingPlace at(params);
  if (threadIdx.x == 0) m.init();
  if (kFinishes && p.epilogue.is_affine && threadIdx.x < kChannelRingChannels)
    affine[threadIdx.x] = {affine_of<T>(p.epilogue, min(at.channel + int(threadIdx.x), params.channels - 1))};
  __syncthreads();
  const int steps = (at.rows + kTaps) / kChannelRingRows;  // of rows + kTaps - 1 rows, an even number of which is read

  if (threadIdx.x >= 32 * kChannelRingMultiplyWarps) {
    release_registers<32>();
    move_channel_ring<kTaps>(params, m, at, steps);
    return;
  }
  acquire_registers<104>();
  // A warp's channels, and its lanes' places in the products.
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, line = lane / 4, quarter = lane % 4;
  const bool has_right = plan.blocks > plan.strips;
  uint32_t band[2][kTaps][2];
  float bias[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int channel = min(at.channel + 2 * warp + j, params.channels - 1);
    const uint16_t* const w = static_cast<const uint16_t*>(p.w) + channel * p.w_stride.n;
    const int first = 2 * quarter - line + plan.first_column + params.pad_w;
    load_band(band[j], w, first, kTaps, params.tap_row, params.tap_column, has_right);
    bias[j] = p.bias ? to_float(static_cast<const T*>(p.bias)[channel * p.bias_stride]) : 0.f;
  }
  // Matrices of x are (left, places 0 to 7), (left, places 8 to 15), (right, ...), (right, ...). A place without a strip has the last one's.
  const int place = lane % 8 + lane / 8 % 2 * 8, strip = min(place & ((1 << plan.slot_bits) - 1), plan.strips - 1);
  const int unit = (place >> plan.slot_bits) * plan.segment_units + strip + (has_right ? lane / 16 : 0);
  const uint32_t from = m.planes + (2 * warp * plan.plane_units() + unit) * 16, to = m.results + (2 * warp * kChannelRingResultUnits + lane % kChannelRingStrips) * 16;
  float sums[2][kTaps][4], finite = 0;
  uint32_t finite_pair = 0;
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < kTaps; ++i) sums[j][i][0] = sums[j][i][1] = sums[j][i][2] = sums[j][i][3] = bias[j];
  int step = 0;
  for (bool more = true; more;) {
#pragma unroll
    for (int s = 0; s < kTaps; ++s, ++step) {
      if (step >= steps) {
        more = false;
        break;
      }
      const int buffer = step % kChannelRingBuffers, count = step - kBefore;
      const int result = count % kChannelRingBuffers;
      mbarrier::wait(m.planes_full + 8 * buffer, (step / kChannelRingBuffers) & 1);
      if (count >= kChannelRingBuffers) mbarrier::wait(m.results_empty + 8 * result, (count / kChannelRingBuffers - 1) & 1);
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kChannelRingRows; ++u) {
        const int now = kChannelRingRows * s + u;  // modulo kTaps, which sum is which
        uint32_t x[2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) load_matrices_now(x[j], from + buffer * plan.planes_bytes() + j * (plan.plane_units() * 16) + u * (plan.blocks * 16));
        if (u + 1 == kChannelRingRows) {
          __syncwarp();
          if (lane == 0) mbarrier::arrive(m.planes_empty + 8 * buffer);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int a = kTaps - 1; a >= 0; --a) mma_k16<T>(sums[j][(now - a + 2 * kTaps) % kTaps], x[j][0], x[j][1], x[j][2], x[j][3], band[j][a][0], band[j][a][1]);
          float(&done)[4] = sums[j][(now + 1) % kTaps];
          if (count >= 0) {
            if constexpr (kFinishes) {
#pragma unroll
              for (int i = 0; i < 4; ++i) finite = fmaf(done[i], 0.f, finite);
              finish<T>(done, p.epilogue, affine[2 * (int(threadIdx.x) / 32) + j].get());
            }
            const uint32_t packed[2] = {pack<T>(done[0], done[1]), pack<T>(done[2], done[3])};
            if constexpr (!kFinishes) add_zero_times<T>(finite_pair, packed[0]), add_zero_times<T>(finite_pair, packed[1]);
            store_two_matrices(to + result * kChannelRingResultBytes + (j * kChannelRingResultUnits + u * kChannelRingStrips) * 16, packed[0], packed[1]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) done[i] = bias[j];
        }
      }
      __syncwarp();
      if (count >= 0 && lane == 0) mbarrier::arrive(m.results_full + 8 * result);
    }
  }
  if (kFinishes ? finite == 0.f : (finite_pair & 0x7fff7fff) == 0) return;
  mbarrier::wait(m.stored, 0);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int mended = line + 8 * half, image = at.image + (mended >> plan.slot_bits), mended_strip = mended & ((1 << plan.slot_bits) - 1);
    if (image >= params.batch || mended_strip >= plan.strips) continue;
#pragma unroll 1
    for (int channel = at.channel + 2 * warp; channel < min(at.channel + 2 * warp + 2, params.channels); ++channel)
      mend_pixels<T, kFinishes>(p, image, at.row, at.rows, channel, at.column + mended_strip * 8 + 2 * quarter);
  }
}

}  // namespace fusebackend::depthwise_conv
