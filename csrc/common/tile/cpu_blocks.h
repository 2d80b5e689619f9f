// The CPU loops' way through the blocks of a problem, and what both operations do in them.
#pragma once

#include <algorithm>
#include <cstring>

#include "common/tile/cpu_blocking.h"
#include "common/tile/cpu_squares.h"

namespace fusebackend::tile {

constexpr int64_t kGatherRun = 512;  // elements of a run in kGather: their cache lines and the table fit in the first-level cache
constexpr int64_t kMaxRun = 1024;    // in any movement

inline int64_t blocks_along(int64_t size, int64_t block, int64_t least) { return size <= block ? 1 : (size - least) / block + 1; }

struct Block {
  int64_t run;  // elements of each row
  int64_t rows;
  int64_t offset[3];  // of its first element, in bytes, by Operand
};

// Calls body(block) for blocks [begin, end).
template <typename Body>
void for_blocks(const Plan& plan, const Blocking& blocking, int64_t begin, int64_t end, Body body) {
  const Problem& p = plan.problem;
  // An odometer over parts of the run's last dimension, groups of rows, then the other dimensions.
  int rank = 0;
  int64_t count[kMaxRank + 1], step[3][kMaxRank + 1], digit[kMaxRank + 1];
  const auto push = [&](int dim, int64_t block, int64_t least) {
    count[rank] = blocks_along(p.sizes[dim], block, least);
    for (int r = 0; r < p.operands; ++r) step[r][rank] = p.strides[r][dim] * block * p.element_bytes;
    ++rank;
  };
  const int last = blocking.run_rank - 1;
  push(last, blocking.run_extent, blocking.min_extent);
  if (blocking.row_dim) push(blocking.row_dim, blocking.rows, blocking.min_rows);
  for (int d = blocking.run_rank; d < p.rank; ++d)
    if (d != blocking.row_dim) push(d, 1, 1);
  const auto extent = [&](int dim, int64_t block, int i) {
    return digit[i] + 1 < count[i] ? block : p.sizes[dim] - digit[i] * block;
  };

  int64_t rest = begin;
  Block block = {};
  for (int d = 0; d < rank; ++d) {
    digit[d] = rest % count[d];
    rest /= count[d];
    for (int r = 0; r < p.operands; ++r) block.offset[r] += digit[d] * step[r][d];
  }
  for (int64_t index = begin; index < end; ++index) {
    block.run = extent(last, blocking.run_extent, 0) * blocking.inner_length;
    block.rows = blocking.row_dim ? extent(blocking.row_dim, blocking.rows, 1) : 1;
    body(block);
    for (int d = 0; d < rank; ++d) {
      for (int r = 0; r < p.operands; ++r) block.offset[r] += step[r][d];
      if (++digit[d] < count[d]) break;
      for (int r = 0; r < p.operands; ++r) block.offset[r] -= count[d] * step[r][d];
      digit[d] = 0;
    }
  }
}

// The offsets in an operand, in bytes, of a run's elements in the output's order; with `first` = 1, of its rows. A shorter run, at an end,
// uses the first of them.
class OffsetTable {
 public:
  OffsetTable(const Plan& plan, const Blocking& blocking, Operand operand, int first = 0) {
    const Problem& p = plan.problem;
    int64_t n = 1;
    offset_[0] = offset_[1] = 0;
    for (int d = first; d < blocking.run_rank; ++d) {
      const bool last = d == blocking.run_rank - 1;
      const int64_t size = last ? std::min(blocking.run_extent + blocking.min_extent - 1, p.sizes[d]) : p.sizes[d];
      const int64_t step = p.strides[operand][d] * p.element_bytes;
      for (int64_t i = n; i < n * size; ++i) offset_[i] = offset_[i - n] + step;
      n *= size;
    }
  }
  int64_t operator[](int64_t i) const { return offset_[i]; }
  const int64_t* data() const { return offset_; }

 private:
  int64_t offset_[kMaxRun + 16];  // the last run is longer by less than a square
};

// Whether an operand's runs are contiguous.
inline bool is_dense(const Plan& plan, const Blocking& blocking, Operand operand) {
  const Problem& p = plan.problem;
  return std::equal(p.strides[operand], p.strides[operand] + blocking.run_rank, p.strides[kOut]);
}

// Whether it is constant along them.
inline bool is_constant(const Plan& plan, const Blocking& blocking, Operand operand) {
  return blocking.run_rank == 1 && plan.problem.strides[operand][0] == 0;
}

// Gathers a run of `n` elements. A run of one dimension needs no table, only its step.
template <typename E>
void gather(char* __restrict to, const char* from, const OffsetTable& __restrict table, int64_t n, bool one_dim) {
  E* target = reinterpret_cast<E*>(to);
  if (one_dim) {
    const int64_t step = table[1];
#pragma GCC unroll 8
    for (int64_t i = 0; i < n; ++i) std::memcpy(target + i, from + i * step, sizeof(E));
    return;
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < n; ++i) std::memcpy(target + i, from + table[i], sizeof(E));
}

}  // namespace fusebackend::tile
