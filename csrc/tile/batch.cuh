// The dimensions outside a row or tile, walked by one linear index.
#pragma once

#include "../common/cuda_common.cuh"
#include "tile.h"

namespace fusebackend::tile {

struct BatchDim {
  FastDiv size;
  int64_t stride[3] = {};  // by Role; in bytes
};

struct Batch {
  int rank = 0;
  BatchDim dim[kMaxRank];

  void push(const Problem& p, int d) {
    dim[rank].size = FastDiv(uint32_t(p.sizes[d]));
    for (int r = 0; r < p.operands; ++r) dim[rank].stride[r] = p.strides[r][d] * p.element_bytes;
    ++rank;
  }

  // Adds the offsets of batch item `index` to the three pointers. (Not unrolled: a kernel's code and arguments are read from memory at
  // every call, which takes longer than these few steps.)
  __device__ void advance(uint32_t index, char*& out, const char*& a, const char*& b) const {
#pragma unroll 1
    for (int d = 0; d < rank; ++d) {
      uint32_t i;
      dim[d].size.divmod(index, index, i);
      out += i * dim[d].stride[kOut];
      a += i * dim[d].stride[kA];
      b += i * dim[d].stride[kB];
    }
  }
};

}  // namespace fusebackend::tile
