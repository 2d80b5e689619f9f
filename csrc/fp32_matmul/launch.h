// What `launch` is made of: one launcher a kernel, and how the wgmma kernel divides its work.
#pragma once
#include <utility>

#include "fp32_matmul/planes.h"

namespace fusebackend::fp32_matmul {

// Whether C can be stored two columns at a time, in 8 bytes.
inline bool stores_pairs(const Problem& p) {
  return p.c_col == 1 && p.n % 2 == 0 && p.c_row % 2 == 0 && p.c_batch % 2 == 0 && reinterpret_cast<uintptr_t>(p.c) % 8 == 0;
}

// The same product, of the transposed operands in the other order.
inline Problem transposed(Problem p) {
  const auto t = [](Matrix x) { return Matrix{x.data, x.col, x.row, x.batch, x.planes, !x.planes_column_major}; };
  const Matrix a = t(p.b), b = t(p.a);
  std::swap(p.m, p.n);
  std::swap(p.c_row, p.c_col);
  p.a = a, p.b = b, p.d = t(p.d);
  return p;
}

// Both operands, with planes that are written already.
struct SplitOperands {
  Operand a, b;
  const void *a_planes, *b_planes;
};

// The launch configuration of the wgmma kernel.
struct WgmmaPlan {
  int grid;                          // thread blocks, at most one a multiprocessor
  bool swap;                         // compute the transposed product, so that the long side of a tile lies along m
  int split_tiles;                   // leading tiles that are split along K ...
  int split_parts, split_share;      // ... each into equal parts or, if parts is 0, all together into shares of this many k blocks
  double cost;                       // what it takes by the model that chose it, in microseconds of which only the ratios matter
};
WgmmaPlan plan_wgmma(const Problem& p, int sm_count);

// The same of tiles that nothing divides.
double cost_of_tiles(int64_t tiles, int64_t k_blocks, int sm_count);

constexpr int kPartialFlags = 2;     // flags a thread block: one a consumer warpgroup
struct Partials {                    // of split tiles
  float* sums;                       // grid x kTileM x kTileN
  int* ready;                        // grid x kPartialFlags, zero before the launch
};

#if __has_include(<cuda_runtime_api.h>)
cudaError_t launch_wgmma(const Problem& p, const WgmmaPlan& plan, const SplitOperands& split, const Partials& partials, bool after_split,
                         cudaStream_t stream);
cudaError_t launch_mma(const Problem& p, const SplitOperands& split, cudaStream_t stream);
cudaError_t launch_ffma(const Problem& p, cudaStream_t stream);
#endif

}  // namespace fusebackend::fp32_matmul
