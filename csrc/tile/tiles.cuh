// Tiles: one input (or two in the same order) is contiguous along a dimension `q` that is not the output's innermost one, `o`.
// A block carries a tile of o x q through shared memory: read in 16-byte chunks along q, written in chunks along o. Another input that
// lies in output order is read beside the stores, its loads issued before the tile is waited for.
//
// Shared memory holds one row an o, skewed by 16 bytes every `kCount` rows, so that a warp that gathers 8 chunks of o x 4 words of q
// meets every bank once.
//
// Nothing need be aligned. Rows of a misaligned input are read from the aligned chunk that holds their first element, and remember that
// shift; rows of a misaligned output are cut at their own aligned sectors, for which the tile has a few more rows in front.
#pragma once

#include "batch.cuh"
#include "chunks.cuh"
#include "cuda_plan.h"
#include "ops.cuh"

namespace fusebackend::tile {

constexpr int64_t kFewTiles = 8;  // of an input's row: blocks under way at once cover many rows
constexpr int kPhaseBytes = 32;  // a sector: two blocks that write parts of one cost several times the bytes

template <int W, bool kIsSum, bool kShiftIn, bool kShiftOut>
struct TileShape {
  static constexpr int kO = tile_o(W, kIsSum, kShiftOut), kQ = tile_q(W);
  static constexpr int kThreads = kO * kQ * W / 64;  // bytes of the tile that a thread moves
  // Blocks that shall share a multiprocessor, by which the compiler limits registers; small elements need more of them.
  static constexpr int kBlocks = kIsSum ? (kThreads > 256 || W == 1 ? 2 : W == 2 ? 4 : 5) : (W == 1 ? 3 : 6);
  static constexpr int kCount = kChunkBytes / W;  // elements a chunk
  static constexpr int kOutChunks = kO / kCount, kInChunks = kQ / kCount;
  static constexpr int kHalo = kShiftOut ? kPhaseBytes / W - 1 : 0;  // rows in front
  static constexpr int kRows = kO + kHalo;
  static constexpr int kRowChunks = kInChunks + (kShiftIn ? 1 : 0);
  static constexpr int kPitch = kRowChunks * kChunkBytes;
  static constexpr int kBytes = kRows * kPitch + (kRows / kCount + 1) * kChunkBytes;
  static_assert((kCount * kPitch / kChunkBytes + 1) % 2 == 1, "the skew must reach all banks");

  // Out: a unit is one chunk in each of kGroup columns, which are gathered together as 4-byte words. Neighbouring threads take
  // neighbouring chunks (128 bytes), then columns; a pass is a unit a thread; kBandPasses passes cover all columns of 8 chunks.
  static constexpr int kGroup = W < 4 && !kShiftIn && !kShiftOut ? 4 / W : 1;
  static constexpr int kLanes = 8;
  static constexpr int kPassColumns = kThreads / kLanes * kGroup;
  static constexpr int kBandPasses = kQ / kPassColumns;
  static constexpr int kPasses = kOutChunks / kLanes * kBandPasses;
  static_assert(kOutChunks % kLanes == 0 && kQ % kPassColumns == 0);
  static_assert(!kShiftOut || kPassColumns * W % kPhaseBytes == 0, "all of a thread's columns share their phases");

  __host__ __device__ static constexpr int row_offset(int row) { return row * kPitch + row / kCount * kChunkBytes; }
};

struct TileArgs {
  char* out;
  const char* staged;   // through the tile
  const char* partner;  // the second input of a staged pair, or null
  const char* direct;   // read in output order, or null
  Extent staged_extent, direct_extent;
  int64_t o_size, q_size;
  int64_t staged_o, staged_q, direct_o, direct_q, out_q;  // bytes between neighbours; along o the output is contiguous
  bool staged_is_b;
  bool direct_is_wide;  // wherever the output has an aligned chunk, so has the direct input
  bool by_halves;  // rows of the input are aligned to half a chunk only
  bool shares_lines;  // neighbouring tiles of an input's row may
  bool along_q;       // blocks first follow the input's rows
  FastDiv o_tiles, q_tiles;
  Batch batch;  // by Role: kA is staged (and its partner), kB direct
};

// One block's tile. All pointers are at its q = 0 and at o = 0 of the tensor.
template <typename Op, bool kShiftIn, bool kShiftOut>
struct Tile {
  using E = typename Op::Element;
  static constexpr int W = sizeof(E);
  using Shape = TileShape<W, Op::kBinary, kShiftIn, kShiftOut>;
  static constexpr int kCount = Shape::kCount;

