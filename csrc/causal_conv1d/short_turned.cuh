// Short causal kernels of 16-bit types from (batch, time, channel) to (batch, channel, time) in memory: forward, and backward where
// the gradients are (batch, channel, time) and x is not.
//
// A block marches down a strip of time with 64 channels, 32 samples a step: rows of 64 channels come into shared memory a few steps
// ahead, and one ldmatrix turns them, so that a lane holds 8 neighbouring samples of one channel, as in the time-major kernels. Four
// lanes share a channel; the samples before theirs are in the lane before, or, for the first, in the last one's of the step before.
//
// UNIT: elements that may be accessed at once in rows of samples: aligned, and inside their row or outside.
#pragma once
#include "device.cuh"

namespace fusebackend::conv1d {

constexpr int kTurnThreads = 256, kTurnBlock = 64, kTurnStep = 32, kTurnVec = 8;

struct TurnStrips {
  int len;      // samples a strip, a multiple of kTurnStep
  int per_row;  // strips of one batch entry
};

// Of step's row t (of 32) and 16-byte chunk (of 8): the rows that one ldmatrix reads fall in different banks.
__device__ __forceinline__ int turn_offset(int t, int chunk) { return t * 128 + (chunk ^ (2 * (t / 8) + t % 2)) * 16; }

// The first `count` of 8 elements into shared memory, UNIT at a time, and zeros after them.
template <typename T, int UNIT>
__device__ __forceinline__ void turn_copy(uint32_t to, const T* from, int count) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (UNIT == kTurnVec) {
    const bool there = count > 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(there ? from : nullptr), "r"(there ? 16 : 0) : "memory");
    return;
  }
#endif
  Vec<T, kTurnVec> raw = {};
#pragma unroll
  for (int i = 0; i < kTurnVec; i += UNIT) {
    if (i < count) *reinterpret_cast<Vec<T, UNIT>*>(raw.v + i) = *reinterpret_cast<const Vec<T, UNIT>*>(from + i);
  }
  const uint4 v = *reinterpret_cast<const uint4*>(&raw);
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// What a thread has to do with x: what it copies of a step, and what it reads.
template <typename T>
struct TurnedRows {
  const T* row;  // of the first sample that this thread copies, at its channels
  int64_t stride;
  int t, end;  // that sample; samples from `end` on are zeros
  int mine;    // channels there
  uint32_t to, from;

  __device__ __forceinline__ TurnedRows(const T* x, int64_t stride_, int t0, int end_, int64_t c0, int64_t channels, uint32_t base)
      : stride(stride_), t(t0 + threadIdx.x / 8), end(end_) {
    const int64_t c = c0 + threadIdx.x % 8 * kTurnVec;
    mine = static_cast<int>(min(channels - c, int64_t{kTurnVec}));
    row = x + c + t * stride;
    to = base + turn_offset(threadIdx.x / 8, threadIdx.x % 8);
    // Row k of matrix m is row 8 * (k / 2) + 2 * m + k % 2 of the step.
    const int k = threadIdx.x % 8, m = threadIdx.x / 8 % 4;
    from = base + turn_offset(k / 2 * 8 + 2 * m + k % 2, threadIdx.x / 32);
  }

  // `whole`: 16 bytes of channels are aligned.
  __device__ __forceinline__ void copy_next(int stage_offset, bool whole) {
    const int count = t < end ? mine : 0;
    if (whole) turn_copy<T, kTurnVec>(to + stage_offset, row, count);
    else turn_copy<T, 1>(to + stage_offset, row, count);
    t += kTurnStep, row += kTurnStep * stride;
  }

  // 8 samples of channel lane / 4, from sample lane % 4 * 8 of the step on.
  __device__ __forceinline__ void read(int stage_offset, uint32_t (&words)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from + stage_offset));
  }
};

// The value of the lane before among the four of a channel; of the last one's step before, for the first.
__device__ __forceinline__ uint32_t before(uint32_t now, uint32_t last) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(0xffffffffu, lane % 4 == 3 ? last : now, (lane & ~3) | ((lane + 3) & 3));
}
// The value, of the step before, of the lane after; of this step's first one, for the last.
__device__ __forceinline__ float after(float now, float last) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(0xffffffffu, lane % 4 == 0 ? now : last, (lane & ~3) | ((lane + 1) & 3));
}

// The 4 samples before a strip, as they would be left by a step before it; the last lane's are used.
template <typename T>
__device__ __forceinline__ void samples_before(const T* x, int64_t stride, int t0, uint32_t (&last)[2]) {
  Vec<T, 4> v = {};
  if (threadIdx.x % 4 == 3 && t0 > 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v.v[i] = x[(t0 - 4 + i) * stride];
  }
  last[0] = reinterpret_cast<uint32_t*>(&v)[0], last[1] = reinterpret_cast<uint32_t*>(&v)[1];
}

