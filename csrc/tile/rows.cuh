// Rows: every thread makes aligned 16-byte chunks of the output's innermost dimension. Inputs that are contiguous there are read in
// (shifted) chunks, broadcast ones once, others element by element: with that, this is also the route that is always right.
#pragma once

#include "batch.cuh"
#include "chunks.cuh"
#include "ops.cuh"
#include "cuda_plan.h"

namespace fusebackend::tile {

constexpr int kRowThreads = 256;
// Chunks a thread, all loaded before the first is stored; of whole rows that are only copied, as in any copy, one.
template <typename Op, bool kWhole>
constexpr int kRowUnroll = kWhole && !Op::kBinary ? 1 : 2;

struct RowArgs {
  char* out;
  const char* a;
  const char* b;
  Extent a_extent, b_extent;
  int64_t out_step, a_step, b_step;  // bytes between neighbours in a row
  int64_t row_length;
  uint32_t chunks;  // in all rows
  FastDiv chunks_per_row;
  Batch rows;
};

// A thread's u-th chunk: its row's pointers and its place in the row.
struct RowPlace {
  char* out;
  const char* a;
  const char* b;
  uint32_t j;
  bool exists;

  // `turn` counts kRowThreads chunks each.
  __device__ RowPlace(const RowArgs& args, uint32_t turn) : out(args.out), a(args.a), b(args.b) {
    const uint32_t chunk = turn * kRowThreads + threadIdx.x;
    exists = chunk < args.chunks;
    uint32_t row;
    args.chunks_per_row.divmod(exists ? chunk : 0, row, j);
    args.rows.advance(row, out, a, b);
  }
};

// kWhole: all rows are whole aligned chunks, in every operand.
template <typename Op, bool kWhole>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(const __grid_constant__ RowArgs args, const Op op) {
  using E = typename Op::Element;
  constexpr int kCount = Chunk<E>::kCount, kUnroll = kRowUnroll<Op, kWhole>;
  Chunk<E> a[kUnroll], b[kUnroll];
  char* out[kUnroll];
  int first[kUnroll], last[kUnroll];
  const bool contiguous = args.out_step == sizeof(E);

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const RowPlace place(args, blockIdx.x * kUnroll + u);
    if constexpr (kWhole) {
      const int64_t offset = int64_t(place.j) * kChunkBytes;
      first[u] = 0, last[u] = place.exists ? kCount : 0;
      out[u] = place.out + offset;
      a[u] = load_aligned<E>(place.a + offset);
      if (Op::kBinary) b[u] = load_aligned<E>(place.b + offset);
    } else {
      // Chunks are aligned in the output: the first of a row may begin before it.
      const int64_t begin = int64_t(place.j) * kCount - (contiguous ? phase_bytes(place.out) / sizeof(E) : 0);
      first[u] = begin < 0 ? int(-begin) : 0;
      last[u] = place.exists ? int(min(int64_t(kCount), args.row_length - begin)) : 0;
      if (last[u] <= first[u]) continue;
      out[u] = place.out + begin * args.out_step;
      a[u] = load_chunk<E>(place.a + begin * args.a_step, args.a_step, first[u], last[u], args.a_extent);
      if (Op::kBinary) b[u] = load_chunk<E>(place.b + begin * args.b_step, args.b_step, first[u], last[u], args.b_extent);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (last[u] <= first[u]) continue;
    op.apply(a[u].v, b[u].v, false);
    if constexpr (kWhole) store_aligned(out[u], a[u]);
    else store_chunk(out[u], args.out_step, first[u], last[u], contiguous, a[u]);
  }
}

template <typename Op>
cudaError_t launch_rows(const Plan& plan, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  const int w = p.element_bytes;
  const int64_t count = kChunkBytes / w;
  RowArgs args;
  args.out = p.data[kOut];
  args.a = p.data[kA];
  args.b = p.data[kB];
  args.a_extent = {args.a, args.a + extent_bytes(p, kA)};
  args.b_extent = {args.b, args.b + extent_bytes(p, kB)};
  args.out_step = p.strides[kOut][0] * w;
  args.a_step = p.strides[kA][0] * w;
  args.b_step = p.strides[kB][0] * w;
  args.row_length = p.sizes[0];
  int64_t rows = 1;
  for (int d = 1; d < p.rank; ++d) {
    args.rows.push(p, d);
    rows *= p.sizes[d];
  }
  const bool aligned = is_aligned(p, kOut), whole = rows_are_whole(p);
  const int64_t per_row = (p.sizes[0] + (aligned ? 0 : count - 1) + count - 1) / count;
  args.chunks_per_row = FastDiv(uint32_t(per_row));
  args.chunks = uint32_t(per_row * rows);
  const auto blocks = [&](int unroll) { return unsigned((args.chunks + kRowThreads * unroll - 1) / (kRowThreads * unroll)); };
  if (whole) rows_kernel<Op, true><<<blocks(kRowUnroll<Op, true>), kRowThreads, 0, stream>>>(args, op);
  else rows_kernel<Op, false><<<blocks(kRowUnroll<Op, false>), kRowThreads, 0, stream>>>(args, op);
  return cudaGetLastError();
}

}  // namespace fusebackend::tile
