#include "plan.h"

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

// True if (i, i + 1) is one dimension to every operand.
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

// A view_as_complex may give elements that are not aligned to their own size: move their aligned parts instead.
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

// Where the innermost dimension is shared and everything else agrees, 2, 4 ... elements move as one.
void widen(Problem& p) {
  const uintptr_t bits = address_bits(p);
  const auto doubles = [&] {
    if (p.rank == 0 || p.element_bytes == 16 || p.sizes[0] % 2 || (bits & (2 * p.element_bytes - 1))) return false;
    for (int r = 0; r < p.operands; ++r) {
      if (p.strides[r][0] != 1) return false;
      for (int d = 1; d < p.rank; ++d)
        if (p.strides[r][d] % 2) return false;
    }
    return true;
  };
  while (doubles()) {
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

// The dimension along which an operand is read best in its own order, or 0 if the output's order is as good.
int fastest_dim(const Problem& p, int role) {
  int best = 0;
  for (int d = 1; d < p.rank; ++d) {
    const int64_t s = p.strides[role][d];
    if (s > 0 && s < p.strides[role][best]) best = d;
  }
  return best;
}

bool same_strides(const Problem& p, int x, int y) {
  return std::equal(p.strides[x], p.strides[x] + p.rank, p.strides[y]);
}

}  // namespace

bool simplify(Problem& p) {
  for (int d = 0; d < p.rank; ++d)
    if (p.sizes[d] == 0) return false;
  drop_unit_dims(p);
  sort_by_output(p);
  if (p.operands == 2) split_misaligned(p);
  merge_dims(p);
  if (p.operands == 2) widen(p);
  if (p.rank == 0) {  // a single element
    p.rank = 1;
    p.sizes[0] = 1;
    for (int r = 0; r < p.operands; ++r) p.strides[r][0] = 1;
  }
  return true;
}

Plan make_plan(const Problem& problem) {
  Plan plan;
  plan.problem = problem;
  Problem& p = plan.problem;
  if (!simplify(p)) return plan;
  plan.route = Route::kRows;
  if (p.strides[kOut][0] != 1) return plan;
  for (int role = kA; role < p.operands; ++role) {
    const int dim = fastest_dim(p, role);
    if (dim == 0) continue;
    // Two inputs that both want the tile in different orders: the one with the larger gain is the first found; the other is gathered.
    plan.route = Route::kTiles;
    plan.staged = role;
    plan.staged_dim = dim;
    break;
  }
  if (plan.route == Route::kTiles && p.operands == 3) plan.staged_pair = same_strides(p, kA, kB);
  return plan;
}

int64_t extent_bytes(const Problem& p, Role role) {
  int64_t last = 0;
  for (int d = 0; d < p.rank; ++d) last += (p.sizes[d] - 1) * p.strides[role][d];
  return (last + 1) * p.element_bytes;
}

}  // namespace fusebackend::tile
