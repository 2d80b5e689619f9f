// Convolutions by one row of a few dilated taps, stride 1, of tensors whose rows are contiguous: forward (and x's gradient, with reversed taps), the
// weight's gradient, and both gradients at once.
//
// There are few products, and memory is what takes time. A thread computes some vectors of a row's results, of 16 bytes each, in as many parts of
// the row, so that they share what belongs to the row, and neighbouring threads have neighbouring vectors. What a tap multiplies a vector by is 16 bytes of the
// source, or, where these do not begin at a multiple of 16 bytes, a part of two such vectors, shifted in registers.
// All taps' loads are issued before the first is waited for; their overlap is served by the L1 cache, whatever the dilation, so that nothing is
// staged in shared memory and no thread waits for others.
//
// What is outside the source's row counts as zero. Where a sum is not finite it is therefore computed again, tap by tap (forward), or by
// depthwise_reduce.
#pragma once
#include "common/cuda_common.cuh"
#include "depthwise_conv/dilated_rows_plan.h"
#include "common/channel_epilogue.cuh"
#include "depthwise_conv/device_math.cuh"
#include "depthwise_conv/launchers.h"

namespace fusebackend::depthwise_conv {

template <typename T>
constexpr int kVectorLength = kDilatedRowsBytes / int(sizeof(T));

// The vector of a row's elements from `first` on, which begins at a multiple of 16 bytes. What is outside the row is zero. kWhole: rows are whole
// vectors.
template <typename T, bool kWhole>
__device__ __forceinline__ uint4 load_vector(const T* row, int first, int width) {
  constexpr int kLength = kVectorLength<T>;
  uint4 v = {0, 0, 0, 0};
  if constexpr (kWhole) {
    if (unsigned(first) < unsigned(width)) v = __ldg(reinterpret_cast<const uint4*>(row + first));
  } else if (first >= 0 && first + kLength <= width) {
    v = __ldg(reinterpret_cast<const uint4*>(row + first));
  } else if (first > -kLength && first < width) {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      if (first + i < 0 || first + i >= width) continue;
      if constexpr (sizeof(T) == 4) words[i] = __float_as_uint(__ldg(row + first + i));
      else words[i / 2] |= uint32_t(__ldg(reinterpret_cast<const unsigned short*>(row) + first + i)) << (i % 2 * 16);
    }
    v = {words[0], words[1], words[2], words[3]};
  }
  return v;
}

// A vector of a row that may begin anywhere: two aligned ones, of which `elements` makes one.
template <typename T, bool kAligned>
struct RowWindow {
  uint4 low, high;
  int shift;  // elements from `low` on

  __device__ __forceinline__ void load(const T* row, int first, int width) {
    constexpr int kLength = kVectorLength<T>;
    shift = kAligned ? 0 : int((uint32_t(reinterpret_cast<uint64_t>(row) / sizeof(T)) + uint32_t(first)) % kLength);
    low = load_vector<T, kAligned>(row, first - shift, width);
    if constexpr (!kAligned) {
      high = {0, 0, 0, 0};
      if (shift) high = load_vector<T, false>(row, first - shift + kLength, width);
    }
  }

  __device__ __forceinline__ void elements(float (&to)[kVectorLength<T>]) const {
    uint32_t w[8] = {low.x, low.y, low.z, low.w, 0, 0, 0, 0};
    if constexpr (!kAligned) {
      w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
      const int words = shift * int(sizeof(T)) / 4;
#pragma unroll
      for (int i = 0; i < 6; ++i) w[i] = words & 2 ? w[i + 2] : w[i];
#pragma unroll
      for (int i = 0; i < 5; ++i) w[i] = words & 1 ? w[i + 1] : w[i];
      if constexpr (sizeof(T) == 2) {
        const uint32_t selector = shift & 1 ? 0x5432 : 0x3210;
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = __byte_perm(w[i], w[i + 1], selector);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) to[i] = __uint_as_float(w[i]);
      else to[2 * i] = low_half<T>(w[i]), to[2 * i + 1] = high_half<T>(w[i]);
    }
  }
};

struct DilatedRowsParams {
  ForwardParams p;
  FastDiv parts, rows, channels;
  int items, part, in_w, out_w, pad, dilation, taps;
};

