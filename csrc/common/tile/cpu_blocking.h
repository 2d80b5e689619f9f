// How a problem is cut into blocks for CPU threads: any range of them may run on any thread.
//
// The output is dense: its dimensions, innermost first, are one run of memory. A block is a part of that run (some inner dimensions, the
// last of them in part); and where an input is contiguous along another dimension than the output, a few such rows along that dimension, so
// that every cache line is read and written once, however large the strides are.
#pragma once

#include "common/tile/plan.h"

namespace fusebackend::tile {

enum class Movement {
  kRows,     // the input is contiguous along the output's innermost dimension: its rows are copied, wherever each lies
  kSquares,  // runs of the output and rows of the input are long: squares that fit in registers are transposed
  kGather,   // short dimensions, and strides of any kind: element by element, by a table of the offsets of a run's elements
};

struct Blocking {
  Movement movement = Movement::kGather;
  int run_rank = 1;            // dimensions [0, run_rank) make a run,
  int64_t run_extent = 1;      // so many elements of the last of them,
  int64_t inner_length = 1;    // which has so many elements of the others at each index
  int row_dim = 0;             // the dimension of a block's rows, 0 for none
  int64_t rows = 1;
  int64_t min_extent = 1, min_rows = 1;  // no block has fewer; the last one along a dimension has more instead
  int64_t blocks = 0;

  int64_t block_elements() const { return run_extent * inner_length * rows; }
};

Blocking make_blocking(const Plan& plan);

}  // namespace fusebackend::tile
