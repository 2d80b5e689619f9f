// Rows: every thread moves aligned 16-byte chunks of the output's innermost dimension. Inputs that are contiguous there are read in chunks,
// shifted where they are not aligned; broadcast ones once; others element by element: this kernel serves any problem.
#pragma once

#include "common/integer_math.h"
#include "common/tile/batch.cuh"
#include "common/tile/chunks.cuh"
#include "common/tile/elements.cuh"
#include "common/tile/route.h"

namespace fusebackend::tile {

constexpr int kRowThreads = 256;
// Chunks a thread, all loaded before the first is stored. Copies of whole rows are fastest with one.
template <typename Op, bool kWhole>
constexpr int kRowUnroll = kWhole && !Op::kIsSum ? 1 : 2;

struct RowArgs {
  char* out;
  const char* x;
  const char* y;
  Extent x_extent, y_extent;
  int64_t out_step, x_step, y_step;  // bytes between neighbours in a row
  int64_t row_length;
  uint32_t chunks;  // in all rows
  FastDiv chunks_per_row;
  Batch rows;
};

// The begin of the row that holds chunk `index`, in each operand, and the chunk's index in that row.
struct RowChunk {
  char* out;
  const char* x;
  const char* y;
  uint32_t j;
  bool exists;

  __device__ RowChunk(const RowArgs& args, uint32_t index) : out(args.out), x(args.x), y(args.y) {
    exists = index < args.chunks;
    uint32_t row;
    args.chunks_per_row.divmod(exists ? index : 0, row, j);
    args.rows.advance(row, out, x, y);
  }
};

// kWhole: all rows of all operands are contiguous, aligned and whole chunks.
template <typename Op, bool kWhole>
__global__ void __launch_bounds__(kRowThreads) move_rows_kernel(const __grid_constant__ RowArgs args, const Op op) {
  using E = typename Op::Element;
  constexpr int kCount = Chunk<E>::kCount, kUnroll = kRowUnroll<Op, kWhole>;
  Chunk<E> x[kUnroll], y[kUnroll];
  char* out[kUnroll];
  int first[kUnroll], last[kUnroll];
  const bool contiguous = args.out_step == sizeof(E);

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const RowChunk chunk(args, (blockIdx.x * kUnroll + u) * kRowThreads + threadIdx.x);
    if constexpr (kWhole) {
      const int64_t offset = int64_t(chunk.j) * kChunkBytes;
      first[u] = 0, last[u] = chunk.exists ? kCount : 0;
      out[u] = chunk.out + offset;
      x[u] = load_aligned<E>(chunk.x + offset);
      if (Op::kIsSum) y[u] = load_aligned<E>(chunk.y + offset);
    } else {
      // Chunks are aligned in the output: the first one may begin before its row.
      const int64_t begin = int64_t(chunk.j) * kCount - (contiguous ? phase_bytes(chunk.out) / sizeof(E) : 0);
      first[u] = begin < 0 ? int(-begin) : 0;
      last[u] = chunk.exists ? int(min(int64_t(kCount), args.row_length - begin)) : 0;
      if (last[u] <= first[u]) continue;
      out[u] = chunk.out + begin * args.out_step;
      x[u] = load_chunk<E>(chunk.x + begin * args.x_step, args.x_step, first[u], last[u], args.x_extent);
      if (Op::kIsSum) y[u] = load_chunk<E>(chunk.y + begin * args.y_step, args.y_step, first[u], last[u], args.y_extent);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (last[u] <= first[u]) continue;
    op.apply(x[u].v, y[u].v, false);
    if constexpr (kWhole) store_aligned(out[u], x[u]);
    else store_chunk(out[u], args.out_step, first[u], last[u], contiguous, x[u]);
  }
}

template <typename Op>
cudaError_t launch_rows(const Plan& plan, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  const int w = p.element_bytes;
  const int64_t count = kChunkBytes / w;
  RowArgs args;
  args.out = p.data[kOut];
  args.x = p.data[kX];
  args.y = p.data[kY];
  args.x_extent = {args.x, args.x + p.extent_bytes(kX)};
  args.y_extent = {args.y, args.y + p.extent_bytes(kY)};
  args.out_step = p.strides[kOut][0] * w;
  args.x_step = p.strides[kX][0] * w;
  args.y_step = p.strides[kY][0] * w;
  args.row_length = p.sizes[0];
  int64_t rows = 1;
  for (int d = 1; d < p.rank; ++d) {
    args.rows.push(p, d, kX, kY);
    rows *= p.sizes[d];
  }
  const int64_t before = row_address_bits(p, kOut) % kChunkBytes ? count - 1 : 0;  // elements of the first chunk before its row, at most
  const int64_t per_row = ceil_div(before + p.sizes[0], count);
  args.chunks_per_row = FastDiv(uint32_t(per_row));
  args.chunks = uint32_t(per_row * rows);
  const auto launch = [&](auto kernel, int unroll) {
    kernel<<<unsigned(ceil_div(args.chunks, kRowThreads * unroll)), kRowThreads, 0, stream>>>(args, op);
    return cudaGetLastError();
  };
  return rows_are_whole(p) ? launch(move_rows_kernel<Op, true>, kRowUnroll<Op, true>)
                           : launch(move_rows_kernel<Op, false>, kRowUnroll<Op, false>);
}

}  // namespace fusebackend::tile
