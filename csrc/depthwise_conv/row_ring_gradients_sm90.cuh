// The gradients of row_ring_sm90.cuh: those of x, of the weight and, where it is wanted, of the bias, which all need the same rows of the incoming gradient:
//
//   dx[r, q]  = the sum of w[a, b] * g[r - a + 1, q - b + 1]
//   dw[a, b] += x[r, q] * g[r - a + 1, q - b + 1]
//
// A thread has the sums of its two channels over all its columns and rows in registers. A block adds its threads up at the end; depthwise_reduce the blocks.
#pragma once
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/row_ring_sm90.cuh"

namespace fusebackend::depthwise_conv {

struct RowRingGradients {
  InputGradParams input;
  WeightGradParams weight;
  RowRingShape shape;
};

template <typename T>
__device__ __noinline__ void rewrite_input_grad(const InputGradParams& p, const RowRingShape& s, RingPlace at) {
  rewrite_results<T>(s, at, p.dx, [&](int64_t image, int channel, int row, int column) {
    const T* const w = static_cast<const T*>(p.w) + channel * p.w_stride.n;
    const T* const grad = static_cast<const T*>(p.grad) + image * p.grad_stride.n + channel * p.grad_stride.c;
    float sum = 0;
    for (int a = 0; a < kRingTaps; ++a) {
      const int i = row + kRingBeside - a;
      if (i < 0 || i >= s.height) continue;
      for (int b = 0; b < kRingTaps; ++b) {
        const int j = column + kRingBeside - b;
        if (j >= 0 && j < s.width) sum = fmaf(to_float(w[a * p.w_stride.h + b * p.w_stride.w]), to_float(grad[i * p.grad_stride.h + j * p.grad_stride.w]), sum);
      }
    }
    return sum;
  });
}

template <typename T>
__global__ void __launch_bounds__(kRingThreads, 1) depthwise_row_ring_gradients(const __grid_constant__ RowRingGradients params) {
  constexpr int kAll = kRingTaps * kRingTaps;
  const WeightGradParams& p = params.weight;
  const InputGradParams& input = params.input;
  const RowRingShape& s = params.shape;
  const RowRingPlan& plan = s.plan;
  extern __shared__ __align__(128) char shared[];
  const RingMemory<0> ring(plan, shared);
  const RingPlace at = s.find(blockIdx.x);
  ring.init(plan);
  if (threadIdx.x >= unsigned(plan.threads)) return load_rows<T, true>(s, at, ring, p.grad, p.x);

  write_zeros<true>(s, at, shared);
  const bool finite = wait_for_computing(plan.threads, stage_ring_taps<T, true>(reinterpret_cast<float*>(ring.rest), input.w, input.w_stride, at, plan));

  const RingThread t = RingThread::find<T>(s, at);
  const float2* const taps = reinterpret_cast<const float2*>(ring.rest) + t.pair * kAll;
  float dw[kRingTaps][kRingTaps][kRingChannels] = {}, db[kRingChannels] = {};  // in reversed order, as the taps
  char* target = static_cast<char*>(input.dx) + s.offset<T>(at, at.first, t.column) + (t.channel - at.first_channel) * int(sizeof(T));
  RingPosition position;  // of the last row that a row of x meets
  for (int row = at.first_row; row < at.first + kRingBeside; ++row) {
    if (row < at.last_row) position.wait(ring.full);
    position.step(plan.slots);
  }
  // Where this thread's pixels of the rows are that a row of x meets, and behind the middle one those of x.
  const uint32_t first_slot = ring.slots + t.offset, past_slots = first_slot + plan.slots * plan.slot_bytes;
  const int own = ring_pixels(plan.columns(), RowRingResult::kForward) * s.pixel_bytes;
  uint32_t rows[kRingTaps];
#pragma unroll
  for (int a = 0; a < kRingTaps; ++a) rows[a] = first_slot + position.before(kRingTaps - 1 - a, plan.slots) * plan.slot_bytes;
  int row = at.first_of_image, read = at.first - at.first_row - kRingBeside;  // rows that are not needed any more, from first_row on
  for (int x_row = at.first; x_row < at.last; ++x_row) {
    if (x_row + kRingBeside < at.last_row) position.wait(ring.full);
    RingPixels<T, kRingColumns> x_pixels;
    x_pixels.read(rows[kRingBeside] + own, s);
    float x[kRingColumns][kRingChannels], sums[kRingColumns][kRingChannels] = {};
    x_pixels.get(x);
#pragma unroll
    for (int a = 0; a < kRingTaps; ++a) {
      RingPixels<T, kRingWindow> pixels;
      if (unsigned(row + a - kRingBeside) < unsigned(s.height)) pixels.read(rows[a], s);
      float window[kRingWindow][kRingChannels];
      pixels.get(window);
#pragma unroll
      for (int b = 0; b < kRingTaps; ++b) {
        const float2 tap = taps[a * kRingTaps + b];
#pragma unroll
        for (int j = 0; j < kRingColumns; ++j) {
          sums[j][0] = fmaf(tap.x, window[j + b][0], sums[j][0]), sums[j][1] = fmaf(tap.y, window[j + b][1], sums[j][1]);
#pragma unroll
          for (int c = 0; c < kRingChannels; ++c) dw[a][b][c] = fmaf(x[j][c], window[j + b][c], dw[a][b][c]);
        }
      }
      if (a == kRingBeside && p.db) {
#pragma unroll
        for (int j = 0; j < kRingColumns; ++j)
#pragma unroll
          for (int c = 0; c < kRingChannels; ++c) db[c] += window[j + kRingBeside][c];
      }
    }
    if (read >= 0) mbarrier::arrive(ring.empty + 8 * position.before(kRingTaps - 1, plan.slots));
    ++read, position.step(plan.slots);
#pragma unroll
    for (int a = 0; a < kRingTaps; ++a) rows[a] = a + 1 < kRingTaps ? rows[a + 1] : rows[a] + plan.slot_bytes == past_slots ? first_slot : rows[a] + plan.slot_bytes;
    if (++row == s.height) row = 0;
    write_results<T>(s, t, target, sums);
    target += int64_t{s.width} * s.pixel_step;
  }
  if (!finite) {
    wait_for_computing(plan.threads);
    rewrite_input_grad<T>(input, s, at);
  }

  // Adds up the block's columns, a row of taps at a time, in a fixed order. Every copy has arrived, so the slots are free.
  float* const numbers = reinterpret_cast<float*>(shared);
  const uint32_t rest = blockIdx.x / plan.segments, part = rest / plan.channel_tiles;
  float* const to = p.partial + (int64_t{part} * plan.segments + blockIdx.x - rest * plan.segments) * s.channels * (kAll + 1);
#pragma unroll
  for (int a = 0; a <= kRingTaps; ++a) {
    if (a == kRingTaps && !p.db) break;
    const int count = a == kRingTaps ? 1 : kRingTaps;
    wait_for_computing(plan.threads);
#pragma unroll
    for (int b = 0; b < kRingTaps; ++b)
#pragma unroll
      for (int c = 0; c < kRingChannels; ++c)
        if (b < count && t.works) numbers[(b * plan.groups + t.group) * plan.channels + kRingChannels * t.pair + c] = a == kRingTaps ? db[c] : dw[a % kRingTaps][b][c];
    wait_for_computing(plan.threads);
    for (int i = threadIdx.x; i < count * plan.channels; i += plan.threads) {
      const int b = i / plan.channels, c = i - b * plan.channels;
      float sum = 0;
      for (int group = 0; group < plan.groups; ++group) sum += numbers[(b * plan.groups + group) * plan.channels + c];
      to[int64_t{at.first_channel + c} * (kAll + 1) + (a == kRingTaps ? kAll : kAll - 1 - (a * kRingTaps + b))] = sum;
    }
  }
}

}  // namespace fusebackend::depthwise_conv
