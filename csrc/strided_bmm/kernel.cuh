// The kernel: a block computes tile after tile of the result, stage by stage. `Products` holds its sums.
#pragma once

#include <algorithm>

#include "strided_bmm/tiles.cuh"

namespace fusebackend::strided_bmm {

template <typename Traits, typename Products>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks) strided_products(const __grid_constant__ Problem p, const __grid_constant__ Tiles tiles) {
  extern __shared__ __align__(128) char shared[];
  const uint32_t stages = shared_address(shared);
  [[maybe_unused]] uint4* const staged = reinterpret_cast<uint4*>(shared + Traits::kStages * Traits::kStageBytes);
  Loader<Traits> loader(p, tiles);
#pragma unroll
  for (int s = 0; s < Traits::kStages - 1; ++s) loader.load_next(stages + s * Traits::kStageBytes);

  int at = 0;  // the stage that is computed
  const auto next_stage = [&] {
    cp_async_wait<Traits::kStages - 2>();
    __syncthreads();
    const int free = at == 0 ? Traits::kStages - 1 : at - 1;
    loader.load_next(stages + free * Traits::kStageBytes);
    const uint32_t stage = stages + at * Traits::kStageBytes;
    at = at + 1 == Traits::kStages ? 0 : at + 1;
    return stage;
  };
  for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
    const Place<Traits> place(tile, tiles);
    for (int part = 0; part < p.span; ++part) {
      Products products;
      if constexpr (Traits::kAllEntries) {
        for (int term = 0; term < p.k; term += Traits::kDepth) products.add_all(next_stage());
      } else {
#pragma unroll
        for (int e = 0; e < Traits::kEntries; ++e)
          for (int term = 0; term < p.k; term += Traits::kDepth) products.add_entry(e, next_stage(), p.k - term);
      }
      if constexpr (Products::kIsStaged) products.stage_result(staged, p.span, part);
      else if constexpr (Traits::kHasWarpPerEntry) products.store(staged, p, place);
      else products.store(p, place);
    }
    if constexpr (Products::kIsStaged) {
      __syncthreads();  // the next tile's results come behind another one
      Products::store_staged(staged, p, place, tiles);
    }
  }
  cp_async_wait<0>();
}

template <typename Traits, typename Products>
cudaError_t launch_tiles(const Problem& p, int multiprocessors, cudaStream_t stream) {
  constexpr int kStageBytes = Traits::kStages * Traits::kStageBytes, kMostBytes = kStageBytes + Products::staged_bytes(kMostSpan);
  static_assert(kMostBytes <= kMostSharedBytes);
  Tiles tiles{};
  tiles.groups = p.batch / (Traits::kEntries * p.span);
  tiles.rows = int(ceil_div(p.m, Traits::kTileRows)), tiles.columns = int(ceil_div(p.n, Traits::kTileColumns));
  tiles.count = p.outer * tiles.groups * tiles.rows * tiles.columns;
  tiles.by_span = FastDiv(p.span);
  const auto kernel = strided_products<Traits, Products>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, kMostBytes); error != cudaSuccess) return error;
  const int blocks = std::min(tiles.count, multiprocessors * Traits::kBlocks);
  kernel<<<blocks, Traits::kThreads, kStageBytes + Products::staged_bytes(p.span), stream>>>(p, tiles);
  return cudaGetLastError();
}

// Two or three blocks share a multiprocessor, so that one computes or stores while another loads; or one, whose threads have all registers.
template <typename T, template <typename> class Products>
struct Launch {
  template <Route kRoute, Inner kX, Inner kY>
  static cudaError_t tiles(const Problem& p, int multiprocessors, cudaStream_t stream) {
    constexpr bool kIsAlone = has_warp_per_entry(kRoute, sizeof(T));
    using Chosen = Traits<T, kRoute, kX, kY, /*kStages=*/kIsAlone ? 3 : 4, /*kBlocks=*/kIsAlone ? 1 : kRoute == Route::kOneEntry ? 3 : 2>;
    return launch_tiles<Chosen, Products<Chosen>>(p, multiprocessors, stream);
  }

  template <Route kRoute, Inner kX>
  static cudaError_t by_y(const Problem& p, int multiprocessors, cudaStream_t stream) {
    if (p.y.inner == Inner::kTerms) return tiles<kRoute, kX, Inner::kTerms>(p, multiprocessors, stream);
    return tiles<kRoute, kX, Inner::kRows>(p, multiprocessors, stream);
  }

  template <Route kRoute>
  static cudaError_t by_operands(const Problem& p, int multiprocessors, cudaStream_t stream) {
    if (p.x.inner == Inner::kTerms) return by_y<kRoute, Inner::kTerms>(p, multiprocessors, stream);
    return by_y<kRoute, Inner::kRows>(p, multiprocessors, stream);
  }

  static cudaError_t run(const Problem& p, int multiprocessors, cudaStream_t stream) {
    switch (p.route) {
      case Route::kOneEntry: return by_operands<Route::kOneEntry>(p, multiprocessors, stream);
      case Route::kToBatch: return by_operands<Route::kToBatch>(p, multiprocessors, stream);
      default: return tiles<Route::kFromBatch, Inner::kBatch, Inner::kRows>(p, multiprocessors, stream);
    }
  }
};

}  // namespace fusebackend::strided_bmm
