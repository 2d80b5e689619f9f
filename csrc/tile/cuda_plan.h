// Which CUDA kernel serves a plan, and the shape of its boxes. Host code without CUDA, so that it can be tested anywhere.
#pragma once

#include "plan.h"

namespace fusebackend::tile {

enum class CudaRoute : int { kEmpty, kRows, kTiles, kBoxes };

constexpr int kTileBytes = 16384;

// Elements of a 2-D tile along the output's fastest dimension (o) and the input's (q).
constexpr int tile_o(int element_bytes) { return element_bytes == 1 ? 128 : element_bytes <= 4 ? 64 : 32; }
constexpr int tile_q(int element_bytes) { return kTileBytes / element_bytes / tile_o(element_bytes); }

// A box: `extent` elements of every dimension of the simplified problem (1 where it is walked by the grid).
constexpr int kMaxBoxTable = 64;
struct BoxPlan {
  int64_t extent[kMaxRank];
  int rank = 0;        // dimensions with extent > 1
  int dims[kMaxRank];  // those, in the staged input's order, fastest first
  int in_rank = 0;     // leading ones of `dims` that are contiguous in the input: an input run
  int out_rank = 0;    // leading ones, in the output's order, that make an output run: contiguous, the last one marched along, the
                       // others together less than kMaxBoxTable elements
  bool direct_follows = false;  // the direct input lies as the output does within output runs
  int data_bytes = 0, shared_bytes = 0;
};

// Whether an operand's every row starts at a multiple of 16 bytes; whether all rows of all operands are contiguous and of whole chunks.
bool is_aligned(const Problem& problem, Role role);
bool rows_are_whole(const Problem& problem);

CudaRoute cuda_route(const Plan& plan);
BoxPlan plan_box(const Plan& plan);
bool box_fits(const BoxPlan& box);  // in shared memory; no torch view was found that does not

}  // namespace fusebackend::tile
