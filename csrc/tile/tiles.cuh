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

constexpr int kTileThreads = 256;
constexpr int kPhaseBytes = 32;  // shifted output chunks are grouped by sectors, so that no two blocks write to one

// kOutBytes: the output's chunks, 16 wherever kShiftOut.
template <int W, int kOutBytes, bool kShiftIn, bool kShiftOut>
struct TileShape {
  static_assert(!kShiftOut || kOutBytes == kChunkBytes);
  static constexpr int kCount = kChunkBytes / W, kOutCount = kOutBytes / W;  // elements a chunk
  static constexpr int kO = tile_o(W), kQ = tile_q(W);
  static constexpr int kOutChunks = kO / kOutCount, kInChunks = kQ / kCount;
  static constexpr int kHalo = kShiftOut ? kPhaseBytes / W - 1 : 0;  // rows in front
  static constexpr int kRows = kO + kHalo;
  static constexpr int kRowChunks = kInChunks + (kShiftIn ? 1 : 0);
  static constexpr int kPitch = kRowChunks * kChunkBytes;
  static constexpr int kBytes = kRows * kPitch + (kRows / kCount + 1) * kChunkBytes;
  static_assert((kCount * kPitch / kChunkBytes + 1) % 2 == 1, "the skew must reach all banks");

  // Out: a unit is one chunk in each of kGroup columns, which are gathered together as 4-byte words.
  static constexpr int kGroup = W < 4 && !kShiftIn && !kShiftOut ? 4 / W : 1;
  static constexpr int kColumns = kQ / kGroup;
  static constexpr int kPasses = kOutChunks * kColumns / kTileThreads;
  static constexpr int kLanesO = kOutChunks < 128 / kOutBytes ? kOutChunks : 128 / kOutBytes;  // neighbouring lanes write 128 bytes
  static_assert(kOutChunks * kColumns % kTileThreads == 0 && kTileThreads / kLanesO * W % kPhaseBytes == 0);

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
  FastDiv o_tiles, q_tiles;
  Batch batch;  // by Role: kA is staged (and its partner), kB direct
};

// One block's tile. All pointers are at its q = 0 and at o = 0 of the tensor.
template <typename Op, int kOutBytes, bool kShiftIn, bool kShiftOut>
struct Tile {
  using E = typename Op::Element;
  static constexpr int W = sizeof(E);
  using Shape = TileShape<W, kOutBytes, kShiftIn, kShiftOut>;
  static constexpr int kCount = Shape::kCount, kOutCount = Shape::kOutCount;
  using OutChunk = Chunk<E, kOutBytes>;

  const TileArgs& args;
  const Op& op;
  char* shared;
  char* out;
  const char* staged;
  const char* direct;
  int64_t o0;   // of the first row; negative in the halo of the first tile
  int q_count;  // columns in range

  __device__ E combine(E from_tile, E from_direct) const {
    return args.staged_is_b ? op(from_direct, from_tile) : op(from_tile, from_direct);
  }

  // Thread t's unit in a pass: neighbouring lanes along o, then columns. All passes of a thread have the same output phase.
  static __device__ int chunk_of(int pass) {
    const int unit = pass * kTileThreads + threadIdx.x;
    return unit % Shape::kLanesO + unit / (Shape::kLanesO * Shape::kColumns) * Shape::kLanesO;
  }
  static __device__ int column_of(int pass) { return (pass * kTileThreads + threadIdx.x) / Shape::kLanesO % Shape::kColumns * Shape::kGroup; }
  // The tile's row of the first element of chunk 0 in column q.
  __device__ int first_row(int q) const { return Shape::kHalo - (kShiftOut ? int(phase_bytes<kPhaseBytes>(out + q * args.out_q)) / W : 0); }
  __device__ int in_shift(int row) const { return kShiftIn ? int(phase_bytes(staged + (o0 + row) * args.staged_o)) : 0; }

  // kInterior: every row and column is in range, and all chunks lie within the operands.
  template <bool kInterior>
  __device__ void load() const {
    constexpr int kChunks = Shape::kRows * Shape::kRowChunks;
#pragma unroll
    for (int first = 0; first < kChunks; first += kTileThreads) {
      const int i = first + threadIdx.x;
      if (kChunks % kTileThreads && i >= kChunks) break;
      const int row = i / Shape::kRowChunks, j = i % Shape::kRowChunks;
      const int64_t o = o0 + row;
      if (!kInterior && (o < 0 || o >= args.o_size)) continue;
      const char* from = staged + o * args.staged_o;
      const int shift = kShiftIn ? phase_bytes(from) / W : 0;
      const int q = j * kCount - shift;  // of the chunk's first element
      if (q >= (kInterior ? Shape::kQ : q_count)) continue;
      char* to = shared + Shape::row_offset(row) + j * kChunkBytes;
      from += q * W;
      if (kInterior || (kShiftIn ? args.staged_extent.holds(from, kChunkBytes) : q + kCount <= q_count)) {
        cp_async_16(to, from);
      } else {
        for (int e = max(0, -q); e < min(kCount, q_count - q); ++e) reinterpret_cast<E*>(to)[e] = reinterpret_cast<const E*>(from)[e];
      }
    }
    cp_async_commit();
  }