// x[t-4 .. t+7] in fp32 of a step's words; `last` becomes what the next step needs.
template <typename T>
__device__ __forceinline__ void turned_window(const uint32_t (&words)[4], uint32_t (&last)[2], float (&x)[12]) {
  const uint32_t early[2] = {before(words[2], last[0]), before(words[3], last[1])};
  last[0] = words[2], last[1] = words[3];
  unpack<T, 4>(*reinterpret_cast<const Vec<T, 4>*>(early), x);
  unpack<T, 8>(*reinterpret_cast<const Vec<T, 8>*>(words), x + 4);
}

template <typename T, int K, int STAGES>
__global__ void __launch_bounds__(kTurnThreads) short_turning_forward(const ConvParams p, const TurnStrips strips) {
  __shared__ __align__(128) char stages[STAGES][kTurnStep * 128];
  constexpr int kStage = kTurnStep * 128;
  const int64_t c0 = static_cast<int64_t>(blockIdx.x) * kTurnBlock, c = c0 + threadIdx.x / 4;
  const bool mine = c < p.channels;
  float w[K] = {}, bias = 0.f;
  const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(blockIdx.z) * p.xs.b;
  const int len = static_cast<int>(p.in_len), t0 = blockIdx.y * strips.len, t1 = min(t0 + strips.len, len);
  TurnedRows<T> rows(x, p.xs.t, t0, t1, c0, p.channels, static_cast<uint32_t>(__cvta_generic_to_shared(stages)));
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    rows.copy_next(s * kStage, true);
    cp_async_commit();
  }
  uint32_t last[2] = {};
  if (mine) {
    load_taps<T, K>(p.w, p.bias, c, p.w_c, p.w_k, p.bias_c, w, bias);
    samples_before(x + c, p.xs.t, t0, last);
  }
  bias += static_cast<float>(p.shift);
  T* out = static_cast<T*>(p.out) + static_cast<int64_t>(blockIdx.z) * p.outs.b + c * p.outs.c;
  int stage = 0, filled = STAGES - 1;
  for (int t = t0 + threadIdx.x % 4 * kTurnVec; t - static_cast<int>(threadIdx.x % 4) * kTurnVec < t1; t += kTurnStep) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    rows.copy_next(filled * kStage, true);
    cp_async_commit();
    uint32_t words[4];
    rows.read(stage * kStage, words);
    stage = stage + 1 == STAGES ? 0 : stage + 1, filled = filled + 1 == STAGES ? 0 : filled + 1;
    float xw[12], y[kTurnVec];
    turned_window<T>(words, last, xw);
#pragma unroll
    for (int e = 0; e < kTurnVec; ++e) {
      y[e] = bias;
#pragma unroll
      for (int k = 0; k < K; ++k) y[e] = fmaf(w[k], xw[5 - K + e + k], y[e]);
    }
    if (p.epilogue == Epilogue::kSilu) {
#pragma unroll
      for (int e = 0; e < kTurnVec; ++e) y[e] = silu<T>(y[e]);
    }
    if (mine && t < t1) *reinterpret_cast<Vec<T, kTurnVec>*>(out + t) = pack<T, kTurnVec>(y);
  }
}

