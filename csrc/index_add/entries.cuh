// What an entry means: its row of out, its row of source, its factor, and where the columns of these rows lie.
#pragma once

#include <cassert>

#include "index_add/element_types.cuh"
#include "index_add/shapes.h"

namespace fusebackend::index_add {

__device__ __forceinline__ int64_t load_index(const EntryVector& v, int64_t i) {
  return v.is64 ? __ldg(static_cast<const long long*>(v.data) + i * v.stride) : __ldg(static_cast<const int*>(v.data) + i * v.stride);
}

// An index that is out of range stops the kernel as PyTorch's own assertion does, before anything is read or written there.
__device__ __forceinline__ int64_t checked_row(int64_t row, int64_t rows, bool wrap_negative) {
  if (wrap_negative && row < 0) row += rows;
  assert(row >= 0 && row < rows && "index out of bounds");
  return row;
}

// The row of out that an index means; -1 if the entry adds nothing.
template <typename P>  // Params, or a smaller struct with members of the same names
__device__ __forceinline__ int64_t target_row(const P& p, int64_t index) {
  if (p.has_ignore && index == p.ignore) return -1;
  if (p.bounds == Bounds::kDrop) return index >= 0 && index < p.rows ? index : -1;
  return checked_row(index, p.rows, p.bounds == Bounds::kWrap);
}

__device__ __forceinline__ int64_t looked_up_source_row(const Params& p, int64_t entry) {
  return checked_row(load_index(p.source_index, entry), p.source_rows, p.source_wraps);
}
__device__ __forceinline__ int64_t source_row(const Params& p, int64_t entry) {
  return p.source_index.data ? looked_up_source_row(p, entry) : entry;
}

// alpha * weight
template <typename T>
__device__ __forceinline__ Acc<T> factor_of(const Params& p, int64_t entry) {
  using A = Acc<T>;
  return A(p.alpha) * (p.weight.data ? widen<A>(static_cast<const T*>(p.weight.data)[entry * p.weight.stride]) : A(1));
}

// a / b, in 32 bits where both fit, which takes a third of the instructions.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) { return (a | b) >> 32 ? a / b : int64_t(uint32_t(a) / uint32_t(b)); }

// Offsets of column c (in units of V elements along the last slice dimension) in a row of out and of source.
template <int V>
__device__ __forceinline__ void column_offsets(const Params& p, int64_t c, int64_t& out, int64_t& source) {
  out = source = 0;
#pragma unroll 1  // otherwise divisions for each dimension are most of a kernel's code
  for (int d = p.n_dims - 1; d >= 0; --d) {
    const int64_t size = d == p.n_dims - 1 ? p.dims[d].size / V : p.dims[d].size, step = d == p.n_dims - 1 ? V : 1;
    int64_t i = c;
    if (d > 0) {
      const int64_t q = quotient(c, size);
      i = c - q * size;
      c = q;
    }
    out += i * step * p.dims[d].out_stride;
    source += i * step * p.dims[d].source_stride;
  }
}

}  // namespace fusebackend::index_add
