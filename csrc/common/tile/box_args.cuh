// The arguments of boxes.cuh's kernel.
#pragma once

#include "common/cuda_common.cuh"
#include "common/tile/box_plan.h"
#include "common/tile/chunks.cuh"

namespace fusebackend::tile {

// A dimension of runs, or across runs. `stride` is that of the operand whose runs these are, in bytes.
struct BoxDim {
  FastDiv extent;
  uint32_t shared_stride;
  int64_t stride, direct_stride;
};

// A dimension along which there are several boxes.
struct BoxGrid {
  FastDiv boxes;
  uint32_t step, last;  // elements from one box to the next, and to the last one
  int64_t out_stride, staged_stride, direct_stride;
};

// Some of BoxArgs::dims.
struct BoxDims {
  int at = 0, rank = 0;
};

// The first element of a run: its offset from the box's first element in global memory, and in shared memory. There, addresses of chunks
// are xored with `swizzle`.
struct alignas(16) BoxRun {
  int64_t offset;
  uint32_t shared_offset, swizzle;
};

// The first element of a box in each operand.
struct BoxBase {
  char* out;  // of the output run that the box cuts, not of the box
  const char* staged;
  const char* direct;
  int start, window;  // elements of the output run before the box, and before its window
};

struct BoxArgs {
  BoxBase base;
  int64_t partner;            // bytes from the staged input to the other one of a staged pair, or 0
  bool has_direct;
  Extent staged_extent, direct_extent;
  bool staged_is_y;
  bool chunked;               // input runs are read in chunks: their elements are neighbours, and there is no partner
  bool direct_is_contiguous;  // as BoxPlan's; so are all fields of the same names
  uint32_t in_length, in_runs, out_length, out_runs;
  FastDiv in_chunks;          // of a run, at the worst alignment
  uint32_t align;             // bytes; lanes read input runs from multiples of it on
  uint32_t warp_runs_log2, warps_per_run_log2;
  FastDiv period;             // elements after which the lookup table repeats
  int shared_step;            // bytes in shared memory between neighbours of a run, or between repetitions of the table
  int64_t direct_step;        // the same of the direct input in global memory
  bool skewed;
  FastDiv skew_before, skew_extent;  // input runs from one index of the output's first dimension to the next, and indices
  int64_t run_step;           // bytes between neighbours of an input run
  int64_t span;               // bytes from a box's first to past its last byte in the staged input
  uint32_t stage_offset;
  int run_length;             // elements of an output run that all boxes along it cover,
  int window;                 // and that one box writes
  uint32_t hash_shift;
  BoxDims in, out;            // dimensions across input runs, and across output runs
  BoxDims run;                // dimensions of output runs
  uint32_t boxes;
  int grid_rank;
  int window_grid;            // the dimension of `grid` that cuts output runs into windows, or -1
  uint32_t halo, inner_length;
  bool has_unread;
  uint32_t unread_runs, unread_bytes;
  uint32_t runs_per_index;    // input runs of one index of the windowed dimension
  BoxGrid grid[kMaxRank];
  BoxDim dims[2 * kMaxRank];  // last, so that those arguments that are used are near each other
};

}  // namespace fusebackend::tile
