// A strided elementwise problem: the common form of
//
//   permute_copy    out[i] = x[i]
//   transpose_add   out[i] = x[i] + alpha * y[i]
//
// All operands are seen in one index space of rank <= 16, each through its own strides (0 where it is broadcast). The output must not
// overlap itself or an input. Knows nothing of torch.
#pragma once

#include <cstdint>

namespace fusebackend::tile {

constexpr int kMaxRank = 16;
enum Operand : int { kOut = 0, kX = 1, kY = 2 };

struct Problem {
  int rank = 0;
  int operands = 2;       // 2: out and x. 3: out, x and y.
  int element_bytes = 0;  // 1, 2, 4, 8 or 16
  int64_t sizes[kMaxRank] = {};
  int64_t strides[3][kMaxRank] = {};  // by Operand; in elements, >= 0
  char* data[3] = {};                 // by Operand

  bool is_sum() const { return operands == 3; }

  int64_t elements() const {
    int64_t n = 1;
    for (int d = 0; d < rank; ++d) n *= sizes[d];
    return n;
  }

  // Bytes from an operand's first to past its last byte.
  int64_t extent_bytes(Operand operand) const {
    int64_t last = 0;
    for (int d = 0; d < rank; ++d) last += (sizes[d] - 1) * strides[operand][d];
    return (last + 1) * element_bytes;
  }
};

}  // namespace fusebackend::tile