// One result, without padding.
template <typename T, typename Params>
__device__ __noinline__ float sum_row_tap_by_tap(float sum, const Params& p, const T* x, const T* w, int column) {
  for (int b = 0; b < p.taps; ++b) {
    const int j = column - p.pad + b * p.dilation;
    if (j >= 0 && j < p.in_w) sum = fmaf(to_float(w[b * p.p.w_stride.w]), to_float(x[j]), sum);
  }
  return sum;
}

// Stores a vector of results, from `column` of a row on, where 16 bytes begin: what of it the row has.
template <typename T, bool kAligned>
__device__ __forceinline__ void store_row(T* row, int column, int width, const float (&results)[kVectorLength<T>]) {
  constexpr int kLength = kVectorLength<T>;
  if (kAligned ? column < width : column >= 0 && column + kLength <= width) {
    uint4 vector;
    if constexpr (sizeof(T) == 4) vector = {__float_as_uint(results[0]), __float_as_uint(results[1]), __float_as_uint(results[2]), __float_as_uint(results[3])};
    else vector = {pack<T>(results[0], results[1]), pack<T>(results[2], results[3]), pack<T>(results[4], results[5]), pack<T>(results[6], results[7])};
    *reinterpret_cast<uint4*>(row + column) = vector;
  } else if (!kAligned) {
#pragma unroll
    for (int i = 0; i < kLength; ++i)
      if (column + i >= 0 && column + i < width) row[column + i] = from_float<T>(results[i]);
  }
}

template <typename T, int kTaps, bool kAligned>
__global__ void __launch_bounds__(kDilatedRowsThreads, dilated_rows_blocks(kTaps, kAligned)) depthwise_dilated_rows(const __grid_constant__ DilatedRowsParams p) {
  constexpr int kLength = kVectorLength<T>, kVectors = dilated_rows_vectors(kTaps, kAligned);
  const uint32_t index = blockIdx.x * kDilatedRowsThreads + threadIdx.x;
  if (index >= uint32_t(p.items)) return;
  uint32_t rest, line, n, c, h, place;
  p.parts.divmod(index, line, place);
  p.rows.divmod(line, rest, h);
  p.channels.divmod(rest, n, c);
  const T* const x = static_cast<const T*>(p.p.x) + (n * p.p.x_stride.n + c * p.p.x_stride.c + h * p.p.x_stride.h);
  T* const y = static_cast<T*>(p.p.y) + (n * p.p.y_stride.n + c * p.p.y_stride.c + h * p.p.y_stride.h);
  const int lead = kAligned ? 0 : int(reinterpret_cast<uint64_t>(y) / sizeof(T) % kLength), first = int(place) * kLength - lead;

  RowWindow<T, kAligned> windows[kVectors][kTaps];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * p.part * kLength;
#pragma unroll
    for (int b = 0; b < kTaps; ++b) windows[v][b].load(x, column - p.pad + b * p.dilation, column < p.out_w && b < p.taps ? p.in_w : 0);
  }
  const T* const w = static_cast<const T*>(p.p.w) + c * p.p.w_stride.n;
  float taps[kTaps];
#pragma unroll
  for (int b = 0; b < kTaps; ++b) taps[b] = b < p.taps ? to_float(w[b * p.p.w_stride.w]) : 0.f;
  const float bias = p.p.bias ? to_float(static_cast<const T*>(p.p.bias)[c * p.p.bias_stride]) : 0.f;

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * p.part * kLength;
    float sums[kLength];
#pragma unroll
    for (float& s : sums) s = bias;
#pragma unroll
    for (int b = 0; b < kTaps; ++b) {
      float factors[kLength];
      windows[v][b].elements(factors);
#pragma unroll
      for (int i = 0; i < kLength; ++i) sums[i] = fmaf(taps[b], factors[i], sums[i]);
    }
    float finite = 0;
