// The second kernel of sums of columns adds the rows of partial sums that the blocks of the first have left, in fp64: these are few additions, of the
// largest numbers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fusebackend {

// Of a block: it has 2^column_bits columns, and a thread every n-th row of one, where n threads share a column.
constexpr int kFinalThreads = 512;

// As many threads share a column as it has rows, at most 64: then a block has the columns of a sector of 32 bytes.
inline int final_column_bits(int64_t rows) {
  int bits = 3;
  while ((kFinalThreads >> bits) / 2 >= rows) ++bits;
  return bits;
}
inline int64_t final_tiles(int64_t columns, int column_bits) { return ((columns - 1) >> column_bits) + 1; }

// Adds a tile of the columns of `rows` rows, to be called by all threads of a block. One thread for each column gets its number and its sum, and is
// told so.
template <typename Acc>
__device__ __forceinline__ bool add_column_partials(const Acc* partials, int64_t rows, int64_t columns, uint32_t tile, int column_bits, int64_t& column,
                                                    double& sum) {
  constexpr int kAtOnce = 8;
  __shared__ double sums[kFinalThreads];
  const int block_columns = 1 << column_bits, lanes = kFinalThreads >> column_bits;
  const int lane = threadIdx.x >> column_bits, own = threadIdx.x & (block_columns - 1);
  column = int64_t(tile) * block_columns + own;
  sum = 0;
  if (column < columns) {
    const Acc* const from = partials + column;
    for (int64_t i = lane; i < rows; i += kAtOnce * lanes) {
      Acc x[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) x[u] = i + u * lanes < rows ? from[(i + u * lanes) * columns] : Acc(0);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) sum += double(x[u]);
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) sums[threadIdx.x] = sum += sums[threadIdx.x + half * block_columns];
  }
  return lane == 0 && column < columns;
}

}  // namespace fusebackend
