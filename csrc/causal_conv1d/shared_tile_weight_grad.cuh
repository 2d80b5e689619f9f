// Weight gradients for any taps, any strides, any GPU: tiles of g and x in shared memory, fused multiply-adds on windows in registers.
#pragma once
#include "causal_conv1d/shared_tile.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kGradThreads = 256, kGradTile = 2048, kMaxTapGroups = 16;

// A block sums 8 * tap_groups taps of one channel over every p.splits-th tile of gradients; a thread 8 taps, over every slices-th group of 8
// samples. G is the type of g, T of all else.
template <typename G, typename T>
__global__ void __launch_bounds__(kGradThreads, sizeof(T) == 4 ? 4 : 5)
    shared_tile_weight_grad(const WeightGradParams p, const int tiles, const int tap_groups) {
  using S = Sum<T>;
  extern __shared__ __align__(16) char shared[];
  S* g_tile = reinterpret_cast<S*>(shared);
  S* x_tile = g_tile + padded<S>(kGradTile);
  const int slices = kGradThreads / tap_groups, block_taps = tap_groups * kElems;
  const int64_t c = blockIdx.x;
  const int k0 = blockIdx.z * block_taps;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len), left = static_cast<int>(p.left);
  const int tap_group = threadIdx.x % tap_groups, slice = threadIdx.x / tap_groups;

  S acc[kElems] = {}, db = 0;
  for (int64_t item = blockIdx.y; item < p.batch * tiles; item += p.splits) {
    const int64_t b = item / tiles;
    const G* g_row = row_of<G>(p.g, p.g_stride, b, c);
    const T* x_row = row_of<T>(p.x, p.x_stride, b, c);
    const int t0 = static_cast<int>(item - b * tiles) * kGradTile - misalignment(g_row, 0, p.g_stride.t);
    const int count = min(kGradTile, out_len - t0);
    // Where no tap reaches x, only db needs this tile.
    const bool reaches_x = t0 + count - 1 - left + k0 + block_taps - 1 >= 0 && t0 - left + k0 < in_len;
    if (count <= 0 || (!reaches_x && blockIdx.z)) continue;
    const int before = max(0, -t0), start = t0 - left + k0, skip = misalignment(x_row, start, p.x_stride.t);
    __syncthreads();
    stage_tile(g_tile, g_row, t0, (count + kElems - 1) / kElems * kElems, out_len, p.g_stride.t);
    stage_tile(x_tile, x_row, start - skip, skip + count + block_taps - 1, in_len, p.x_stride.t);
    __syncthreads();
    with_offset(skip % 4, [&](auto offset) {
      constexpr int O = decltype(offset)::value;
      for (int t = slice * kElems; t < count; t += slices * kElems) {
        alignas(16) S g[kElems], window[kWindow];
        read_tile<kElems>(g_tile, t, g);
        read_tile<kWindow>(x_tile, t + tap_group * kElems + skip - O, window);
        const bool whole = t >= before && t + kElems <= count;
#pragma unroll
        for (int e = 0; e < kElems; ++e) {
          if (whole || (t + e >= before && t + e < count)) {  // a gradient outside of the row must not meet an inf
#pragma unroll
            for (int j = 0; j < kElems; ++j) acc[j] = fma(g[e], window[O + e + j], acc[j]);
          }
          db += g[e];
        }
      }
    });
  }
  // The slices are added in their order, eight at a time.
  const int width = block_taps + tap_groups;
  S* sums = x_tile;
  static_assert(kMaxTapGroups * (kElems + 1) * 8 <= padded<S>(kGradTile) && kGradThreads / kMaxTapGroups % 8 == 0);
  S total = 0, total_db = 0;
  for (int s0 = 0; s0 < slices; s0 += 8) {
    __syncthreads();
    if (slice >= s0 && slice < s0 + 8) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) sums[(slice - s0) * width + tap_group * kElems + j] = acc[j];
      if (tap_group == 0) sums[(slice - s0) * width + block_taps] = db;
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      if (threadIdx.x < block_taps) total += sums[s * width + threadIdx.x];
      if (threadIdx.x == 0) total_db += sums[s * width + block_taps];
    }
  }
  double* out = p.partial + (blockIdx.y * p.channels + c) * (p.taps + 1);
  if (threadIdx.x < block_taps && k0 + threadIdx.x < p.taps) out[k0 + threadIdx.x] = total;
  if (threadIdx.x == 0 && blockIdx.z == 0) out[p.taps] = total_db;
}

}  // namespace fusebackend::causal_conv1d