#pragma unroll
    for (int i = 0; i < kLength; ++i) finite = fmaf(sums[i], 0.f, finite);
    if (finite != 0.f) {
#pragma unroll
      for (int i = 0; i < kLength; ++i) sums[i] = sum_row_tap_by_tap<T>(bias, p, x, w, column + i);
    }
    if (p.p.epilogue.any) finish<T>(sums, p.p.epilogue, affine_of<T>(p.p.epilogue, c));
    store_row<T, kAligned>(y, column, p.out_w, sums);
  }
}

struct DilatedRowsWeightGradParams {
  const void *grad, *x;
  float* partial;
  Strides grad_stride, x_stride;
  FastDiv parts, rows;
  int64_t items;
  int part, splits, channels, in_w, out_w, pad, dilation, taps;
  bool need_weight;
};

// The sums of each number over the lanes of each warp, which all threads may read behind it.
template <int kNumbers, int kWarps>
__device__ __forceinline__ void sum_warps(const float (&sums)[kNumbers], float (&of_warps)[kNumbers][kWarps]) {
#pragma unroll
  for (int b = 0; b < kNumbers; ++b) {
    float sum = sums[b];
#pragma unroll
    for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    if (threadIdx.x % 32 == 0) of_warps[b][threadIdx.x / 32] = sum;
  }
  __syncthreads();
}

// A thread block sums a part of one channel's vectors of the gradient: each thread some of these, into a register a tap and one for the bias.
template <typename T, int kTaps, bool kAligned>
__global__ void __launch_bounds__(kDilatedRowsSumThreads, dilated_rows_weight_grad_blocks(kTaps, kAligned))
    depthwise_dilated_rows_weight_grad(const __grid_constant__ DilatedRowsWeightGradParams p) {
  constexpr int kLength = kVectorLength<T>, kVectors = dilated_rows_weight_grad_vectors(kTaps, kAligned), kWarps = kDilatedRowsSumThreads / 32;
  const int channel = int(blockIdx.x) % p.channels, split = int(blockIdx.x) / p.channels;
  const int first = int(p.items * split / p.splits), last = int(p.items * (split + 1) / p.splits);
  const T* const grad = static_cast<const T*>(p.grad) + channel * p.grad_stride.c;
  const T* const x = static_cast<const T*>(p.x) + channel * p.x_stride.c;
  const int taps = p.need_weight ? p.taps : 0;

  float sums[kTaps + 1] = {};
  for (int item = first + int(threadIdx.x); item < last; item += kDilatedRowsSumThreads) {
    uint32_t line, place, n, h;
    p.parts.divmod(uint32_t(item), line, place);
    p.rows.divmod(line, n, h);
    const T* const grad_row = grad + (n * p.grad_stride.n + h * p.grad_stride.h);
    const T* const x_row = x + (n * p.x_stride.n + h * p.x_stride.h);
    const int lead = kAligned ? 0 : int(reinterpret_cast<uint64_t>(grad_row) / sizeof(T) % kLength);
    RowWindow<T, true> gradients[kVectors];  // at multiples of 16 bytes by choice
    RowWindow<T, kAligned> windows[kVectors][kTaps];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (int(place) + v * p.part) * kLength - lead;
      gradients[v].low = load_vector<T, kAligned>(grad_row, column, p.out_w);
#pragma unroll
      for (int b = 0; b < kTaps; ++b) windows[v][b].load(x_row, column - p.pad + b * p.dilation, column < p.out_w && b < taps ? p.in_w : 0);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float g[kLength];
      gradients[v].elements(g);
#pragma unroll
      for (int b = 0; b < kTaps; ++b) {
        float values[kLength];
        windows[v][b].elements(values);
#pragma unroll
        for (int i = 0; i < kLength; ++i) sums[b] = fmaf(g[i], values[i], sums[b]);
      }
#pragma unroll
      for (int i = 0; i < kLength; ++i) sums[kTaps] += g[i];
    }
  }

  __shared__ float parts[kTaps + 1][kWarps];
  sum_warps(sums, parts);
  const int b = int(threadIdx.x);
  if (b > p.taps) return;
  float sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += parts[b == p.taps ? kTaps : b][i];
  p.partial[(int64_t{split} * p.channels + channel) * (p.taps + 1) + b] = sum;
}