  const TileArgs& args;
  const Op& op;
  char* shared;
  char* out;
  const char* staged;
  const char* direct;
  int64_t o0;   // of the first row; negative in the halo of the first tile
  int q_count;  // columns in range

  // A thread's unit in a pass.
  static __device__ int chunk_of(int pass) { return threadIdx.x % Shape::kLanes + pass / Shape::kBandPasses * Shape::kLanes; }
  static __device__ int column_of(int pass) {
    return threadIdx.x / Shape::kLanes * Shape::kGroup + pass % Shape::kBandPasses * Shape::kPassColumns;
  }
  // The tile's row of the first element of chunk 0 in column q.
  __device__ int first_row(int q) const { return Shape::kHalo - (kShiftOut ? int(phase_bytes<kPhaseBytes>(out + q * args.out_q)) / W : 0); }
  __device__ int in_shift(int row) const { return kShiftIn ? int(phase_bytes(staged + (o0 + row) * args.staged_o)) : 0; }

  __device__ void copy_chunk(char* to, const char* from) const {
    if (kShiftIn || !args.by_halves) return cp_async_16(to, from);
    cp_async_8(to, from);
    cp_async_8(to + 8, from + 8);
  }

  // By way of registers: an asynchronous copy asks L2 twice for a line whose place crosses lines of shared memory.
  // kAllRows, kAllColumns: those of the tile are in range.
  template <bool kAllRows, bool kAllColumns>
  __device__ void load_rows() const {
    constexpr int kChunks = Shape::kRows * Shape::kRowChunks, kTurns = (kChunks + Shape::kThreads - 1) / Shape::kThreads;
    uint4 raw[kTurns];
    bool skip[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const unsigned i = turn * Shape::kThreads + threadIdx.x;
      skip[turn] = kChunks % Shape::kThreads && i >= kChunks;
      if (skip[turn]) continue;
      const int row = i / Shape::kRowChunks, j = i % Shape::kRowChunks;
      if (!kAllRows && (o0 + row < 0 || o0 + row >= args.o_size)) {
        skip[turn] = true;
        continue;
      }
      const char* from = staged + (o0 + row) * args.staged_o;
      const int q = j * kChunkBytes - (kShiftIn ? int(phase_bytes(from)) : 0);
      skip[turn] = q >= (kAllColumns ? Shape::kQ : q_count) * W;
      if (skip[turn]) continue;
      from += q;
      if (kShiftIn || !args.by_halves) {
        raw[turn] = load_raw(from);
      } else {
        const uint2 lo = *reinterpret_cast<const uint2*>(from), hi = *reinterpret_cast<const uint2*>(from + 8);
        raw[turn] = make_uint4(lo.x, lo.y, hi.x, hi.y);
      }
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const unsigned i = turn * Shape::kThreads + threadIdx.x;
      const int row = i / Shape::kRowChunks, j = i % Shape::kRowChunks;
      if (!skip[turn]) *reinterpret_cast<uint4*>(shared + Shape::row_offset(row) + j * kChunkBytes) = raw[turn];
    }
  }

  // At an end of the input: chunks may be out of range too.
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

  // For inputs that are not contiguous along q, and for pairs: element by element, unshifted.
  __device__ void load_elements() const {
#pragma unroll 4
    for (int i = threadIdx.x; i < Shape::kRows * Shape::kQ; i += Shape::kThreads) {
      const int row = i / Shape::kQ, q = i % Shape::kQ;
      const int64_t o = o0 + row;
      if (o < 0 || o >= args.o_size || q >= q_count) continue;
      const char* from = staged + o * args.staged_o + q * args.staged_q;
      E value = *reinterpret_cast<const E*>(from);
      if constexpr (Op::kBinary) {
        if (args.partner) {  // a pair is staged as a and b
          value = op(value, *reinterpret_cast<const E*>(from + (args.partner - args.staged)));
        }
      }
      *reinterpret_cast<E*>(shared + Shape::row_offset(row) + in_shift(row) + q * W) = value;
    }
  }

  // Where the elements of chunk 0 in the thread's first column lie. Its other chunks and columns are a constant away from there.
  __device__ void find_places(const char* (&place)[kCount]) const {
    const int row0 = first_row(column_of(0)) + chunk_of(0) * kCount;
#pragma unroll
    for (int k = 0; k < kCount; ++k) place[k] = shared + Shape::row_offset(row0 + k) + in_shift(row0 + k) + column_of(0) * W;
  }

