// Launches the kernels of shared_tile_forward.cuh and shared_tile_weight_grad.cuh.
#include <algorithm>

#include "causal_conv1d/launchers.h"
#include "causal_conv1d/shared_tile_forward.cuh"
#include "causal_conv1d/shared_tile_weight_grad.cuh"
#include "common/device_properties.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

template <typename X, typename OUT, typename T, typename A, bool LAST_TAP_FIRST>
cudaError_t forward(const ConvParams& p, cudaStream_t stream) {
  const int threads = p.out_len <= 32 * kElems ? 32 : p.out_len <= 64 * kElems ? 64 : kMaxForwardThreads, tile = threads * kElems;
  const int64_t tiles = ceil_div(p.out_len, tile), blocks = p.batch * p.channels * tiles;  // bind.h refuses what exceeds a grid
  const size_t bytes = (kTapBlock + padded<A>(tile + kTapBlock + 16) + 4) * sizeof(A);
  shared_tile_forward<X, OUT, T, A, LAST_TAP_FIRST><<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(p, static_cast<uint32_t>(tiles));
  return cudaGetLastError();
}

// Tiles of a row. The first may begin up to 7 samples before it, at a 16-byte boundary.
int64_t grad_tiles(const WeightGradParams& p) { return ceil_div(p.out_len + 7, kGradTile); }

template <typename G, typename T>
cudaError_t weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  int tap_groups = 1;
  while (tap_groups < kMaxTapGroups && tap_groups * kElems < p.taps) tap_groups *= 2;
  const dim3 grid(static_cast<unsigned>(p.channels), p.splits, static_cast<unsigned>(ceil_div(p.taps, tap_groups * kElems)));
  const size_t bytes = (padded<Sum<T>>(kGradTile) + padded<Sum<T>>(kGradTile + tap_groups * kElems + 16) + 4) * sizeof(Sum<T>);
  shared_tile_weight_grad<G, T><<<grid, kGradThreads, bytes, stream>>>(p, static_cast<int>(grad_tiles(p)), tap_groups);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_shared_tile_forward(const ConvParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    using A = Sum<T>;
    if (p.out_dtype != p.dtype) return forward<T, A, T, A, false>(p, stream);
    if (p.x_dtype != p.dtype) return forward<A, T, T, A, false>(p, stream);
    if constexpr (sizeof(T) == 4) {
      if (p.exact) return forward<T, T, T, A, false>(p, stream);
    }
    return p.w_stride.k < 0 ? forward<T, T, T, float, true>(p, stream) : forward<T, T, T, float, false>(p, stream);
  });
}

int shared_tile_weight_grad_splits(const WeightGradParams& p) {
  const int64_t tiles = p.batch * grad_tiles(p), blocks = p.channels * ceil_div(p.taps, 8 * 32);
  return static_cast<int>(std::clamp<int64_t>(ceil_div(sm_count() * 16, blocks), 1, std::clamp<int64_t>(tiles, 1, 4096)));
}

// Blocks of the first taps add up db, and skip no tile.
bool shared_tile_weight_grad_skips_padding(const WeightGradParams& p) { return p.taps > kMaxTapGroups * kElems; }

cudaError_t launch_shared_tile_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    return p.g_dtype == p.dtype ? weight_grad<T, T>(p, stream) : weight_grad<Sum<T>, T>(p, stream);
  });
}

}  // namespace fusebackend::causal_conv1d
