// Which CUDA kernel serves a plan. Host code that needs no CUDA, so that it can be asked anywhere.
#pragma once

#include "common/tile/memory_units.h"
#include "common/tile/plan.h"

namespace fusebackend::tile {

enum class Route : int {
  kEmpty,  // nothing is launched
  kRows,   // rows.cuh: rows of the output, nothing transposed
  kTiles,  // tiles.cuh: two-dimensional tiles, transposed in shared memory
  kBoxes,  // boxes.cuh: blocks of several dimensions, for short and misaligned rows
};
Route route_of(const Plan& plan);
const char* route_name(Route route);

// A tile has tile_o elements along o, the output's innermost dimension, and tile_q along q, the staged input's (Plan::staged_dim).
constexpr int kTileBytes = 16384;
// Sums of 2-byte elements whose output rows begin within sectors have long tiles: rows of the input that two tiles read are fewer.
constexpr int tile_o(int element_bytes, bool is_sum, bool cuts_sectors) {
  const bool is_long = element_bytes == 2 && is_sum && cuts_sectors;
  return element_bytes == 1 || is_long ? 128 : element_bytes <= 4 ? 64 : 32;
}
constexpr int tile_q(int element_bytes) { return kTileBytes / element_bytes / tile_o(element_bytes, false, false); }

// The union of the low bits of the addresses at which an operand's rows along dimension `dim` begin: all are multiples of a power of two
// if and only if this is one.
uintptr_t row_address_bits(const Problem& problem, Operand operand, int dim = 0);

// Whether all rows of all operands are contiguous, aligned and whole chunks.
bool rows_are_whole(const Problem& problem);

}  // namespace fusebackend::tile
