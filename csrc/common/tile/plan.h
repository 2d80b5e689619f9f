// What CPU and CUDA share of planning: the simplest equivalent of a problem, and which of its inputs has to be transposed.
// Takes well under 2 us and allocates nothing.
#pragma once

#include "common/tile/problem.h"

namespace fusebackend::tile {

struct Plan {
  bool is_empty = true;  // no elements
  // Simplified: no dimensions of size 1, sorted by the output's strides ([0] is its innermost dimension), merged where all operands allow
  // it. Elements of copies are as wide as sizes, strides and addresses allow, up to 16 bytes; none is less aligned than its size.
  Problem problem;
  // The input to transpose, and the dimension along which its stride is least. 0, the output's own innermost dimension: no input has to be
  // transposed. CUDA kernels stage this input in shared memory.
  Operand staged = kX;
  int staged_dim = 0;
  bool staged_pair = false;  // x and y have the same strides: both are staged, as their sum

  bool transposes() const { return staged_dim > 0; }
  // The other input of a sum.
  Operand other() const { return staged == kX ? kY : kX; }
  // Whether the other input is read directly, in the output's order.
  bool has_direct() const { return problem.is_sum() && !staged_pair; }
};

Plan make_plan(const Problem& problem);

}  // namespace fusebackend::tile