  // For inputs that are not contiguous along q, and for pairs: element by element, unshifted.
  __device__ void load_elements() const {
    for (int i = threadIdx.x; i < Shape::kRows * Shape::kQ; i += kTileThreads) {
      const int row = i / Shape::kQ, q = i % Shape::kQ;
      const int64_t o = o0 + row;
      if (o < 0 || o >= args.o_size || q >= q_count) continue;
      const char* from = staged + o * args.staged_o + q * args.staged_q;
      E value = *reinterpret_cast<const E*>(from);
      if constexpr (Op::kBinary) {
        if (args.partner) value = combine(value, *reinterpret_cast<const E*>(from + (args.partner - args.staged)));
      }
      *reinterpret_cast<E*>(shared + Shape::row_offset(row) + in_shift(row) + q * W) = value;
    }
  }

  // One chunk in each of kGroup columns, from tile rows first_row + chunk * kOutCount ...
  __device__ void gather(const int (&place)[kOutCount], int offset, OutChunk (&chunks)[Shape::kGroup]) const {
#pragma unroll
    for (int k = 0; k < kOutCount; ++k) {
      struct alignas(W * Shape::kGroup) Word {
        E v[Shape::kGroup];
      };
      const Word word = *reinterpret_cast<const Word*>(shared + place[k] + offset);
#pragma unroll
      for (int g = 0; g < Shape::kGroup; ++g) chunks[g].v[k] = word.v[g];
    }
  }

  // A thread's columns share their phases (they are a multiple of kCount apart), so its places are those of chunk 0 in its first
  // column plus a constant for each chunk and column.
  __device__ void first_places(int (&place)[kOutCount]) const {
    const int row0 = first_row(column_of(0));
#pragma unroll
    for (int k = 0; k < kOutCount; ++k) {
      // A chunk of the output may be shorter than the skew's period: then rows are counted from the thread's own chunk.
      const int row = row0 + k + (kOutCount < kCount ? chunk_of(0) * kOutCount : 0);
      place[k] = Shape::row_offset(row) + in_shift(row);
    }
  }
  __device__ int offset_of(int pass) const {
    const int chunks = kOutCount < kCount ? chunk_of(pass) - chunk_of(0) : chunk_of(pass);
    return Shape::row_offset(chunks * kOutCount) + column_of(pass) * W;
  }

  // kDirect: there is a direct input, and it has an aligned chunk for each of the output's.
  template <bool kDirect>
  __device__ void store_interior() const {
    OutChunk beside[kDirect ? Shape::kPasses : 1][Shape::kGroup];
    const int row0 = first_row(column_of(0));
    const auto offset_o = [&](int pass) { return (o0 + row0 + chunk_of(pass) * kOutCount) * W; };
    if constexpr (kDirect) {
#pragma unroll
      for (int pass = 0; pass < Shape::kPasses; ++pass)
#pragma unroll
        for (int g = 0; g < Shape::kGroup; ++g)
          beside[pass][g] = load_aligned<E, kOutBytes>(direct + (column_of(pass) + g) * args.direct_q + offset_o(pass));
    }
    int place[kOutCount];
    first_places(place);
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      OutChunk chunks[Shape::kGroup];
      gather(place, offset_of(pass), chunks);
#pragma unroll
      for (int g = 0; g < Shape::kGroup; ++g) {
        if constexpr (kDirect)
#pragma unroll
          for (int k = 0; k < kOutCount; ++k) chunks[g].v[k] = combine(chunks[g].v[k], beside[pass][g].v[k]);
        store_aligned(out + (column_of(pass) + g) * args.out_q + offset_o(pass), chunks[g]);
      }
    }
  }

  __device__ void store_edge() const {
    int place[kOutCount];
    first_places(place);
    cp_async_wait<0>();
    __syncthreads();
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      const int column = column_of(pass);
      if (column >= q_count) continue;
      const int64_t o = o0 + first_row(column) + chunk_of(pass) * kOutCount;
      const int first = o < 0 ? int(-o) : 0, last = int(min(int64_t(kOutCount), args.o_size - o));
      if (first >= last) continue;
      OutChunk chunks[Shape::kGroup];
      gather(place, offset_of(pass), chunks);
#pragma unroll
      for (int g = 0; g < Shape::kGroup; ++g) {
        const int q = column + g;
        if (q >= q_count) break;
        if constexpr (Op::kBinary) {
          if (args.direct) {
            const OutChunk beside = load_chunk<E, kOutBytes>(direct + q * args.direct_q + o * args.direct_o, args.direct_o, first, last, args.direct_extent);
#pragma unroll
            for (int k = 0; k < kOutCount; ++k) chunks[g].v[k] = combine(chunks[g].v[k], beside.v[k]);
          }
        }
        store_chunk(out + q * args.out_q + o * W, W, first, last, true, chunks[g]);
      }
    }
  }

  __device__ void run() const {
    const bool chunked = args.staged_q == W && args.partner == nullptr;
    const int64_t last_row = o0 + Shape::kRows - 1;
    const bool in_range = o0 >= 0 && last_row < args.o_size && q_count == Shape::kQ;
    const bool interior = in_range && chunked &&
                          (!kShiftIn || (args.staged_extent.holds(staged + o0 * args.staged_o - kChunkBytes, kChunkBytes) &&
                                         args.staged_extent.holds(staged + last_row * args.staged_o + Shape::kQ * W, kChunkBytes)));
    if (interior) load<true>();
    else if (chunked) load<false>();
    else load_elements();
    if (in_range && (!Op::kBinary || args.direct == nullptr)) store_interior<false>();
    else if (Op::kBinary && in_range && args.direct_is_wide) store_interior<Op::kBinary>();
    else store_edge();
  }
};

