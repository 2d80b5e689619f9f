// The forward of row_ring_sm90.cuh, and x's gradient alone, which is one of the incoming gradient with reversed taps. Each row is read once: a thread has
// the sums of all results that a row has a part in. Behind an image comes a step without a row, which completes its last results.
#pragma once
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/row_ring_sm90.cuh"
#include "depthwise_conv/tap_by_tap.cuh"

namespace fusebackend::depthwise_conv {

struct RowRingParams {
  ForwardParams p;
  RowRingShape shape;
};

template <typename T>
__device__ __noinline__ void rewrite_forward(const ForwardParams& p, const RowRingShape& s, RingPlace at) {
  rewrite_results<T>(s, at, p.y, [&](int64_t image, int channel, int row, int column) {
    const T* const x = static_cast<const T*>(p.x) + image * p.x_stride.n + channel * p.x_stride.c;
    const float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[channel * p.bias_stride]) : 0.f;
    return finished<T>(add_tap_by_tap(bias, p, x, static_cast<const T*>(p.w) + channel * p.w_stride.n, row, column, Pair{1, 1}), p.epilogue, channel);
  });
}

template <typename T, bool kEpilogue>
__global__ void __launch_bounds__(kRingThreads, 1) depthwise_row_ring(const __grid_constant__ RowRingParams params) {
  constexpr int kPending = kRingTaps - 1;
  const ForwardParams& p = params.p;
  const RowRingShape& s = params.shape;
  const RowRingPlan& plan = s.plan;
  extern __shared__ __align__(128) char shared[];
  const RingMemory<kRingPlaces> ring(plan, shared);
  const RingPlace at = s.find(blockIdx.x);
  ring.init(plan);
  if (threadIdx.x >= unsigned(plan.threads + 32)) return store_rows<T>(s, at, ring, p.y);
  if (threadIdx.x >= unsigned(plan.threads)) return load_rows<T, false>(s, at, ring, p.x, nullptr);

  write_zeros<false>(s, at, shared);
  // Taps, by pairs of channels, and what the epilogue knows of each channel.
  float* const taps = reinterpret_cast<float*>(ring.rest);
  StagedAffine* const affine = reinterpret_cast<StagedAffine*>(taps + kRingTaps * kRingTaps * plan.channels);
  if (kEpilogue && p.epilogue.is_affine)
    for (int c = threadIdx.x; c < plan.channels; c += plan.threads) affine[c] = {affine_of<T>(p.epilogue, at.first_channel + c)};
  const bool finite = wait_for_computing(plan.threads, stage_ring_taps<T, false>(taps, p.w, p.w_stride, at, plan));

  const RingThread t = RingThread::find<T>(s, at);
  float bias[kRingChannels];
#pragma unroll
  for (int c = 0; c < kRingChannels; ++c) bias[c] = p.bias ? to_float(static_cast<const T*>(p.bias)[(t.channel + c) * p.bias_stride]) : 0.f;
  float2 w[kRingTaps][kRingTaps];
#pragma unroll
  for (int i = 0; i < kRingTaps * kRingTaps; ++i) w[i / kRingTaps][i % kRingTaps] = reinterpret_cast<const float2*>(taps)[t.pair * kRingTaps * kRingTaps + i];
  // Results whose rows above were read: those that the next row completes, and those that the row after it does.
  float pending[kPending][kRingColumns][kRingChannels];
#pragma unroll
  for (int i = 0; i < kPending; ++i)
#pragma unroll
    for (int j = 0; j < kRingColumns; ++j)
#pragma unroll
      for (int c = 0; c < kRingChannels; ++c) pending[i][j][c] = bias[c];

  RingPosition position, results;
  int row = at.first_of_image - (at.first - at.first_row);  // that is read, in its image
  int skipped = at.first_of_image + kRingBeside - row;      // steps that complete no result of this block
  for (int left = at.last - at.first; left > 0;) {
    RingPixels<T, kRingWindow> pixels;
    if (row < s.height) {
      position.wait(ring.full);
      pixels.read(ring.slots + position.slot * plan.slot_bytes + t.offset, s);
      mbarrier::arrive(ring.empty + 8 * position.slot);
      position.step(plan.slots);
    }
    float window[kRingWindow][kRingChannels], done[kRingColumns][kRingChannels];
    pixels.get(window);
#pragma unroll
    for (int a = kRingTaps - 1; a >= 0; --a) {
      float(&from)[kRingColumns][kRingChannels] = pending[a > 0 ? kRingTaps - 1 - a : 0];
      float(&to)[kRingColumns][kRingChannels] = a == kRingTaps - 1 ? done : pending[kRingTaps - 2 - a];
#pragma unroll
      for (int b = 0; b < kRingTaps; ++b) {
#pragma unroll
        for (int j = 0; j < kRingColumns; ++j) {
          to[j][0] = fmaf(w[a][b].x, window[j + b][0], b > 0 ? to[j][0] : a > 0 ? from[j][0] : bias[0]);
          to[j][1] = fmaf(w[a][b].y, window[j + b][1], b > 0 ? to[j][1] : a > 0 ? from[j][1] : bias[1]);
        }
      }
    }
    if (--skipped < 0) {
      if constexpr (kEpilogue) {
        ChannelAffine of_channels[kRingChannels];
#pragma unroll
        for (int c = 0; c < kRingChannels; ++c) of_channels[c] = affine[kRingChannels * t.pair + c].get();
        finish<T>(done, p.epilogue, of_channels);
      }
      write_results<T>(s, ring, t, results, done);
      --left;
    }
    if (++row == s.height + kRingBeside) row = 0, skipped = kRingBeside;
  }
  if (!finite) {
    wait_for_stores(ring, results);
    rewrite_forward<T>(p, s, at);
  }
}

}  // namespace fusebackend::depthwise_conv
