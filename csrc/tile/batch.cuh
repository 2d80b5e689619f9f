// The dimensions outside a row or tile, walked by one linear index.
#pragma once

#include "../common/cuda_common.cuh"
#include "tile.h"

namespace fusebackend::tile {

struct Batch {
  int rank = 0;
  FastDiv size[kMaxRank];
  int64_t stride[3][kMaxRank] = {};  // by Role; in bytes

  void push(const Problem& p, int dim) {
    size[rank] = FastDiv(uint32_t(p.sizes[dim]));
    for (int r = 0; r < p.operands; ++r) stride[r][rank] = p.strides[r][dim] * p.element_bytes;
    ++rank;
  }

  // Adds the offsets of batch item `index` to the three pointers.
  __device__ void advance(uint32_t index, char*& out, const char*& a, const char*& b) const {
    for (int d = 0; d < rank; ++d) {
      uint32_t quotient, i;
      if (d + 1 < rank) {
        size[d].divmod(index, quotient, i);
        index = quotient;
      } else {
        i = index;
      }
      out += i * stride[kOut][d];
      a += i * stride[kA][d];
      b += i * stride[kB][d];
    }
  }
};

}  // namespace fusebackend::tile
