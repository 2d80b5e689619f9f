// What a plan makes a GPU do, in physical quantities, for estimates of its time.
#pragma once

#include <string>

#include "common/tile/plan.h"

namespace fusebackend::tile {

// "name=value" pairs, separated by spaces:
//   tiles, boxes    1 for the route that is taken; neither for rows
//   element         bytes of an element as it is moved
//   in_align, out_align   bytes to which rows of the staged input and of the output are aligned, up to a line
//   in_run, out_run       bytes of a row, or of a box's run, of the staged input and of the output
//   blocks          of the grid
//   block_bytes     that a block moves into the output
//   moved           elements that blocks hold, over those that there are
//   shared          bytes of shared memory of a block
//   layout          how a box's runs lie in shared memory (RunLayout)
//   inner           elements of a box's run at one index of its last dimension
//   gathers         1 where the staged input, or 1 more where the direct one, is read element by element
std::string work_of(const Plan& plan);

}  // namespace fusebackend::tile
