// Short causal convolutions (2 to 4 taps) of 16-bit types where x is (batch, time, channel) and everything else (batch, channel, time):
// ldmatrix transposes x on its way from shared memory to registers (btc_tiles.cuh).
#pragma once
#include "causal_conv1d/btc_tiles.cuh"

namespace fusebackend::causal_conv1d {

// STAGES: tiles in shared memory, of which all but one are under way. Needs 8-element alignment of x's channels and out's samples.
template <typename T, int K, int STAGES>
__global__ void __launch_bounds__(kTileThreads) short_btc_to_bct_ldmatrix_forward(const ConvParams p, const TileStrips strips) {
  __shared__ __align__(128) char stages[STAGES][kTileBytes];
  const int64_t c0 = static_cast<int64_t>(blockIdx.x) * kTileChannels, c = c0 + threadIdx.x / 4;
  const bool valid = c < p.channels;
  float w[K] = {}, bias = 0.f;
  const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(blockIdx.z) * p.x_stride.b;
  const int len = static_cast<int>(p.in_len), t0 = blockIdx.y * strips.len, t1 = min(t0 + strips.len, len);
  TileReader<T> tiles(x, p.x_stride.t, t0, t1, c0, p.channels, shared_address(stages));
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    tiles.copy_next(s * kTileBytes, true);
    cp_async_commit();
  }
  uint32_t last_step[2] = {};
  if (valid) {
    load_taps<T>(p, c, w, bias);
    load_samples_before(x + c, p.x_stride.t, t0, last_step);
  }
  bias += static_cast<float>(p.shift);
  T* out = row_of<T>(p.out, p.out_stride, blockIdx.z, c);
  int stage = 0, copied = STAGES - 1;
  for (int t = t0 + threadIdx.x % 4 * kTileVec; t - static_cast<int>(threadIdx.x % 4) * kTileVec < t1; t += kTileLen) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    tiles.copy_next(copied * kTileBytes, true);
    cp_async_commit();
    uint32_t words[4];
    tiles.read(stage * kTileBytes, words);
    stage = stage + 1 == STAGES ? 0 : stage + 1, copied = copied + 1 == STAGES ? 0 : copied + 1;
    float xw[12], y[kTileVec];  // xw: from t-4
    unpack_window<T>(words, last_step, xw);
#pragma unroll
    for (int e = 0; e < kTileVec; ++e) y[e] = tap_sum(w, xw + 5 - K + e, bias);
    if (p.epilogue == Epilogue::kSilu) {
#pragma unroll
      for (int e = 0; e < kTileVec; ++e) y[e] = silu<T>(y[e]);
    }
    if (valid && t < t1) *reinterpret_cast<Vec<T, kTileVec>*>(out + t) = pack<T, kTileVec>(y);
  }
}

