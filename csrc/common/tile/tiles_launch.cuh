// From a plan to a launch of the tile kernel.
#pragma once

#include "common/integer_math.h"
#include "common/tile/tiles.cuh"

namespace fusebackend::tile {

constexpr int64_t kMaxTilesQFirst = 8;  // tiles in a row of the input, up to which the blocks that run at once cover many rows

template <typename Op, bool kShiftIn, bool kShiftOut>
cudaError_t launch_tiles_as(TileArgs args, int64_t items, Op op, cudaStream_t stream) {
  using Shape = typename Tile<Op, kShiftIn, kShiftOut>::Shape;
  const int64_t o_tiles = ceil_div(args.o_size + Shape::kHalo, Shape::kO), q_tiles = ceil_div(args.q_size, Shape::kQ);
  args.o_tiles = FastDiv(uint32_t(o_tiles));
  args.q_tiles = FastDiv(uint32_t(q_tiles));
  args.q_first = args.staged_shares_lines && q_tiles <= kMaxTilesQFirst;
  move_tiles_kernel<Op, kShiftIn, kShiftOut><<<unsigned(o_tiles * q_tiles * items), Shape::kThreads, Shape::kBytes, stream>>>(args, op);
  return cudaGetLastError();
}

template <typename Op>
cudaError_t launch_tiles(const Plan& plan, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes;
  const int q = plan.staged_dim;
  const Operand staged = plan.staged, direct = plan.other();
  const bool has_direct = plan.has_direct();
  TileArgs args;
  args.out = p.data[kOut];
  args.staged = p.data[staged];
  args.partner = plan.staged_pair ? p.data[direct] : nullptr;
  args.direct = has_direct ? p.data[direct] : nullptr;
  args.staged_extent = {args.staged, args.staged + p.extent_bytes(staged)};
  args.direct_extent = {args.direct, args.direct + (has_direct ? p.extent_bytes(direct) : 0)};
  args.o_size = p.sizes[0];
  args.q_size = p.sizes[q];
  args.staged_o = p.strides[staged][0] * w;
  args.staged_q = p.strides[staged][q] * w;
  args.direct_o = has_direct ? p.strides[direct][0] * w : 0;
  args.direct_q = has_direct ? p.strides[direct][q] * w : 0;
  args.out_q = p.strides[kOut][q] * w;
  args.staged_is_y = staged == kY;

  // The distance of the direct input from the output: chunks of both are aligned alike if it is always a multiple of a chunk.
  uintptr_t apart = uintptr_t(args.direct - args.out) | (args.direct_q - args.out_q);
  int64_t items = 1;
  for (int d = 1; d < p.rank; ++d) {
    if (d == q) continue;
    const BatchDim& dim = args.batch.push(p, d, staged, direct);
    apart |= dim.second - dim.out;
    items *= p.sizes[d];
  }
  args.direct_is_aligned = has_direct && args.direct_o == w && apart % kChunkBytes == 0;
  const uintptr_t in_bits = row_address_bits(p, staged, q), out_bits = row_address_bits(p, kOut);
  args.staged_shares_lines = in_bits % kLineBytes != 0;
  args.staged_by_halves = in_bits % kChunkBytes == kChunkBytes / 2;  // (in pieces of 4 bytes, reading is slower than shifting)
  const bool in_aligned = in_bits % (kChunkBytes / 2) == 0 || args.staged_q != w || plan.staged_pair;
  const bool out_aligned = out_bits % kSectorBytes == 0;
  if constexpr (sizeof(typename Op::Element) < kChunkBytes) {
    if (!in_aligned && !out_aligned) return launch_tiles_as<Op, true, true>(args, items, op, stream);
    if (!in_aligned) return launch_tiles_as<Op, true, false>(args, items, op, stream);
    if (!out_aligned) return launch_tiles_as<Op, false, true>(args, items, op, stream);
  }
  return launch_tiles_as<Op, false, false>(args, items, op, stream);
}

}  // namespace fusebackend::tile