template <typename Op, int kOutBytes, bool kShiftIn, bool kShiftOut>
__global__ void __launch_bounds__(kTileThreads) tiles_kernel(const __grid_constant__ TileArgs args, const Op op) {
  using T = Tile<Op, kOutBytes, kShiftIn, kShiftOut>;
  extern __shared__ __align__(16) char shared[];
  uint32_t rest, q_tile, o_tile, item;
  // Neighbouring blocks follow the output: scattered writes cost more than scattered reads.
  args.o_tiles.divmod(blockIdx.x, rest, o_tile);
  args.q_tiles.divmod(rest, item, q_tile);
  const char* staged = args.staged;
  const char* direct = args.direct;
  char* out = args.out;
  args.batch.advance(item, out, staged, direct);
  const int64_t q0 = int64_t(q_tile) * T::Shape::kQ;
  const T tile{args, op, shared, out + q0 * args.out_q, staged + q0 * args.staged_q, direct + q0 * args.direct_q,
               int64_t(o_tile) * T::Shape::kO - T::Shape::kHalo, int(min(int64_t(T::Shape::kQ), args.q_size - q0))};
  tile.run();
}

template <typename Op, int kOutBytes, bool kShiftIn, bool kShiftOut>
cudaError_t launch_tiles_as(TileArgs args, int64_t items, Op op, cudaStream_t stream) {
  using Shape = TileShape<sizeof(typename Op::Element), kOutBytes, kShiftIn, kShiftOut>;
  const int64_t o_tiles = (args.o_size + Shape::kHalo + Shape::kO - 1) / Shape::kO;
  const int64_t q_tiles = (args.q_size + Shape::kQ - 1) / Shape::kQ;
  args.o_tiles = FastDiv(uint32_t(o_tiles));
  args.q_tiles = FastDiv(uint32_t(q_tiles));
  tiles_kernel<Op, kOutBytes, kShiftIn, kShiftOut><<<unsigned(o_tiles * q_tiles * items), kTileThreads, Shape::kBytes, stream>>>(args, op);
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
  uintptr_t in_bits = reinterpret_cast<uintptr_t>(args.staged) | args.staged_o, out_bits = reinterpret_cast<uintptr_t>(args.out) | args.out_q;
  // Chunks of the direct input follow the output's if their distance is always a multiple of a chunk.
  uintptr_t apart = uintptr_t(args.direct - args.out) | (args.direct_q - args.out_q);
  int64_t items = 1;
  for (int d = 1; d < p.rank; ++d) {
    if (d == q) continue;
    args.batch.push(p, d);
    int64_t* stride[3] = {&args.batch.stride[kOut][args.batch.rank - 1], &args.batch.stride[kA][args.batch.rank - 1], &args.batch.stride[kB][args.batch.rank - 1]};
    if (staged == kB) std::swap(*stride[kA], *stride[kB]);
    in_bits |= *stride[kA];
    out_bits |= *stride[kOut];
    apart |= *stride[kB] - *stride[kOut];
    items *= p.sizes[d];
  }
  args.direct_is_wide = has_direct && args.direct_o == w && apart % kChunkBytes == 0;
  const bool in_aligned = in_bits % kChunkBytes == 0 || args.staged_q != w || plan.staged_pair;
  const bool out_aligned = out_bits % kChunkBytes == 0;
  if constexpr (sizeof(typename Op::Element) < kChunkBytes) {
    if (!in_aligned) return out_aligned ? launch_tiles_as<Op, 16, true, false>(args, items, op, stream) : launch_tiles_as<Op, 16, true, true>(args, items, op, stream);
    if (!out_aligned) return launch_tiles_as<Op, 16, false, true>(args, items, op, stream);
  }
  return launch_tiles_as<Op, 16, false, false>(args, items, op, stream);
}

}  // namespace fusebackend::tile
