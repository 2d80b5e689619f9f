// The dimensions outside a row or tile, walked by one linear index.
#pragma once

#include "common/cuda_common.cuh"
#include "common/tile/problem.h"

namespace fusebackend::tile {

// Strides, in bytes, of the output and of up to two inputs.
struct BatchDim {
  FastDiv size;
  int64_t out, first, second;
};

struct Batch {
  int rank = 0;
  BatchDim dim[kMaxRank];

  // Appends dimension `d`; returns it.
  const BatchDim& push(const Problem& p, int d, Operand first, Operand second) {
    const int64_t w = p.element_bytes;
    return dim[rank++] = {FastDiv(uint32_t(p.sizes[d])), p.strides[kOut][d] * w, p.strides[first][d] * w, p.strides[second][d] * w};
  }

  // Adds the offsets of batch item `index` to the pointers. Not unrolled: a kernel's code and arguments are read from memory at every call,
  // which takes longer than these few steps.
  __device__ void advance(uint32_t index, char*& out, const char*& first, const char*& second) const {
#pragma unroll 1
    for (int d = 0; d < rank; ++d) {
      uint32_t i;
      dim[d].size.divmod(index, index, i);
      out += i * dim[d].out;
      first += i * dim[d].first;
      second += i * dim[d].second;
    }
  }
};

}  // namespace fusebackend::tile
