// CPU counterparts of the launchers. A problem is planned and cut once, then any range of its units may run on any thread.
//
// The output is dense: its dimensions, innermost first, are one run of memory. A block is a part of that run (some inner dimensions, the
// last of them in part), and a few such rows along q where an input is contiguous along another dimension than the output: so every cache
// line is read and written once, however large the strides are.
//
//   kRows     the input is contiguous along the output's innermost dimension: its rows are copied, wherever each lies
//   kSquares  a run of the output and a row along q are long: squares that fit in registers are transposed
//   kGather   short dimensions, and strides of any kind: element by element, from a table of where a run's elements lie
#pragma once

#include "plan.h"

namespace fusebackend::tile {

enum class Movement { kRows, kSquares, kGather };

struct Cut {
  Movement movement = Movement::kGather;
  int run_rank = 1;       // dimensions [0, run_rank) make a run,
  int64_t part = 1;       // of the last one so many elements
  int64_t inner = 1;      // elements of those before it
  int q = 0;              // the dimension of a block's rows, 0 for none
  int64_t rows = 1;
  int64_t least_part = 1, least_rows = 1;  // no block is shorter, the last one is longer instead
  int64_t units = 0;
};

Cut make_cut(const Plan& plan);

void permute_copy_cpu(const Plan& plan, const Cut& cut, int64_t begin, int64_t end);
void add_cpu(const Plan& plan, const Cut& cut, AddType type, Alpha alpha, int64_t begin, int64_t end);

}  // namespace fusebackend::tile
