// Products of batches of matrices with any strides, of 16-bit or fp32 elements: out[o, b, m, n] = sum_k x[o, b, m, k] * y[o, b, n, k].
#pragma once

#include <array>
#include <cstdint>

#include "common/dtype.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::strided_bmm {

// Batch entries that a block computes together, where they are neighbours in memory.
constexpr int kTileEntries = 8;

// How many times so many entries a tile takes at most, where 16-bit results wait for one another.
constexpr int kMostSpan = 4;

// The dim along which an operand's elements are neighbours in memory: the terms of the sums, the rows (those of y become columns), or the batch.
enum class Inner { kTerms, kRows, kBatch };

// What a block computes. Entries are those of the inner batch dim.
enum class Route {
  kOneEntry,   // a tile of one entry
  kFromBatch,  // a tile of eight entries, which are neighbours in x
  kToBatch,    // a tile of eight entries, or of several times eight, which are neighbours in the result
};

struct TileShape {
  int rows, columns;
};
constexpr TileShape tile_of(Route route, int itemsize) {
  if (route == Route::kOneEntry) return {64, 64};
  return route == Route::kToBatch && itemsize == 2 ? TileShape{32, 32} : TileShape{32, 64};
}

// Whether each of a tile's entries is computed by a warp of its own, which has all registers then.
constexpr bool has_warp_per_entry(Route route, int itemsize) { return route == Route::kToBatch && itemsize == 4; }

// Strides in elements; 0 along dims of size 1.
struct Operand {
  const void* data;
  int64_t outer, batch, row, term;
  Inner inner;
};

struct Result {
  void* data;
  int64_t outer, batch, row, column;
};

struct Problem {
  Operand x, y;
  Result out;
  int outer, batch, m, n, k;
  DType dtype;
  Route route;
  int span;  // how many times kTileEntries a tile has, up to kMostSpan
};

// Sizes: outer, batch, m, n, k. Strides: outer, batch, row, term. `order`: the result's dims (outer, batch, m, n) from the outermost to the innermost
// in memory, where it has no gaps.
using Sizes = std::array<int64_t, 5>;
using Strides = std::array<int64_t, 4>;
using Order = std::array<int64_t, 4>;

bool is_permutation(Order order);

// Of the result: outer, batch, row, column.
Strides result_strides(const Sizes& sizes, const Order& order);

// Why the kernels do not compute such a product; null if they do. `p` then says what it is, but for pointers.
const char* describe(const Sizes& sizes, const Strides& x, const Strides& y, const Order& order, DType dtype, Problem& p);

// The most shared memory that a block needs.
constexpr int kMostSharedBytes = 99 << 10;

#if __has_include(<cuda_runtime_api.h>)
cudaError_t launch_mma(const Problem& p, int multiprocessors, cudaStream_t stream);  // 16-bit elements
cudaError_t launch_fma(const Problem& p, int multiprocessors, cudaStream_t stream);  // fp32
#endif

}  // namespace fusebackend::strided_bmm
