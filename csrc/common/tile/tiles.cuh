// Tiles: one input (or two of the same strides) is contiguous along a dimension q that is not the output's innermost one, o. A block carries
// a tile of o x q through shared memory: it reads 16-byte chunks along q and writes chunks along o. The other input of a sum, which lies in
// the output's order, is read where the output is written, its loads issued before the tile is waited for.
//
// Shared memory holds one row for each o. Rows are skewed by 16 bytes every kCount of them, so that a warp that gathers 8 chunks of o x 4
// words of q meets every bank once.
//
// Nothing needs to be aligned. Rows of a misaligned input are read from the aligned chunk that holds their first element on, and lie in
// shared memory with that shift. Rows of a misaligned output are cut at their own aligned sectors, for which a tile has a few more rows in
// front (kHalo).
#pragma once

#include "common/tile/batch.cuh"
#include "common/tile/chunks.cuh"
#include "common/tile/elements.cuh"
#include "common/tile/route.h"

namespace fusebackend::tile {

template <int W, bool kIsSum, bool kShiftIn, bool kShiftOut>
struct TileShape {
  static constexpr int kO = tile_o(W, kIsSum, kShiftOut), kQ = tile_q(W);
  static constexpr int kThreads = kO * kQ * W / 64;  // each moves 64 bytes of the tile
  // Blocks that are to share a multiprocessor: the compiler limits registers accordingly. Small elements need more registers.
  static constexpr int kBlocks = kIsSum ? (kThreads > 256 || W == 1 ? 2 : W == 2 ? 4 : 5) : (W == 1 ? 3 : 6);
  static constexpr int kCount = kChunkBytes / W;  // elements a chunk
  static constexpr int kOutChunks = kO / kCount, kInChunks = kQ / kCount;
  // Rows in front of the tile's own: a sector that two blocks write in part costs several times its bytes.
  static constexpr int kHalo = kShiftOut ? kSectorBytes / W - 1 : 0;
  static constexpr int kRows = kO + kHalo;
  static constexpr int kRowChunks = kInChunks + (kShiftIn ? 1 : 0);
  static constexpr int kPitch = kRowChunks * kChunkBytes;
  static constexpr int kBytes = kRows * kPitch + (kRows / kCount + 1) * kChunkBytes;
  static_assert((kCount * kPitch / kChunkBytes + 1) % 2 == 1, "the skew must reach all banks");

  // On the way out a thread gathers one chunk in each of kGroup columns at a time, together as 4-byte words. Neighbouring threads take
  // neighbouring chunks (128 bytes), then columns. In a pass every thread does so once; kBandPasses passes cover all columns of 8 chunks.
  static constexpr int kGroup = W < 4 && !kShiftIn && !kShiftOut ? 4 / W : 1;
  static constexpr int kLanes = 8;
  static constexpr int kPassColumns = kThreads / kLanes * kGroup;
  static constexpr int kBandPasses = kQ / kPassColumns;
  static constexpr int kPasses = kOutChunks / kLanes * kBandPasses;
  static_assert(kOutChunks % kLanes == 0 && kQ % kPassColumns == 0);
  static_assert(!kShiftOut || kPassColumns * W % kSectorBytes == 0, "all of a thread's columns begin at the same place within a sector");

  __host__ __device__ static constexpr int row_offset(int row) { return row * kPitch + row / kCount * kChunkBytes; }
};

struct TileArgs {
  char* out;
  const char* staged;   // read through shared memory
  const char* partner;  // the second input of a staged pair, or null
  const char* direct;   // read in the output's order, or null
  Extent staged_extent, direct_extent;
  int64_t o_size, q_size;
  int64_t staged_o, staged_q, direct_o, direct_q, out_q;  // bytes between neighbours; along o the output is contiguous
  bool staged_is_y;
  bool direct_is_aligned;    // wherever the output has an aligned chunk, so has the direct input
  bool staged_by_halves;     // rows of the staged input are aligned to half a chunk only
  bool staged_shares_lines;  // neighbouring tiles of one of its rows may lie in one cache line
  bool q_first;              // neighbouring blocks follow the staged input's rows, not the output's
  FastDiv o_tiles, q_tiles;
  Batch batch;  // first: the staged input (and its partner); second: the direct one
};

// One block's tile. All pointers are at its q = 0 and at o = 0 of the tensor.
template <typename Op, bool kShiftIn, bool kShiftOut>
struct Tile {
  using E = typename Op::Element;
  static constexpr int W = sizeof(E);
  using Shape = TileShape<W, Op::kIsSum, kShiftIn, kShiftOut>;
  static constexpr int kCount = Shape::kCount;

