// Which CUDA kernel serves a plan, and the shape of its boxes. Host code without CUDA, so that it can be tested anywhere.
#pragma once

#include "plan.h"

namespace fusebackend::tile {

enum class CudaRoute : int { kEmpty, kRows, kTiles, kBoxes };

constexpr int kTileBytes = 16384;

// Elements of a 2-D tile along the output's fastest dimension (o) and the input's (q). Sums of 2-byte elements into rows that begin within
// sectors, where a tile reads rows that others read, too, have large ones: three tensors go through memory, and little else may.
constexpr int tile_o(int element_bytes, bool is_sum, bool cuts_sectors) {
  const bool large = element_bytes == 2 && is_sum && cuts_sectors;
  return element_bytes == 1 || large ? 128 : element_bytes <= 4 ? 64 : 32;
}
constexpr int tile_q(int element_bytes) { return kTileBytes / element_bytes / tile_o(element_bytes, false, false); }

// How the places of an output run's elements in shared memory are found: neighbours, at equal distances, the same with the chunks of
// lines permuted after each chunk's worth of elements (else they would meet few banks), or by a table that repeats.
enum class BoxPlaces { kStraight, kMarched, kSwizzled, kTabled };

// A box: `extent` elements of every dimension of the simplified problem (1 where it is walked by the grid). boxes.cuh says what it is for.
constexpr int64_t kMaxBoxBytes = 64 * 1024;  // of shared memory: places in it are 16-bit numbers
constexpr int kMaxBoxTable = 256;
constexpr int kSectorBytes = 32, kLineBytes = 128;
constexpr int kNoHash = 28;  // addresses are shorter than so many bits
constexpr int kBoxThreads = 256, kBoxWarps = kBoxThreads / 32;
// Entries of its table: an element before which there is less than a chunk, to one after which the table repeats. A multiple of 8, so
// that what follows is aligned.
#ifdef __CUDACC__
__host__ __device__
#endif
constexpr int box_entries(int table, int chunk_elements) { return (table + chunk_elements - 1 + 7) / 8 * 8; }

struct BoxPlan {
  int64_t extent[kMaxRank];
  int64_t count = 1;     // of boxes
  int rank = 0;          // dimensions with extent > 1
  int dims[kMaxRank];    // those, in the staged input's order, fastest first
  int weight[kMaxRank];  // by index of `dims`: bytes between neighbours in shared memory; 0 where the input is broadcast
  int in_rank = 0;       // leading ones of `dims` that are contiguous in the input: an input run
  int out_rank = 0;      // leading ones, in the output's order, that make an output run: contiguous, the last one marched along
  int64_t in_length = 1, in_runs = 1, out_length = 1, out_runs = 1;  // elements of a run, and runs
  BoxPlaces places = BoxPlaces::kMarched;
  bool skewed = false;  // kSwizzled; or kTabled, and input runs are a chunk further apart after each chunk's worth of the first dimension
  int march_dim = 0, window_dim = -1;  // that last dimension; the same if it is cut
  // Boxes write windows of an output run: `window` elements of that last dimension out of `run_size`, of `lead` elements of the run each;
  // for alignment, they hold `halo` more in front. Of those, a sector's worth is needed. Where each of them is apart in the input, the
  // others are not read and have no place: `spared_runs` input runs, and `spared_bytes` of shared memory.
  int64_t window = 1, halo = 0, lead = 1, run_size = 1, spared_runs = 0;
  int spared_bytes = 0;
  bool direct_follows = false;  // the direct input lies as the output does within output runs
  int stage_at = 0, shared_bytes = 0;
  // Lanes: a warp stores 2^(5 - run_bits) chunks of each of 2^run_bits output runs at once; 2^share_bits warps share a group of runs.
  int run_bits = 0, share_bits = 0;
  // kTabled: chunks are permuted within lines of shared memory, by the bits of their address from this one on.
  int hash = kNoHash;
};

// Whether an operand's every row starts at a multiple of 16 bytes; whether all rows of all operands are contiguous and of whole chunks.
bool is_aligned(const Problem& problem, Role role);
bool rows_are_whole(const Problem& problem);

CudaRoute cuda_route(const Plan& plan);
BoxPlan plan_box(const Plan& plan);
bool box_fits(const BoxPlan& box);  // in shared memory; no torch view was found that does not

}  // namespace fusebackend::tile