// One partial sum of dw and db a strip.
template <typename T, int K, int STAGES, int UNIT>
__global__ void __launch_bounds__(kTurnThreads, 3) short_turning_backward(const BackwardParams p, const TurnStrips strips, bool whole_x) {
  // Of a step: x, then 16 bytes of dy a thread, which nobody else reads.
  constexpr int kStage = kTurnStep * 128 + kTurnThreads * 16;
  __shared__ __align__(128) char stages[STAGES][kStage];
  const int64_t c0 = static_cast<int64_t>(blockIdx.x) * kTurnBlock, c = c0 + threadIdx.x / 4;
  const bool mine = c < p.channels;
  float w[K] = {}, bias = 0.f;
  const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(blockIdx.z) * p.xs.b;
  const int len = static_cast<int>(p.in_len), t0 = blockIdx.y * strips.len, t1 = min(t0 + strips.len, len);
  const int end = min(t1 + kTurnVec, len);  // gradients past the strip reach back into it
  TurnedRows<T> rows(x, p.xs.t, t0, end, c0, p.channels, static_cast<uint32_t>(__cvta_generic_to_shared(stages)));
  const int sub = threadIdx.x % 4 * kTurnVec;
  const T* dy = static_cast<const T*>(p.dy) + static_cast<int64_t>(blockIdx.z) * p.dys.b + c * p.dys.c + sub;
  T* dx = static_cast<T*>(p.dx) + static_cast<int64_t>(blockIdx.z) * p.dxs.b + c * p.dxs.c + sub;
  char* own = stages[0] + kTurnStep * 128 + threadIdx.x * 16;
  const uint32_t own_address = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  int copied = t0;
  auto copy_next = [&](int offset) {
    rows.copy_next(offset, UNIT == kTurnVec || whole_x);
    turn_copy<T, UNIT>(own_address + offset, dy + copied, mine ? min(end - copied - sub, kTurnVec) : 0);
    copied += kTurnStep;
    cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy_next(s * kStage);
  uint32_t last[2] = {};
  if (mine) {
    load_taps<T, K>(p.w, p.bias, c, p.w_c, p.w_k, p.bias_c, w, bias);
    samples_before(x + c, p.xs.t, t0, last);
  }
  bias += static_cast<float>(p.shift);
  float dw[K + 1] = {}, older[kTurnVec] = {};  // the last of dw is db; older: the gradients of pre of the step before
  int stage = 0, filled = STAGES - 1;
  for (int t = t0; t < t1 + kTurnStep; t += kTurnStep) {  // the last step only finishes the one before it
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    copy_next(filled * kStage);
    uint32_t words[4];
    rows.read(stage * kStage, words);
    float xw[12], g[kTurnVec];
    unpack<T, kTurnVec>(*reinterpret_cast<const Vec<T, kTurnVec>*>(own + stage * kStage), g);
    stage = stage + 1 == STAGES ? 0 : stage + 1, filled = filled + 1 == STAGES ? 0 : filled + 1;
    turned_window<T>(words, last, xw);
    if (p.silu) {
#pragma unroll
      for (int e = 0; e < kTurnVec; ++e) {
        float pre = bias;
#pragma unroll
        for (int k = 0; k < K; ++k) pre = fmaf(w[k], xw[5 - K + e + k], pre);
        g[e] = silu_backward<T>(g[e], pre);
      }
    }
#pragma unroll
    for (int e = 0; e < kTurnVec; ++e) {
      if (t + sub + e / UNIT * UNIT >= end) g[e] = 0.f;  // 0 * NaN would leak in
    }
    if (t + sub < t1) {
#pragma unroll
      for (int e = 0; e < kTurnVec; ++e) {
        if (UNIT < kTurnVec && t + sub + e / UNIT * UNIT >= t1) continue;
#pragma unroll
        for (int k = 0; k < K; ++k) dw[k] = fmaf(g[e], xw[5 - K + e + k], dw[k]);
        dw[K] += g[e];
      }
    }
    float all[kTurnVec + K - 1];
#pragma unroll
    for (int e = 0; e < kTurnVec; ++e) all[e] = older[e];
#pragma unroll
    for (int e = 0; e < K - 1; ++e) all[kTurnVec + e] = after(g[e], older[e]);
    if (p.dx && mine && t > t0 && t - kTurnStep + sub < t1) {
      float result[kTurnVec];
#pragma unroll
      for (int e = 0; e < kTurnVec; ++e) {
        result[e] = 0.f;
#pragma unroll
        for (int k = 0; k < K; ++k) result[e] = fmaf(w[k], all[e + K - 1 - k], result[e]);
      }
      const Vec<T, kTurnVec> raw = pack<T, kTurnVec>(result);
      T* to = dx + t - kTurnStep;
#pragma unroll
      for (int e = 0; e < kTurnVec; e += UNIT) {
        if (e == 0 || t - kTurnStep + sub + e < t1) *reinterpret_cast<Vec<T, UNIT>*>(to + e) = *reinterpret_cast<const Vec<T, UNIT>*>(raw.v + e);
      }
    }
#pragma unroll
    for (int e = 0; e < kTurnVec; ++e) older[e] = g[e];
  }
  if (!p.dw && !p.db) return;
#pragma unroll
  for (int k = 0; k <= K; ++k) {
    double sum = dw[k];
    sum += __shfl_down_sync(0xffffffffu, sum, 2);
    sum += __shfl_down_sync(0xffffffffu, sum, 1);
    if (mine && threadIdx.x % 4 == 0) {
      const int64_t strip = static_cast<int64_t>(blockIdx.z) * strips.per_row + blockIdx.y;
      p.partial[(strip * p.channels + c) * (K + 1) + k] = sum;
    }
  }
}

}  // namespace fusebackend::conv1d