  const TileArgs& args;
  const Op& op;
  char* shared;
  char* out;
  const char* staged;
  const char* direct;
  int64_t o0;   // of the first row; negative in the halo of the first tile
  int q_count;  // columns in range

  // The first chunk along o and the first column along q of a thread in a pass.
  static __device__ int chunk_of(int pass) { return threadIdx.x % Shape::kLanes + pass / Shape::kBandPasses * Shape::kLanes; }
  static __device__ int column_of(int pass) {
    return threadIdx.x / Shape::kLanes * Shape::kGroup + pass % Shape::kBandPasses * Shape::kPassColumns;
  }
  // The row of the tile in which the first element of chunk 0 of column q lies.
  __device__ int first_row(int q) const { return Shape::kHalo - (kShiftOut ? int(phase_bytes<kSectorBytes>(out + q * args.out_q)) / W : 0); }
  __device__ int in_shift(int row) const { return kShiftIn ? int(phase_bytes(staged + (o0 + row) * args.staged_o)) : 0; }

  __device__ void copy_chunk(char* to, const char* from) const {
    if (kShiftIn || !args.staged_by_halves) return cp_async_16(to, from);
    cp_async_8(to, from);
    cp_async_8(to + 8, from + 8);
  }

  // Through registers: an asynchronous copy asks L2 twice for a line that crosses lines of shared memory.
  // kAllRows, kAllColumns: all of the tile are in range.
  template <bool kAllRows, bool kAllColumns>
  __device__ void load_rows() const {
    constexpr int kChunks = Shape::kRows * Shape::kRowChunks, kIterations = (kChunks + Shape::kThreads - 1) / Shape::kThreads;
    uint4 raw[kIterations];
    bool skip[kIterations];
#pragma unroll
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      const unsigned i = iteration * Shape::kThreads + threadIdx.x;
      skip[iteration] = kChunks % Shape::kThreads && i >= kChunks;
      if (skip[iteration]) continue;
      const int row = i / Shape::kRowChunks, j = i % Shape::kRowChunks;
      if (!kAllRows && (o0 + row < 0 || o0 + row >= args.o_size)) {
        skip[iteration] = true;
        continue;
      }
      const char* from = staged + (o0 + row) * args.staged_o;
      const int q = j * kChunkBytes - (kShiftIn ? int(phase_bytes(from)) : 0);
      skip[iteration] = q >= (kAllColumns ? Shape::kQ : q_count) * W;
      if (skip[iteration]) continue;
      from += q;
      if (kShiftIn || !args.staged_by_halves) {
        raw[iteration] = load_raw(from);
      } else {
        const uint2 lo = *reinterpret_cast<const uint2*>(from), hi = *reinterpret_cast<const uint2*>(from + 8);
        raw[iteration] = make_uint4(lo.x, lo.y, hi.x, hi.y);
      }
    }
#pragma unroll
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      const unsigned i = iteration * Shape::kThreads + threadIdx.x;
      const int row = i / Shape::kRowChunks, j = i % Shape::kRowChunks;
      if (!skip[iteration]) *reinterpret_cast<uint4*>(shared + Shape::row_offset(row) + j * kChunkBytes) = raw[iteration];
    }
  }

  // At an end of the input, where chunks may be out of range too.
  __device__ void load_edge() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < Shape::kRows * Shape::kRowChunks; i += Shape::kThreads) {
      const int row = i / Shape::kRowChunks, j = i % Shape::kRowChunks;
      const int64_t o = o0 + row;
      if (o < 0 || o >= args.o_size) continue;
      const char* from = staged + o * args.staged_o;
      const int shift = kShiftIn ? phase_bytes(from) / W : 0;
      const int q = j * kCount - shift;  // of the chunk's first element
      if (q >= q_count) continue;
      char* to = shared + Shape::row_offset(row) + j * kChunkBytes;
      from += q * W;
      if (kShiftIn ? args.staged_extent.holds(from, kChunkBytes) : q + kCount <= q_count) {
        copy_chunk(to, from);
      } else {
#pragma unroll 1
        for (int e = max(0, -q); e < min(kCount, q_count - q); ++e) reinterpret_cast<E*>(to)[e] = reinterpret_cast<const E*>(from)[e];
      }
    }
    cp_async_commit();
  }

  // Element by element: for inputs that are not contiguous along q, and for pairs, whose sum is staged.
  __device__ void load_elements() const {
#pragma unroll 4
    for (int i = threadIdx.x; i < Shape::kRows * Shape::kQ; i += Shape::kThreads) {
      const int row = i / Shape::kQ, q = i % Shape::kQ;
      const int64_t o = o0 + row;
      if (o < 0 || o >= args.o_size || q >= q_count) continue;
      const char* from = staged + o * args.staged_o + q * args.staged_q;
      E value = *reinterpret_cast<const E*>(from);
      if constexpr (Op::kIsSum) {
        if (args.partner) value = op(value, *reinterpret_cast<const E*>(from + (args.partner - args.staged)));
      }
      *reinterpret_cast<E*>(shared + Shape::row_offset(row) + in_shift(row) + q * W) = value;
    }
  }

  // The addresses of the elements of chunk 0 in the thread's first column. Its other chunks and columns are at constant distances.
  __device__ void find_elements(const char* (&elements)[kCount]) const {
    const int row0 = first_row(column_of(0)) + chunk_of(0) * kCount;
#pragma unroll
    for (int k = 0; k < kCount; ++k) elements[k] = shared + Shape::row_offset(row0 + k) + in_shift(row0 + k) + column_of(0) * W;
  }

  __device__ void gather(const char* const (&elements)[kCount], int pass, Chunk<E> (&chunks)[Shape::kGroup]) const {
    const int band = pass / Shape::kBandPasses, offset_q = pass % Shape::kBandPasses * Shape::kPassColumns * W;
    const int offset = Shape::row_offset(band * Shape::kLanes * kCount) + offset_q;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      struct alignas(W * Shape::kGroup) Word {
        E v[Shape::kGroup];
      };
      const Word word = *reinterpret_cast<const Word*>(elements[k] + offset);
#pragma unroll
      for (int g = 0; g < Shape::kGroup; ++g) chunks[g].v[k] = word.v[g];
    }
  }

  // Moves a tile whose rows are all in range. kDirect: there is a direct input, and it has an aligned chunk for each of the output's.
  // kAllColumns: as in load_rows.
  template <bool kDirect, bool kAllColumns>
  __device__ void run_interior() const {
    const int columns = kAllColumns ? Shape::kQ : q_count;
    Chunk<E> direct_chunks[kDirect ? Shape::kPasses : 1][Shape::kGroup];
    const int64_t first_o = o0 + first_row(column_of(0)) + chunk_of(0) * kCount;
    const auto at = [&](auto* base, int64_t stride_q, int pass, int g) {
      return base + first_o * W + pass / Shape::kBandPasses * Shape::kLanes * kChunkBytes + (column_of(pass) + g) * stride_q;
    };
    if constexpr (kDirect) {
#pragma unroll
      for (int pass = 0; pass < Shape::kPasses; ++pass)
#pragma unroll
        for (int g = 0; g < Shape::kGroup; ++g)
          if (column_of(pass) + g < columns) direct_chunks[pass][g] = load_aligned<E>(at(direct, args.direct_q, pass, g));
    }
    load_rows<true, kAllColumns>();  // after the direct input's loads, which the compiler would else move behind the wait
    const char* elements[kCount];
    find_elements(elements);
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      Chunk<E> chunks[Shape::kGroup];
      gather(elements, pass, chunks);
#pragma unroll
      for (int g = 0; g < Shape::kGroup; ++g) {
        if (column_of(pass) + g >= columns) break;
        if constexpr (kDirect) op.apply(chunks[g].v, direct_chunks[pass][g].v, args.staged_is_y);
        store_aligned(at(out, args.out_q, pass, g), chunks[g]);
      }
    }
  }

  __device__ void store_edge() const {
    const char* elements[kCount];
    find_elements(elements);
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      const int column = column_of(pass);
      const int64_t o = o0 + first_row(column_of(0)) + chunk_of(pass) * kCount;
      const int first = o < 0 ? int(-o) : 0, last = int(min(int64_t(kCount), args.o_size - o));
      if (column >= q_count || first >= last) continue;
      Chunk<E> chunks[Shape::kGroup];
      gather(elements, pass, chunks);
#pragma unroll
      for (int g = 0; g < Shape::kGroup; ++g) {
        const int q = column + g;
        if (q >= q_count) break;
        if constexpr (Op::kIsSum) {
          if (args.direct) {
            const char* from = direct + q * args.direct_q + o * args.direct_o;
            const Chunk<E> direct_chunk = load_chunk<E>(from, args.direct_o, first, last, args.direct_extent);
            op.apply(chunks[g].v, direct_chunk.v, args.staged_is_y);
          }
        }
        char* const to = out + q * args.out_q + o * W;
        if constexpr (Op::kIsSum) store_chunk(to, W, first, last, true, chunks[g]);  // in few registers
        else store_part<0, kChunkBytes, W>(to, reinterpret_cast<const uint32_t(&)[4]>(chunks[g]), first * W, last * W);
      }
    }
  }

  __device__ void run() const {
    const bool chunked = args.staged_q == W && args.partner == nullptr;
    const int64_t first_row = max(o0, int64_t(0)), last_row = min(o0 + Shape::kRows, args.o_size) - 1;
    // Whether all chunks that hold elements of the row lie within the operand.
    const auto holds_row = [&](int64_t row) {
      const char* const first = staged + row * args.staged_o;
      const int shift = kShiftIn ? int(phase_bytes(first)) : 0;
      return args.staged_extent.holds(first - shift, (shift + q_count * W + kChunkBytes - 1) / kChunkBytes * kChunkBytes);
    };
    const bool inside = chunked && holds_row(first_row) && holds_row(last_row);
    if (inside && last_row - first_row == Shape::kRows - 1) {
      const bool whole = q_count == Shape::kQ;
      if constexpr (!Op::kIsSum) return whole ? run_interior<false, true>() : run_interior<false, false>();
      else if (args.direct_is_aligned && whole) return run_interior<true, true>();
    }
    if (inside && !Op::kIsSum) {  // sums have no registers to spare for it
      load_rows<false, false>();
    } else if (chunked) {
      load_edge();
    } else {
      load_elements();
    }
    store_edge();
  }
};

