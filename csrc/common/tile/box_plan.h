// The launch configuration of boxes.cuh: which elements a box holds, where they lie in shared memory, and which lanes store them.
// Host code that needs no CUDA.
#pragma once

#include "common/tile/memory_units.h"
#include "common/tile/plan.h"

namespace fusebackend::tile {

constexpr int64_t kMaxBoxBytes = 64 * 1024;  // of shared memory: offsets in it are 16-bit numbers
constexpr int kMaxBoxTable = 256;            // elements that the lookup table of a box repeats after
constexpr int kNoHash = 28;                  // shared-memory addresses have fewer bits
constexpr int kBoxThreads = 256, kBoxWarps = kBoxThreads / 32;

// Entries of the lookup table that repeats after `period` elements: from the first element of a chunk that begins before element 0 to the
// last one of a chunk that begins in the period. A multiple of 8, so that what follows the table is aligned.
#ifdef __CUDACC__
__host__ __device__
#endif
constexpr int box_table_entries(int period, int chunk_elements) { return (period + chunk_elements - 1 + 7) / 8 * 8; }

// How the elements of an output run lie in shared memory.
enum class RunLayout {
  kContiguous,  // as neighbours
  kStrided,     // at equal distances
  kSwizzled,    // at equal distances, the chunks of each line permuted: another permutation for each chunk's worth of elements
  kTabulated,   // the run has several dimensions: at offsets from a lookup table, which repeats along the last of them
};

struct BoxPlan {
  int64_t extent[kMaxRank];      // elements of a box along each dimension of the problem; 1 where the grid covers it
  int64_t count = 1;             // boxes
  int rank = 0;                  // dimensions whose extent is more than 1,
  int dims[kMaxRank];            // in the staged input's order, the fastest first;
  int shared_stride[kMaxRank];   // by index of `dims`: bytes between neighbours in shared memory; 0 where the input is broadcast

  // Runs: elements of a box that are neighbours in global memory. The first `in_rank` of `dims` make an input run; the first `out_rank` of
  // them in the output's order make an output run, of which `run_dim` is the last.
  int in_rank = 0, out_rank = 0, run_dim = 0;
  int64_t in_length = 1, in_runs = 1, out_length = 1, out_runs = 1;  // elements of a run, and runs of a box
  int64_t inner_length = 1;    // elements of an output run at one index of run_dim
  bool direct_is_contiguous = false;  // the direct input lies within output runs as the output does

  // Where run_dim is cut, boxes write windows of it that begin and end at sectors. A box holds `halo` more indices before its window, of
  // which only elements within a sector's size are stored. Input runs without such elements are not read and have no place in shared memory.
  int window_dim = -1;         // run_dim if it is cut
  int64_t window = 1, halo = 0;  // indices of run_dim
  int64_t run_extent = 1;      // all indices of run_dim that the boxes along it cover
  int64_t unread_runs = 0;
  int unread_bytes = 0;        // of shared memory that they would take

  RunLayout layout = RunLayout::kStrided;
  // kSwizzled: always. kTabulated: input runs are a chunk further apart after each chunk's worth of the output's first dimension.
  bool skewed = false;
  int stage_offset = 0;        // of the box's elements in shared memory, after the tables
  int shared_bytes = 0;

  // A warp stores 2^(5 - warp_runs_log2) chunks of each of 2^warp_runs_log2 output runs at once; 2^warps_per_run_log2 warps share a run.
  int warp_runs_log2 = 0, warps_per_run_log2 = 0;
  // kTabulated: chunks of a line of shared memory are permuted by the bits of their address from this one on.
  int hash_shift = kNoHash;

  // Whether it fits in shared memory, beside the kernel's static part of less than 1 KB. No view that PyTorch can make was found that does not.
  bool fits() const { return shared_bytes <= kMaxBoxBytes - 1024; }
};

BoxPlan plan_box(const Plan& plan);

// The second and third step of plan_box, in box_layout.cpp: place the elements in shared memory, and spread lanes over output runs.
void lay_out_box(const Plan& plan, BoxPlan& box);
void spread_lanes(const Plan& plan, BoxPlan& box);

}  // namespace fusebackend::tile
