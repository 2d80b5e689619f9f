// Tens of taps on (batch, channel, time) tensors of 16-bit types: as toeplitz_forward.cuh, on tensor cores, but all in registers. Samples go
// from memory to fragments, and fragments to memory, 16 bytes at a time; there is no shared memory to fill and to wait for.
//
// A warp walks along 8 rows (batch entries of one channel), 32 samples at a time. The taps w[s - t + left] are the left operand, samples the
// right one. In which order samples are summed is free, and so is which output is which row of the product: lane (g, q) takes samples 8q to
// 8q + 7 of row g as they lie in memory, and once results are transposed it has outputs 8q to 8q + 7 of that row. Then all taps that it needs
// are 3 fragments for each distance in chunks between samples and outputs, -1, 0 and 1: 36 registers, for a whole row.
//
// Rows that do not begin at a 16-byte boundary are walked along from the boundary before them (bct_rows.cuh): taps depend on the distance of a
// sample from its output alone.
//
// Zero taps that meet an inf make a NaN, so results that are NaN are computed again, one by one.
#pragma once
#include "causal_conv1d/bct_rows.cuh"
#include "causal_conv1d/direct_sums.cuh"
#include "causal_conv1d/route_limits.h"
#include "causal_conv1d/tensor_core.cuh"
#include "common/channel_epilogue.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kChunkSamples = 32, kWarpRows = 8, kWarpsOfBlock = 4;
static_assert(kToeplitzReach <= kChunkSamples);
constexpr int kSlots = 8;              // chunks: three that are multiplied, the others on their way
constexpr int kBlocksPerSm = 4;

struct RegisterToeplitzPlan {
  int chunks;  // of a row of results
  int span;    // chunks that a warp walks along
  int spans;   // of a row
  int items;   // of a channel: groups of rows, times spans
};

// Lane (g, q) has elements 2q and 2q + 1 of row g of an 8x8 matrix, and gets those of column g.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t result = 0;
#if __CUDA_ARCH__ >= 800
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
#endif
  return result;
}

// What is stored of eight sums, which may also be infinite or NaN.
template <typename T, Epilogue EPILOGUE>
__device__ __forceinline__ void finish_results(float (&y)[8], const ChannelEpilogue& after, const StagedAffine& affine) {
  if constexpr (EPILOGUE == Epilogue::kChannel) finish<T>(y, after, affine.get());
  if constexpr (EPILOGUE == Epilogue::kSilu) {
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = silu<T>(y[e]);
  }
}

// Eight samples or results at one of the ends of a row, and results one by one. Not inlined: they are rare.
template <typename T>
__device__ __noinline__ uint4 load_at_an_end(const T* row, int t, int len) {
  Vec<T, 8> v = {};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (t + e >= 0 && t + e < len) v.v[e] = row[t + e];
  }
  return *reinterpret_cast<const uint4*>(&v);
}
template <typename T>
__device__ __noinline__ void store_at_an_end(T* row, int t, int len, uint4 words) {
  const Vec<T, 8>& v = reinterpret_cast<const Vec<T, 8>&>(words);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (t + e >= 0 && t + e < len) row[t + e] = v.v[e];
  }
}
template <typename T, Epilogue EPILOGUE>
__device__ __noinline__ void direct_results(const ConvParams& p, const T* x, const T* w, int t, float bias, const StagedAffine& affine, T* row) {
  const int in_len = static_cast<int>(p.in_len), taps = static_cast<int>(p.taps), first = t - static_cast<int>(p.left);
  float y[8];
  for (int e = 0; e < 8; ++e) y[e] = bias + sum_of_taps(x, 1, in_len, w, p.w_stride.k, taps, first + e, 0.f, p.skips_padding);
  finish_results<T, EPILOGUE>(y, p.after, affine);
  const Vec<T, 8> results = pack<T, 8>(y);
  store_at_an_end(row, t, static_cast<int>(p.out_len), *reinterpret_cast<const uint4*>(&results));
}

