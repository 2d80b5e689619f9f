#include "cpu_blocks.h"

namespace fusebackend::tile {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The largest extent of at most `limit` that cuts `size` into even parts, of whole multiples of `unit` where there are several.
int64_t even_part(int64_t size, int64_t limit, int64_t unit = 1) {
  if (size <= limit) return size;
  return std::min(limit, ceil_div(ceil_div(size, ceil_div(size, limit)), unit) * unit);
}

int64_t count_units(const Problem& p, const Cut& cut) {
  int64_t units = blocks_along(p.sizes[cut.run_rank - 1], cut.part, cut.least_part);
  for (int d = cut.run_rank; d < p.rank; ++d) units *= d == cut.q ? blocks_along(p.sizes[d], cut.rows, cut.least_rows) : p.sizes[d];
  return units;
}

// The side of a square; 0 where there are none.
int64_t square_side(int element_bytes) {
  switch (element_bytes) {
    case 1: return SquareTranspose<uint8_t>::kN;
    case 2: return SquareTranspose<uint16_t>::kN;
    case 4: return SquareTranspose<uint32_t>::kN;
    case 8: return SquareTranspose<uint64_t>::kN;
    default: return 0;
  }
}

// A run of as many dimensions of [first, end) as `limit` elements hold, the last of them in part.
void cut_run(const Problem& p, int first, int end, int64_t limit, Cut& cut) {
  int64_t whole = 1;
  int d = first;
  while (d < end - 1 && whole * p.sizes[d] <= limit / 2) whole *= p.sizes[d++];
  cut.run_rank = d + 1;
  cut.part = even_part(p.sizes[d], std::max<int64_t>(1, limit / whole));
  cut.inner = whole;
}

// Tries squares. Every input must come into a block's rows: it is contiguous or constant along the run, or contiguous along q.
bool cut_squares(const Plan& plan, Cut& cut) {
  const Problem& p = plan.problem;
  const int64_t side = square_side(p.element_bytes), line = kLineBytes / p.element_bytes, elements = kTileBytes / p.element_bytes;
  if (plan.route != Route::kTiles || side == 0) return false;
  cut.q = plan.staged_dim;
  const int64_t q = p.sizes[cut.q], limit = q >= line ? kTileLength : std::clamp(elements / q, elements / 64, kTileLength);
  cut_run(p, 0, p.sizes[0] >= line ? 1 : cut.q, limit, cut);
  int64_t& part = cut.part;
  const int64_t last = p.sizes[cut.run_rank - 1], unit = cut.inner == 1 ? line : 1, run = cut.inner * last;
  if (std::min(run, q) < side || run * q < kSmallSquares) return false;
  for (int role = kA; role < p.operands; ++role)
    if (!is_dense(plan, cut, Role(role)) && !is_constant(plan, cut, Role(role)) && p.strides[role][cut.q] != 1) return false;
  part = even_part(last, std::max<int64_t>(1, limit / cut.inner), unit);
  // Where one dimension is short, the other is longer.
  cut.rows = std::min(q, run >= line ? line : std::max(line, elements / run / line * line));
  if (q < line) cut.rows = q;
  cut.least_part = ceil_div(side, cut.inner);
  cut.least_rows = side;
  for (; count_units(p, cut) < kUnits && part > 1 && part * cut.inner >= 4 * line; part = even_part(last, part / 2, unit)) {}
  for (; count_units(p, cut) < kUnits && cut.rows >= 4 * line; cut.rows /= 2) {}
  cut.least_part = std::min(cut.least_part, part);
  cut.movement = Movement::kSquares;
  return true;
}

}  // namespace

Cut make_cut(const Plan& plan) {
  Cut cut;
  const Problem& p = plan.problem;
  if (plan.route == Route::kEmpty) return cut;
  const int64_t row_bytes = p.sizes[0] * p.element_bytes;
  if (cut_squares(plan, cut)) {
    cut.units = count_units(p, cut);
    return cut;
  }
  cut = {};
  if (p.operands == 2 && p.strides[kA][0] == 1) {
    cut.movement = Movement::kRows;
    if (row_bytes > 2 * kTileBytes || p.rank == 1) {
      cut.part = even_part(p.sizes[0], kTileBytes / p.element_bytes, kLineBytes / p.element_bytes);
    } else {
      cut_run(p, 1, p.rank, std::clamp<int64_t>(kTileBytes / row_bytes, 1, kRun), cut);
      cut.inner *= p.sizes[0];
    }
  } else {
    cut_run(p, 0, p.rank, kRun, cut);
    if (plan.route == Route::kTiles && plan.staged_dim >= cut.run_rank) {
      cut.q = plan.staged_dim;
      cut.rows = std::min(p.sizes[cut.q], kLineBytes / p.element_bytes);
      while (count_units(p, cut) < kUnits && cut.rows > 1) cut.rows = ceil_div(cut.rows, 2);
    }
  }
  cut.units = count_units(p, cut);
  return cut;
}

}  // namespace fusebackend::tile
