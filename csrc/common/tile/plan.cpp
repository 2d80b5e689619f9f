#include "common/tile/plan.h"

#include <algorithm>
#include <utility>

namespace fusebackend::tile {
namespace {

void copy_dim(Problem& p, int to, int from) {
  p.sizes[to] = p.sizes[from];
  for (int r = 0; r < p.operands; ++r) p.strides[r][to] = p.strides[r][from];
}

void swap_dims(Problem& p, int i, int j) {
  std::swap(p.sizes[i], p.sizes[j]);
  for (int r = 0; r < p.operands; ++r) std::swap(p.strides[r][i], p.strides[r][j]);
}

// Whether `inner` and the next dimension are one to every operand.
bool mergeable(const Problem& p, int inner) {
  for (int r = 0; r < p.operands; ++r)
    if (p.strides[r][inner + 1] != p.strides[r][inner] * p.sizes[inner]) return false;
  return true;
}

void drop_unit_dims(Problem& p) {
  int kept = 0;
  for (int d = 0; d < p.rank; ++d)
    if (p.sizes[d] != 1) copy_dim(p, kept++, d);
  p.rank = kept;
}

void sort_by_output(Problem& p) {
  for (int d = 1; d < p.rank; ++d)
    for (int e = d; e > 0 && p.strides[kOut][e] < p.strides[kOut][e - 1]; --e) swap_dims(p, e, e - 1);
}

void merge_dims(Problem& p) {
  int last = 0;
  for (int d = 1; d < p.rank; ++d) {
    copy_dim(p, last + 1, d);
    if (mergeable(p, last))
      p.sizes[last] *= p.sizes[last + 1];
    else
      ++last;
  }
  p.rank = p.rank > 0 ? last + 1 : 0;
}

uintptr_t address_bits(const Problem& p) {
  uintptr_t bits = 0;
  for (int r = 0; r < p.operands; ++r) bits |= reinterpret_cast<uintptr_t>(p.data[r]);
  return bits;
}

// Elements may be less aligned than their size, as those of torch.frombuffer: their aligned parts are moved instead.
void split_misaligned(Problem& p) {
  const uintptr_t bits = address_bits(p);
  int bytes = p.element_bytes;
  while (bits & (bytes - 1)) bytes /= 2;
  const int parts = p.element_bytes / bytes;
  if (parts == 1 || p.rank == kMaxRank) return;
  for (int d = p.rank; d > 0; --d) {
    copy_dim(p, d, d - 1);
    for (int r = 0; r < p.operands; ++r) p.strides[r][d] *= parts;
  }
  p.sizes[0] = parts;
  for (int r = 0; r < p.operands; ++r) p.strides[r][0] = 1;
  ++p.rank;
  p.element_bytes = bytes;
}

// Where all operands are contiguous along the innermost dimension, and sizes, strides and addresses are even, two elements move as one;
// repeatedly.
void widen(Problem& p) {
  const uintptr_t bits = address_bits(p);
  const auto can_double = [&] {
    if (p.rank == 0 || p.element_bytes == 16 || p.sizes[0] % 2 || (bits & (2 * p.element_bytes - 1))) return false;
    for (int r = 0; r < p.operands; ++r) {
      if (p.strides[r][0] != 1) return false;
      for (int d = 1; d < p.rank; ++d)
        if (p.strides[r][d] % 2) return false;
    }
    return true;
  };
  while (can_double()) {
    p.element_bytes *= 2;
    p.sizes[0] /= 2;
    for (int r = 0; r < p.operands; ++r)
      for (int d = 1; d < p.rank; ++d) p.strides[r][d] /= 2;
    if (p.sizes[0] == 1) {
      drop_unit_dims(p);
      merge_dims(p);
    }
  }
}

// The dimension along which an input's stride is least; the output's innermost one, 0, if no other is less.
int fastest_dim(const Problem& p, int operand) {
  int best = 0;
  for (int d = 1; d < p.rank; ++d) {
    const int64_t s = p.strides[operand][d];
    if (s > 0 && s < p.strides[operand][best]) best = d;
  }
  return best;
}

// Brings a problem into the form that Plan::problem describes. False if it is empty.
bool simplify(Problem& p) {
  if (p.elements() == 0) return false;
  drop_unit_dims(p);
  sort_by_output(p);
  if (!p.is_sum()) split_misaligned(p);
  merge_dims(p);
  if (!p.is_sum()) widen(p);
  if (p.rank == 0) {  // a single element
    p.rank = 1;
    p.sizes[0] = 1;
    for (int r = 0; r < p.operands; ++r) p.strides[r][0] = 1;
  }
  return true;
}

}  // namespace

Plan make_plan(const Problem& problem) {
  Plan plan;
  plan.problem = problem;
  Problem& p = plan.problem;
  plan.is_empty = !simplify(p);
  if (plan.is_empty || p.strides[kOut][0] != 1) return plan;
  for (int r = kX; r < p.operands && !plan.transposes(); ++r) {  // only the first: a second one is gathered, element by element
    plan.staged_dim = fastest_dim(p, r);
    if (plan.transposes()) plan.staged = Operand(r);
  }
  const int64_t *x = p.strides[kX], *y = p.strides[kY];
  plan.staged_pair = plan.transposes() && p.is_sum() && std::equal(x, x + p.rank, y);
  return plan;
}

}  // namespace fusebackend::tile