// dx, dw and db in one pass, one partial sum of dw and db a strip. UNIT: elements of rows of dy and dx that may be accessed at once; they
// are aligned, and lie inside their row or outside. channels_aligned: so may 16 bytes of x's channels, which UNIT == 8 implies.
template <typename T, int K, int STAGES, int UNIT>
__global__ void __launch_bounds__(kTileThreads, 3)
    short_btc_to_bct_ldmatrix_backward(const BackwardParams p, const TileStrips strips, bool channels_aligned) {
  // A stage: a tile of x, then 16 bytes of dy for each thread, which that thread alone copies and reads.
  constexpr int kStage = kTileBytes + kTileThreads * 16;
  __shared__ __align__(128) char stages[STAGES][kStage];
  const int64_t c0 = static_cast<int64_t>(blockIdx.x) * kTileChannels, c = c0 + threadIdx.x / 4;
  const bool valid = c < p.channels;
  float w[K] = {}, bias = 0.f;
  const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(blockIdx.z) * p.x_stride.b;
  const int len = static_cast<int>(p.in_len), t0 = blockIdx.y * strips.len, t1 = min(t0 + strips.len, len);
  const int end = min(t1 + kTileVec, len);  // gradients past the strip reach back into it
  TileReader<T> tiles(x, p.x_stride.t, t0, end, c0, p.channels, shared_address(stages));
  const int lane_t = threadIdx.x % 4 * kTileVec;
  const T* dy = row_of<T>(p.dy, p.dy_stride, blockIdx.z, c) + lane_t;
  T* dx = row_of<T>(p.dx, p.dx_stride, blockIdx.z, c) + lane_t;
  char* dy_stage = stages[0] + kTileBytes + threadIdx.x * 16;
  const uint32_t dy_address = shared_address(dy_stage);
  int copied_t = t0;
  auto copy_next = [&](int offset) {
    tiles.copy_next(offset, UNIT == kTileVec || channels_aligned);
    copy_vector<T, UNIT>(dy_address + offset, dy + copied_t, valid ? min(end - copied_t - lane_t, kTileVec) : 0);
    copied_t += kTileLen;
    cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy_next(s * kStage);
  uint32_t last_step[2] = {};
  if (valid) {
    load_taps<T>(p, c, w, bias);
    load_samples_before(x + c, p.x_stride.t, t0, last_step);
  }
  bias += static_cast<float>(p.shift);
  float dw[K + 1] = {}, last_g[kTileVec] = {};  // dw[K] is db; last_g: the gradients of pre of the step before
  int stage = 0, copied = STAGES - 1;
  for (int t = t0; t < t1 + kTileLen; t += kTileLen) {  // the last step only finishes the one before it
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    copy_next(copied * kStage);
    uint32_t words[4];
    tiles.read(stage * kStage, words);
    float xw[12], g[kTileVec];  // xw: from t + lane_t - 4
    unpack<T, kTileVec>(*reinterpret_cast<const Vec<T, kTileVec>*>(dy_stage + stage * kStage), g);
    stage = stage + 1 == STAGES ? 0 : stage + 1, copied = copied + 1 == STAGES ? 0 : copied + 1;
    unpack_window<T>(words, last_step, xw);
    if (p.silu) {
#pragma unroll
      for (int e = 0; e < kTileVec; ++e) g[e] = silu_backward<T>(g[e], tap_sum(w, xw + 5 - K + e, bias));
    }
#pragma unroll
    for (int e = 0; e < kTileVec; ++e) {
      if (t + lane_t + e / UNIT * UNIT >= end) g[e] = 0.f;  // 0 * NaN would make NaN
    }
    if (t + lane_t < t1) {
#pragma unroll
      for (int e = 0; e < kTileVec; ++e) {
        if (UNIT < kTileVec && t + lane_t + e / UNIT * UNIT >= t1) continue;
#pragma unroll
        for (int k = 0; k < K; ++k) dw[k] = fmaf(g[e], xw[5 - K + e + k], dw[k]);
        dw[K] += g[e];
      }
    }
    float all_g[kTileVec + K - 1];  // of the step before, and the K-1 after it
#pragma unroll
    for (int e = 0; e < kTileVec; ++e) all_g[e] = last_g[e];
#pragma unroll
    for (int e = 0; e < K - 1; ++e) all_g[kTileVec + e] = from_lane_after(g[e], last_g[e]);
    if (p.dx && valid && t > t0 && t - kTileLen + lane_t < t1) {
      float result[kTileVec];
#pragma unroll
      for (int e = 0; e < kTileVec; ++e) {
        result[e] = 0.f;
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const int i = e + K - 1 - k;  // past the row there is no gradient
          if (i < UNIT || t - kTileLen + lane_t + i / UNIT * UNIT < len) result[e] = fmaf(w[k], all_g[i], result[e]);
        }
      }
      const Vec<T, kTileVec> raw = pack<T, kTileVec>(result);
      T* to = dx + t - kTileLen;
#pragma unroll
      for (int e = 0; e < kTileVec; e += UNIT) {
        if (e == 0 || t - kTileLen + lane_t + e < t1)
          *reinterpret_cast<Vec<T, UNIT>*>(to + e) = *reinterpret_cast<const Vec<T, UNIT>*>(raw.v + e);
      }
    }
#pragma unroll
    for (int e = 0; e < kTileVec; ++e) last_g[e] = g[e];
  }
  if (!p.dw && !p.db) return;
#pragma unroll
  for (int k = 0; k <= K; ++k) {
    double sum = dw[k];
    sum += __shfl_down_sync(0xffffffffu, sum, 2);
    sum += __shfl_down_sync(0xffffffffu, sum, 1);
    if (valid && threadIdx.x % 4 == 0) {
      const int64_t strip = static_cast<int64_t>(blockIdx.z) * strips.per_row + blockIdx.y;
      p.partial[(strip * p.channels + c) * (K + 1) + k] = sum;
    }
  }
}

}  // namespace fusebackend::causal_conv1d