template <typename Op, bool kShiftIn, bool kShiftOut>
__global__ void __launch_bounds__(Tile<Op, kShiftIn, kShiftOut>::Shape::kThreads, Tile<Op, kShiftIn, kShiftOut>::Shape::kBlocks)
    move_tiles_kernel(const __grid_constant__ TileArgs args, const Op op) {
  using T = Tile<Op, kShiftIn, kShiftOut>;
  extern __shared__ __align__(16) char shared[];
  // Neighbouring blocks follow the output's rows: scattered writes cost DRAM far more than scattered reads do; unless a row of the input is
  // few tiles, which share cache lines. The last tiles go first: those that are not full take longest, and would run alone at the end.
  const uint32_t tile_index = gridDim.x - 1 - blockIdx.x;
  uint32_t rest, o_tile, q_tile, item;
  if (args.q_first) {
    args.q_tiles.divmod(tile_index, rest, q_tile);
    args.o_tiles.divmod(rest, item, o_tile);
  } else {
    args.o_tiles.divmod(tile_index, rest, o_tile);
    args.q_tiles.divmod(rest, item, q_tile);
  }
  const char* staged = args.staged;
  const char* direct = args.direct;
  char* out = args.out;
  args.batch.advance(item, out, staged, direct);
  const int64_t q0 = int64_t(q_tile) * T::Shape::kQ;
  const T tile{args, op, shared, out + q0 * args.out_q, staged + q0 * args.staged_q, direct + q0 * args.direct_q,
               int64_t(o_tile) * T::Shape::kO - T::Shape::kHalo, int(min(int64_t(T::Shape::kQ), args.q_size - q0))};
  tile.run();
}

}  // namespace fusebackend::tile