template <typename T, Epilogue EPILOGUE, RowAccess ACCESS>
__global__ void __launch_bounds__(kWarpsOfBlock * 32, kBlocksPerSm)
    register_toeplitz_forward(const __grid_constant__ ConvParams p, const RegisterToeplitzPlan plan) {
#if __CUDA_ARCH__ >= 800
  constexpr int kTaps = 4 * kChunkSamples, kNearest = 2 * kChunkSamples - 1;  // w[s - t + left] is taps[s - t + kNearest]
  static_assert(kTaps == kWarpsOfBlock * 32);
  __shared__ T taps[kTaps];
  __shared__ StagedAffine affine;
  const int64_t c = blockIdx.x;
  const T* w = static_cast<const T*>(p.w) + c * p.w_stride.c;
  const int left = static_cast<int>(p.left), in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  const int k = static_cast<int>(threadIdx.x) - kNearest + left;
  taps[threadIdx.x] = k >= 0 && k < p.taps ? w[k * p.w_stride.k] : from_float<T>(0.f);
  if (EPILOGUE == Epilogue::kChannel && threadIdx.x == 0) affine.numbers = affine_of<T>(p.after, c);
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;

  // A sample of fragment f is s = 8q + 4f + {0, 1}, and 2 more; an output of tile i is t = 8 (g / 2) + 4i + g % 2, and 2 more. left_operand[d][m]
  // is for samples d - 1 chunks from the outputs, and f - i = m - 1.
  uint32_t left_operand[3][3][4];
#pragma unroll
  for (int d = 0; d < 3; ++d) {
#pragma unroll
    for (int m = 0; m < 3; ++m) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int at = kNearest + kChunkSamples * (d - 1) + 8 * (q - g / 2) - g % 2 + 4 * (m - 1) + 2 * (r / 2) - 2 * (r % 2);
        Vec<T, 2> two;
        two.v[0] = taps[at], two.v[1] = taps[at + 1];
        left_operand[d][m][r] = *reinterpret_cast<const uint32_t*>(&two);
      }
    }
  }
  const float bias = static_cast<float>(p.shift) + load_bias<T>(p, c);

  for (int item = blockIdx.y * kWarpsOfBlock + warp; item < plan.items; item += gridDim.y * kWarpsOfBlock) {
    const int group = item / plan.spans, first = (item - group * plan.spans) * plan.span, last = min(first + plan.span, plan.chunks);
    const int64_t b = int64_t{group} * kWarpRows + g;
    const bool valid = b < p.batch;
    const T* const row = row_of<T>(p.x, p.x_stride, valid ? b : 0, c);
    T* const out_row = row_of<T>(p.out, p.out_stride, valid ? b : 0, c);
    // This lane's samples and outputs of chunk 0 begin here.
    const int lane_t = 8 * q - row_misalignment<T, ACCESS>(row);
    const int samples_end = valid ? min(in_len, (last + 1) * kChunkSamples) : 0, outputs_end = valid ? out_len : 0;
    uint32_t samples[kSlots][4];
    auto load = [&](int chunk, uint32_t (&to)[4]) {
      uint4 raw = {0, 0, 0, 0};
      const int s = chunk * kChunkSamples + lane_t;
      if (ACCESS == RowAccess::kAligned ? s >= 0 && s < samples_end : s >= 0 && s + 8 <= samples_end) raw = *reinterpret_cast<const uint4*>(row + s);
      else if (ACCESS != RowAccess::kAligned && s > -8 && s < samples_end) raw = load_at_an_end(row, s, samples_end);
      to[0] = raw.x, to[1] = raw.y, to[2] = raw.z, to[3] = raw.w;
    };
    // Chunk first + i is in slot (i + 1) % kSlots.
#pragma unroll
    for (int i = 0; i < kSlots - 1; ++i) load(first - 1 + i, samples[i]);
    for (int start = first; start < last; start += kSlots) {
#pragma unroll
      for (int u = 0; u < kSlots; ++u) {
        const int chunk = start + u;
        if (chunk >= last) break;
        load(chunk + kSlots - 2, samples[(u + kSlots - 1) % kSlots]);
        float sum[2][4] = {};
#pragma unroll
        for (int d = 0; d < 3; ++d) {
          const uint32_t(&from)[4] = samples[(u + d) % kSlots];
#pragma unroll
          for (int f = 0; f < 2; ++f) {
#pragma unroll
            for (int i = 0; i < 2; ++i) multiply_add<T, false>(sum[i], left_operand[d][f - i + 1], from[2 * f], from[2 * f + 1]);
          }
        }

        float y[8];
        bool any_nan = false;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          y[e] = sum[e / 4][e % 4] + bias;
          any_nan = any_nan || y[e] != y[e];
        }
        finish_results<T, EPILOGUE>(y, p.after, affine);
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Vec<T, 2> two = pack<T, 2>(y + 2 * j);
          pairs[j] = transposed(*reinterpret_cast<const uint32_t*>(&two));
        }
        const bool again = __any_sync(0xffffffffu, any_nan);
        const int t = chunk * kChunkSamples + lane_t;
        if (t > -8 && t < outputs_end) {
          const uint4 results = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
          if (again) direct_results<T, EPILOGUE>(p, row, w, t, bias, affine, out_row);
          else if (ACCESS == RowAccess::kAligned || (t >= 0 && t + 8 <= outputs_end)) *reinterpret_cast<uint4*>(out_row + t) = results;
          else store_at_an_end(out_row, t, outputs_end, results);
        }
      }
    }
  }
#endif
}

}  // namespace fusebackend::causal_conv1d
