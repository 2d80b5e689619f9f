// Host planning, the same for CPU and CUDA: reduces a problem to its simplest equivalent and names the route that fits it.
// Costs well under 2 us; allocates nothing.
#pragma once

#include "tile.h"

namespace fusebackend::tile {

enum class Route : int {
  kEmpty,  // nothing to do
  kRows,   // every operand is contiguous or broadcast along the output's innermost dimension, or nothing better exists (strided)
  kTiles,  // an input is contiguous along another dimension: 2-D transposing tiles
};

struct Plan {
  Route route = Route::kEmpty;
  Problem problem;  // simplified: dimensions merged and sorted, [0] the innermost of the output; elements as wide as they may be
  int staged = kA;        // kTiles: the operand that goes through the tile
  int staged_dim = 0;     // kTiles: the dimension along which it is (nearly) contiguous
  bool staged_pair = false;  // kTiles: a and b have the same order and both go through the tile, added on the way in
};

// Reduces `problem` in place: size-1 dimensions dropped, dimensions sorted by output stride (innermost first) and merged where all
// operands allow it, misaligned elements split, and, for copies, elements widened to at most 16 bytes. False if it is empty.
bool simplify(Problem& problem);

Plan make_plan(const Problem& problem);

// Bytes from an operand's first to past its last byte.
int64_t extent_bytes(const Problem& problem, Role role);

}  // namespace fusebackend::tile
