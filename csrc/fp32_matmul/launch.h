// What `launch` is made of: a launcher a kernel, and how the Hopper kernel's work is cut up.
#pragma once
#include "matmul.h"
#include "planes.h"
#include "tiling.h"

namespace fusebackend::matmul {

// Whether C can be stored two columns at a time, in 8 bytes.
inline bool stores_pairs(const Problem& p) {
  return p.c_col == 1 && p.n % 2 == 0 && p.c_row % 2 == 0 && p.c_batch % 2 == 0 && reinterpret_cast<uintptr_t>(p.c) % 8 == 0;
}

// The operands with their planes, written.
struct Split {
  Operand a, b;
  const void *a_planes, *b_planes;
};

// How the Hopper kernel cuts a product up among the multiprocessors.
struct Plan {
  int grid;                          // thread blocks; all of them must fit the GPU at once
  bool swap;                         // compute the transposed product, so that a tile's long side lies along m
  int split_tiles;                   // leading tiles that are split along K ...
  int split_parts, split_share;      // ... each into equal parts, or if parts is 0 all together into shares of this many k blocks
};

Plan plan(const Problem& p, int sm_count);

constexpr int kPartialFlags = 2;     // a thread block's: one a warpgroup
struct Partials {                    // of split tiles
  float* sums;                       // grid x kTileM x kTileN
  int* ready;                        // grid x kPartialFlags, zero
};

cudaError_t launch_wgmma(const Problem& p, const Plan& plan, const Split& split, const Partials& partials, bool after_split,
                         cudaStream_t stream);
cudaError_t launch_mma(const Problem& p, const Split& split, cudaStream_t stream);
cudaError_t launch_ffma(const Problem& p, cudaStream_t stream);

}  // namespace fusebackend::matmul
