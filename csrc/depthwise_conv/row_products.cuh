// The weight's gradient of 16-bit planes on tensor cores, stride 1, without shared memory.
//
// Sixteen rows of x times eight rows of the gradient, multiplied along sixteen columns, are a matrix of which each diagonal belongs to one row of
// taps: entry (i, j) to row i - j. A column of taps is a shift of the gradient's columns, which lanes make of the words that they hold. So
// there are as many products as columns of taps, whose matrices stay in registers, and the diagonals are summed at the end. One more product, with
// ones, gives the bias's gradient.
//
// A warp goes through units of eight rows by sixteen columns of a channel's gradients; a thread block's warps take turns. Its partial sums are
// added up by depthwise_reduce, in a fixed order.
#pragma once
#include "common/cuda_common.cuh"
#include "depthwise_conv/column_pair.cuh"
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/mma.cuh"
#include "depthwise_conv/row_products_plan.h"

namespace fusebackend::depthwise_conv {

struct RowProductsParams {
  const uint16_t *grad, *x;
  float* partial;
  RowProductsPlan plan;
  FastDiv chunks, bands;
  int64_t grad_channel, x_channel;
  uint32_t grad_image, x_image;
  int grad_row, x_row, channels, in_h, in_w, out_h, out_w, pad_h, taps_h;
  bool need_bias;
};

// Two words that are four columns, from the column kOffset of `words` on.
template <int kOffset, int kWords>
__device__ __forceinline__ void shifted(const uint32_t (&words)[kWords], uint32_t& low, uint32_t& high) {
  constexpr int kFirst = kOffset / 2;
  if constexpr (kOffset % 2 == 0) {
    low = words[kFirst], high = words[kFirst + 1];
  } else {
    low = __byte_perm(words[kFirst], words[kFirst + 1], 0x5432), high = __byte_perm(words[kFirst + 1], words[kFirst + 2], 0x5432);
  }
}

template <typename T, int kTaps, int kColumns>
__global__ void __launch_bounds__(kRowProductsThreads, kRowProductsBlocks) depthwise_row_products(const __grid_constant__ RowProductsParams p) {
  constexpr int kWarps = kRowProductsThreads / 32;
  // The words of the gradient that a lane has: from `kBefore` columns before its four on.
  constexpr int kBefore = kColumns == 4 ? 4 : (kTaps / 2 + 1) / 2 * 2, kWords = kColumns == 4 ? 6 : (kBefore + kTaps / 2 + 4 + 1) / 2;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, line = lane / 4, quarter = lane % 4;
  const int channel = int(blockIdx.x) % p.channels, split = int(blockIdx.x) / p.channels;
  const int first = int(p.plan.units * split / p.plan.splits), last = int(p.plan.units * (split + 1) / p.plan.splits);
  const uint16_t* const grad = p.grad + channel * p.grad_channel;
  const uint16_t* const x = p.x + channel * p.x_channel;

  // Of the unit that is multiplied next, and of the one behind it.
  using Pair = ColumnPair<(kColumns > 1)>;
  Pair x_words[2][4], grad_words[2][kWords];
  const auto load = [&](int unit, Pair (&x_to)[4], Pair (&grad_to)[kWords]) {
    uint32_t rest, image, band, chunk;
    p.chunks.divmod(uint32_t(unit), rest, chunk);
    p.bands.divmod(rest, image, band);
    const int row = int(band) * kBandRows + line, column = int(chunk) * kChunkColumns + 4 * quarter;
    const bool is_unit = unit < last;
    const uint16_t* const g = settled(grad + (uint64_t{image} * p.grad_image + (row * p.grad_row + column)));
    const bool grad_inside = is_unit && row < p.out_h;
#pragma unroll
    for (int i = 0; i < kWords; i += kColumns == 4 ? 2 : 1) {
      const int first = column - kBefore + 2 * i;
      if constexpr (kColumns == 4) {
        uint2 v = {0, 0};
        if (grad_inside && unsigned(first) < unsigned(p.out_w)) v = __ldg(reinterpret_cast<const uint2*>(g - kBefore + 2 * i));
        grad_to[i].low = v.x, grad_to[i + 1].low = v.y;
      } else {
        grad_to[i].load(g - kBefore + 2 * i, first, p.out_w, grad_inside);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row - p.pad_h + 8 * half;
      const uint16_t* const at = settled(x + (uint64_t{image} * p.x_image + (i * p.x_row + column)));
      const bool inside = is_unit && unsigned(i) < unsigned(p.in_h);
#pragma unroll
      for (int k = 0; k < 2; ++k) x_to[half + 2 * k].load(at + 2 * k, column + 2 * k, p.in_w, inside);
    }
  };

  float sums[kTaps][4] = {}, bias_sums[4] = {};
  const uint32_t one = pack<T>(1.f, 1.f);
#pragma unroll
  for (int i = 0; i < 2; ++i) load(first + warp + i * kWarps, x_words[i], grad_words[i]);
  for (int pair = first + warp; pair < last; pair += 2 * kWarps) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t a[4], g[kWords];
#pragma unroll
      for (int k = 0; k < 4; ++k) a[k] = x_words[i][k].word();
#pragma unroll
      for (int k = 0; k < kWords; ++k) g[k] = grad_words[i][k].word();
      const auto multiply = [&](auto tap) {
        constexpr int kTap = decltype(tap)::value;
        uint32_t b0, b1;
        shifted<kBefore + kTaps / 2 - kTap>(g, b0, b1);
        mma_k16<T>(sums[kTap], a[0], a[1], a[2], a[3], b0, b1);
      };
      multiply(std::integral_constant<int, 0>{}), multiply(std::integral_constant<int, 1>{}), multiply(std::integral_constant<int, 2>{});
      if constexpr (kTaps > 3) multiply(std::integral_constant<int, 3>{}), multiply(std::integral_constant<int, 4>{});
      if constexpr (kTaps > 5) multiply(std::integral_constant<int, 5>{}), multiply(std::integral_constant<int, 6>{});
      if (p.need_bias) mma_k16<T>(bias_sums, one, one, one, one, g[kBefore / 2], g[kBefore / 2 + 1]);
      load(pair + (i + 2) * kWarps, x_words[i], grad_words[i]);
    }
  }

  // Diagonals: all warps' matrices side by side, one column of taps at a time.
  __shared__ float products[kWarps][16][kBandRows + 1];
  const int taps = p.taps_h * kTaps;
  float* const to = p.partial + (int64_t{split} * p.channels + channel) * (taps + 1);
#pragma unroll
  for (int tap = 0; tap <= kTaps; ++tap) {
    const bool is_bias = tap == kTaps;
    if (is_bias && !p.need_bias) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) products[warp][line + i / 2 * 8][2 * quarter + i % 2] = is_bias ? bias_sums[i] : sums[tap % kTaps][i];
    __syncthreads();
    if (int(threadIdx.x) < (is_bias ? 1 : p.taps_h)) {
      float sum = 0;
      for (int w = 0; w < kWarps; ++w)
        for (int j = 0; j < kBandRows; ++j) sum += products[w][j + int(threadIdx.x)][j];
      to[is_bias ? taps : int(threadIdx.x) * kTaps + tap] = sum;
    }
    __syncthreads();
  }
}

}  // namespace fusebackend::depthwise_conv
