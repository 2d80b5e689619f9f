// The CPU loops' way through a problem that is cut (cpu.h), and what both operations do in it.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu.h"
#include "cpu_squares.h"

namespace fusebackend::tile {

constexpr int64_t kRun = 512;             // kGather: elements of a run; their lines and the table fit into the first cache
constexpr int64_t kTileLength = 1024;     // kSquares: a block's extent along o, the innermost dimension
constexpr int64_t kTileBytes = 32768;     // kSquares where a dimension is short, and kRows
constexpr int64_t kSmallSquares = 512;    // kSquares: elements of a block below which setting it up costs more than a gather
constexpr int64_t kUnits = 8;             // a small problem is cut into so many blocks, that threads may finish together

inline int64_t blocks_along(int64_t size, int64_t block, int64_t least) { return size <= block ? 1 : (size - least) / block + 1; }

struct Block {
  int64_t run;        // elements of each row
  int64_t rows;
  int64_t offset[3];  // of its first element in bytes, by Role
};

// Calls body(block) for units [begin, end).
template <typename Body>
void for_blocks(const Plan& plan, const Cut& cut, int64_t begin, int64_t end, Body body) {
  const Problem& p = plan.problem;
  // An odometer over parts of the run's last dimension, blocks of q, then the other dimensions.
  int rank = 0;
  int64_t count[kMaxRank + 1], step[3][kMaxRank + 1], digit[kMaxRank + 1];
  const auto push = [&](int dim, int64_t block, int64_t least) {
    count[rank] = blocks_along(p.sizes[dim], block, least);
    for (int r = 0; r < p.operands; ++r) step[r][rank] = p.strides[r][dim] * block * p.element_bytes;
    ++rank;
  };
  const int last = cut.run_rank - 1;
  push(last, cut.part, cut.least_part);
  if (cut.q) push(cut.q, cut.rows, cut.least_rows);
  for (int d = cut.run_rank; d < p.rank; ++d)
    if (d != cut.q) push(d, 1, 1);
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
  for (int64_t unit = begin; unit < end; ++unit) {
    block.run = extent(last, cut.part, 0) * cut.inner;
    block.rows = cut.q ? extent(cut.q, cut.rows, 1) : 1;
    body(block);
    for (int d = 0; d < rank; ++d) {
      for (int r = 0; r < p.operands; ++r) block.offset[r] += step[r][d];
      if (++digit[d] < count[d]) break;
      for (int r = 0; r < p.operands; ++r) block.offset[r] -= count[d] * step[r][d];
      digit[d] = 0;
    }
  }
}

// Where the elements of a run lie in an operand, in bytes and in the output's order; from dimension 1 on, where its rows do.
// A run that is shorter, at an end, uses the first of them.
class Table {
 public:
  Table(const Plan& plan, const Cut& cut, Role role, int first = 0) {
    const Problem& p = plan.problem;
    int64_t n = 1;
    offset_[0] = offset_[1] = 0;
    for (int d = first; d < cut.run_rank; ++d) {
      const bool last = d == cut.run_rank - 1;
      const int64_t size = last ? std::min(cut.part + cut.least_part - 1, p.sizes[d]) : p.sizes[d], step = p.strides[role][d] * p.element_bytes;
      for (int64_t i = n; i < n * size; ++i) offset_[i] = offset_[i - n] + step;
      n *= size;
    }
  }
  int64_t operator[](int64_t i) const { return offset_[i]; }
  const int64_t* data() const { return offset_; }

 private:
  int64_t offset_[kTileLength + 16];  // a last run is longer by less than a square
};

// Whether an operand's runs are contiguous as they are.
inline bool is_dense(const Plan& plan, const Cut& cut, Role role) {
  const Problem& p = plan.problem;
  return std::equal(p.strides[role], p.strides[role] + cut.run_rank, p.strides[kOut]);
}

// Whether it is constant along them.
inline bool is_constant(const Plan& plan, const Cut& cut, Role role) {
  return cut.run_rank == 1 && plan.problem.strides[role][0] == 0;
}

// The elements of a run; one of one dimension needs no table, only its step.
template <typename E>
void gather(char* __restrict to, const char* from, const Table& __restrict table, int64_t n, bool one_dim) {
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
