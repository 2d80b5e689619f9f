// Sums along rows by an index: out[r][index[r][k]] += source[r][k], for each row r of a tensor's last dim, from zeros or from `self`.
//
// Rows of the source may share a row of the index: the dims along which the index repeats are `shared`, the others `own`.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/integer_math.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::row_scatter {

constexpr int kMostDims = 8;        // of a tensor, the last one included
constexpr int64_t kMostRow = 4096;  // sources, and bins, of a row: shared memory holds both on every GPU

// Strides are in elements; that of the index is 0 along shared dims.
struct Dim {
  int64_t size, source_stride, out_stride, index_stride;
};

// A number of dims, whose last one varies fastest.
struct Dims {
  int count = 0;
  Dim dim[kMostDims];

  FUSE_HOST_DEVICE int64_t size() const {
    int64_t n = 1;
    for (int d = 0; d < count; ++d) n *= dim[d].size;
    return n;
  }
};

// Where the i-th row of some dims lies.
struct Offsets {
  int64_t source = 0, out = 0, index = 0;
};
FUSE_HOST_DEVICE inline Offsets offsets_of(const Dims& dims, int64_t i) {
  Offsets found;
  for (int d = dims.count - 1; d >= 0; --d) {
    const Dim& dim = dims.dim[d];
    // In 32 bits where both fit, which takes a third of the instructions.
    const int64_t q = (i | dim.size) >> 32 ? i / dim.size : int64_t(uint32_t(i) / uint32_t(dim.size)), at = i - q * dim.size;
    found.source += at * dim.source_stride, found.out += at * dim.out_stride, found.index += at * dim.index_stride;
    i = q;
  }
  return found;
}

// `self` is null, or lies as the result, which is contiguous.
struct Problem {
  const void *source, *index, *self;
  void* out;
  int64_t sources, bins;            // of a row
  int64_t source_step, index_step;  // from one source of a row to the next
  Dims own, shared;
  DType dtype;
  bool index_is_64;
};

// How blocks of the sum load their tile: by 16 bytes along the rows, by 16 bytes across rows that lie beside one another, or element by element.
enum class Load { kAlongRows, kAcrossRows, kElements };

constexpr int kMostTileRows = 64;   // rows of the index that a block takes
constexpr int kMostCopies = 64;     // rows of the source that share each of these, and that it takes
constexpr int kMostSortWarps = 8;   // of a block of the sort
constexpr int kSortWarpSources = 128;  // that a warp of the sort has before another one shares the row

// How a GPU computes it: a sort of each row of the index, then blocks that take `tile_rows` of these rows and sum `group` of the rows that share
// each at once, and so `block_groups` times.
struct Plan {
  Load load;
  int group;           // rows of the source that share a row of the index, and are summed at once
  int tile_rows;
  bool across;         // rows of the index lie beside one another in the source
  int64_t run;         // of these rows, or of all rows; tiles do not go beyond
  int64_t tiles, groups;
  int block_groups;
  int pitch;           // places of a row in the tile
  int lists_at;        // bytes of the tile, behind which the sorted rows of the index stand
  int shared_bytes;
  int sort_warps;
  int sort_bytes;      // of shared memory
  int64_t begin_words, row_words;  // 16-bit words that the sort leaves of a row: where each bin begins, and all of them
  int64_t workspace_bytes;

  int64_t blocks() const { return tiles * ceil_div(groups, int64_t(block_groups)); }
};

// Args:
//   most_shared_bytes: of a block.
//   misaligned: bytes by which the source begins behind a multiple of 16.
Plan make_plan(const Problem& p, int multiprocessors, int most_shared_bytes, int misaligned);

constexpr int kBesideTheTile = 4 << 10;  // bytes of shared memory that a block of the sum needs for offsets, at most

// Sources of a row in the order of their loads take turns on the banks of shared memory.
FUSE_HOST_DEVICE inline int place_of(int source) { return source ^ ((source >> 3) & 7); }

#if __has_include(<cuda_runtime_api.h>)
cudaError_t launch(const Problem& p, const Plan& plan, void* workspace, cudaStream_t stream);
#endif

// The rows [begin, end) of own * shared, by plain loops. The first index out of range that is met is written to `bad`; it adds nothing.
struct OutOfRange {
  bool found = false;
  int64_t index = 0;
};
void sum_rows_cpu(const Problem& p, int64_t begin, int64_t end, OutOfRange& bad);

}  // namespace fusebackend::row_scatter