  __device__ void gather(const char* const (&place)[kCount], int pass, Chunk<E> (&chunks)[Shape::kGroup]) const {
    const int band = pass / Shape::kBandPasses, offset_q = pass % Shape::kBandPasses * Shape::kPassColumns * W;
    const int offset = Shape::row_offset(band * Shape::kLanes * kCount) + offset_q;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      struct alignas(W * Shape::kGroup) Word {
        E v[Shape::kGroup];
      };
      const Word word = *reinterpret_cast<const Word*>(place[k] + offset);
#pragma unroll
      for (int g = 0; g < Shape::kGroup; ++g) chunks[g].v[k] = word.v[g];
    }
  }

  // A tile whose rows are all in range. kDirect: there is a direct input, and it has an aligned chunk for each of the output's.
  // kAllColumns: as in load_rows.
  template <bool kDirect, bool kAllColumns>
  __device__ void run_interior() const {
    const int columns = kAllColumns ? Shape::kQ : q_count;
    Chunk<E> beside[kDirect ? Shape::kPasses : 1][Shape::kGroup];
    const int64_t first_o = o0 + first_row(column_of(0)) + chunk_of(0) * kCount;
    const auto at = [&](auto* base, int64_t stride_q, int pass, int g) {
      return base + first_o * W + pass / Shape::kBandPasses * Shape::kLanes * kChunkBytes + (column_of(pass) + g) * stride_q;
    };
    if constexpr (kDirect) {
#pragma unroll
      for (int pass = 0; pass < Shape::kPasses; ++pass)
#pragma unroll
        for (int g = 0; g < Shape::kGroup; ++g)
          if (column_of(pass) + g < columns) beside[pass][g] = load_aligned<E>(at(direct, args.direct_q, pass, g));
    }
    load_rows<true, kAllColumns>();  // after the direct input's: the compiler would move those behind the wait
    const char* place[kCount];
    find_places(place);
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      Chunk<E> chunks[Shape::kGroup];
      gather(place, pass, chunks);
#pragma unroll
      for (int g = 0; g < Shape::kGroup; ++g) {
        if (column_of(pass) + g >= columns) break;
        if constexpr (kDirect) op.apply(chunks[g].v, beside[pass][g].v, args.staged_is_b);
        store_aligned(at(out, args.out_q, pass, g), chunks[g]);
      }
    }
  }

  __device__ void store_edge() const {
    const char* place[kCount];
    find_places(place);
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      const int column = column_of(pass);
      const int64_t o = o0 + first_row(column_of(0)) + chunk_of(pass) * kCount;
      const int first = o < 0 ? int(-o) : 0, last = int(min(int64_t(kCount), args.o_size - o));
      if (column >= q_count || first >= last) continue;
      Chunk<E> chunks[Shape::kGroup];
      gather(place, pass, chunks);
#pragma unroll
      for (int g = 0; g < Shape::kGroup; ++g) {
        const int q = column + g;
        if (q >= q_count) break;
        if constexpr (Op::kBinary) {
          if (args.direct) {
            const char* from = direct + q * args.direct_q + o * args.direct_o;
            const Chunk<E> beside = load_chunk<E>(from, args.direct_o, first, last, args.direct_extent);
            op.apply(chunks[g].v, beside.v, args.staged_is_b);
          }
        }
        char* const to = out + q * args.out_q + o * W;
        if constexpr (Op::kBinary) store_chunk(to, W, first, last, true, chunks[g]);  // in few registers
        else store_part<0, kChunkBytes, W>(to, reinterpret_cast<const uint32_t(&)[4]>(chunks[g]), first * W, last * W);
      }
    }
  }

  __device__ void run() const {
    const bool chunked = args.staged_q == W && args.partner == nullptr;
    const int64_t first_row = max(o0, int64_t(0)), last_row = min(o0 + Shape::kRows, args.o_size) - 1;
    // Chunks begin at the aligned one that holds a row's first element, and end at the one that holds its last.
    const auto holds_row = [&](int64_t row) {
      const char* const first = staged + row * args.staged_o;
      const int shift = kShiftIn ? int(phase_bytes(first)) : 0;
      return args.staged_extent.holds(first - shift, (shift + q_count * W + kChunkBytes - 1) / kChunkBytes * kChunkBytes);
    };
    const bool inside = chunked && holds_row(first_row) && holds_row(last_row);
    if (inside && last_row - first_row == Shape::kRows - 1) {
      const bool whole = q_count == Shape::kQ;
      if constexpr (!Op::kBinary) return whole ? run_interior<false, true>() : run_interior<false, false>();
      else if (args.direct_is_wide && whole) return run_interior<true, true>();
    }
    if (inside && !Op::kBinary) {  // (It would take registers that sums need.)
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
    tiles_kernel(const __grid_constant__ TileArgs args, const Op op) {
  using T = Tile<Op, kShiftIn, kShiftOut>;
  extern __shared__ __align__(16) char shared[];
  // Neighbouring blocks follow the output to the end of its rows: DRAM minds scattered writes far more than scattered reads, unless
  // few tiles make a row of the input and share lines of it.
  // The last tiles go first: those that are not full take longest, and nothing would run beside them at the end.
  const uint32_t tile_index = gridDim.x - 1 - blockIdx.x;
  uint32_t rest, o_tile, q_tile, item;
  if (args.along_q) {
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

template <typename Op, bool kShiftIn, bool kShiftOut>
cudaError_t launch_tiles_as(TileArgs args, int64_t items, Op op, cudaStream_t stream) {
  using Shape = typename Tile<Op, kShiftIn, kShiftOut>::Shape;
  const int64_t o_tiles = (args.o_size + Shape::kHalo + Shape::kO - 1) / Shape::kO;
  const int64_t q_tiles = (args.q_size + Shape::kQ - 1) / Shape::kQ;
  args.o_tiles = FastDiv(uint32_t(o_tiles));
  args.q_tiles = FastDiv(uint32_t(q_tiles));
  args.along_q = args.shares_lines && q_tiles <= kFewTiles;
  tiles_kernel<Op, kShiftIn, kShiftOut><<<unsigned(o_tiles * q_tiles * items), Shape::kThreads, Shape::kBytes, stream>>>(args, op);
  return cudaGetLastError();
}

template <typename Op>
cudaError_t launch_tiles(const Plan& plan, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes, q = plan.staged_dim;
  const int staged = plan.staged, direct = staged == kA ? kB : kA;
  const bool has_direct = p.operands == 3 && !plan.staged_pair;
  TileArgs args;
  args.out = p.data[kOut];
  args.staged = p.data[staged];
  args.partner = plan.staged_pair ? p.data[direct] : nullptr;
  args.direct = has_direct ? p.data[direct] : nullptr;
  args.staged_extent = {args.staged, args.staged + extent_bytes(p, Role(staged))};
  args.direct_extent = {args.direct, args.direct + (has_direct ? extent_bytes(p, Role(direct)) : 0)};
  args.o_size = p.sizes[0];
  args.q_size = p.sizes[q];
  args.staged_o = p.strides[staged][0] * w;
  args.staged_q = p.strides[staged][q] * w;
  args.direct_o = has_direct ? p.strides[direct][0] * w : 0;
  args.direct_q = has_direct ? p.strides[direct][q] * w : 0;
  args.out_q = p.strides[kOut][q] * w;
  args.staged_is_b = staged == kB;

  // Every address of an operand has the low bits that these have in common.
  uintptr_t in_bits = reinterpret_cast<uintptr_t>(args.staged) | args.staged_o;
  uintptr_t out_bits = reinterpret_cast<uintptr_t>(args.out) | args.out_q;
  // Chunks of the direct input follow the output's if their distance is always a multiple of a chunk.
  uintptr_t apart = uintptr_t(args.direct - args.out) | (args.direct_q - args.out_q);
  int64_t items = 1;
  for (int d = 1; d < p.rank; ++d) {
    if (d == q) continue;
    args.batch.push(p, d);
    int64_t* const stride = args.batch.dim[args.batch.rank - 1].stride;
    if (staged == kB) std::swap(stride[kA], stride[kB]);
    in_bits |= stride[kA];
    out_bits |= stride[kOut];
    apart |= stride[kB] - stride[kOut];
    items *= p.sizes[d];
  }
  args.direct_is_wide = has_direct && args.direct_o == w && apart % kChunkBytes == 0;
  args.shares_lines = in_bits % kLineBytes != 0;
  // (Pieces of 4 bytes are slower than shifted rows.)
  args.by_halves = in_bits % kChunkBytes == kChunkBytes / 2;
  const bool in_aligned = in_bits % (kChunkBytes / 2) == 0 || args.staged_q != w || plan.staged_pair;
  const bool out_aligned = out_bits % kPhaseBytes == 0;
  if constexpr (sizeof(typename Op::Element) < kChunkBytes) {
    if (!in_aligned && !out_aligned) return launch_tiles_as<Op, true, true>(args, items, op, stream);
    if (!in_aligned) return launch_tiles_as<Op, true, false>(args, items, op, stream);
    if (!out_aligned) return launch_tiles_as<Op, false, true>(args, items, op, stream);
  }
  return launch_tiles_as<Op, false, false>(args, items, op, stream);
}

}  // namespace fusebackend::tile