struct DilatedRowsGradientsParams {
  ForwardParams p;  // of x's gradient: from the incoming gradient, with reversed taps
  const void* x;
  float* partial;
  Strides x_stride;
  FastDiv parts, rows;
  int64_t items;
  int splits, channels, in_w, out_w, columns, pad, dilation, taps;  // in_w: of the incoming gradient; out_w: of x; columns: that are looked at
  int bias_tap;                                                     // whose windows have each element of the gradient once; -1 if db is not wanted
};

// Both gradients: what a vector of x's gradient is computed of, the weight's products with the vector of x there are computed of, too. With reversed taps
//   dx[i] = sum_b w[b] g[i - pad + b * dilation],   dw[b] = sum_i x[i] g[i - pad + b * dilation],
// so that three tensors are moved instead of five. A thread block has some vectors of one channel.
template <typename T, int kTaps, bool kAligned>
__global__ void __launch_bounds__(kDilatedRowsSumThreads, dilated_rows_gradients_blocks(kTaps, kAligned, sizeof(T) == 2))
    depthwise_dilated_rows_gradients(const __grid_constant__ DilatedRowsGradientsParams p) {
  constexpr int kLength = kVectorLength<T>, kWarps = kDilatedRowsSumThreads / 32;
  const int channel = int(blockIdx.x) % p.channels, split = int(blockIdx.x) / p.channels;
  const int first = int(p.items * split / p.splits), last = int(p.items * (split + 1) / p.splits);
  const T* const grad = static_cast<const T*>(p.p.x) + channel * p.p.x_stride.c;
  const T* const x = static_cast<const T*>(p.x) + channel * p.x_stride.c;
  T* const dx = static_cast<T*>(p.p.y) + channel * p.p.y_stride.c;
  const T* const w = static_cast<const T*>(p.p.w) + channel * p.p.w_stride.n;
  float taps[kTaps];
#pragma unroll
  for (int b = 0; b < kTaps; ++b) taps[b] = b < p.taps ? to_float(w[b * p.p.w_stride.w]) : 0.f;

  float sums[kTaps + 1] = {};
  for (int item = first + int(threadIdx.x); item < last; item += kDilatedRowsSumThreads) {
    uint32_t line, place, n, h;
    p.parts.divmod(uint32_t(item), line, place);
    p.rows.divmod(line, n, h);
    const T* const grad_row = grad + (n * p.p.x_stride.n + h * p.p.x_stride.h);
    const T* const x_row = x + (n * p.x_stride.n + h * p.x_stride.h);
    T* const dx_row = dx + (n * p.p.y_stride.n + h * p.p.y_stride.h);
    const int lead = kAligned ? 0 : int(reinterpret_cast<uint64_t>(dx_row) / sizeof(T) % kLength), column = int(place) * kLength - lead;
    RowWindow<T, kAligned> own, windows[kTaps];
#pragma unroll
    for (int b = 0; b < kTaps; ++b) windows[b].load(grad_row, column - p.pad + b * p.dilation, column < p.columns && b < p.taps ? p.in_w : 0);
    own.load(x_row, column, p.out_w);

    float values[kLength], results[kLength] = {}, finite = 0;
    own.elements(values);
#pragma unroll
    for (int b = 0; b < kTaps; ++b) {
      float g[kLength];
      windows[b].elements(g);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        results[i] = fmaf(taps[b], g[i], results[i]);
        sums[b] = fmaf(g[i], values[i], sums[b]);
      }
      if (b == p.bias_tap) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) sums[kTaps] += g[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kLength; ++i) finite = fmaf(results[i], 0.f, finite);
    if (finite != 0.f) {
#pragma unroll
      for (int i = 0; i < kLength; ++i) results[i] = sum_row_tap_by_tap<T>(0.f, p, grad_row, w, column + i);
    }
    store_row<T, kAligned>(dx_row, column, p.out_w, results);
  }

  __shared__ float parts[kTaps + 1][kWarps];
  sum_warps(sums, parts);
  const int b = int(threadIdx.x);
  if (b > p.taps) return;
  float sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += parts[b == p.taps ? kTaps : p.taps - 1 - b][i];
  p.partial[(int64_t{split} * p.channels + channel) * (p.taps + 1) + b] = sum;
}

}  // namespace fusebackend::depthwise_conv
