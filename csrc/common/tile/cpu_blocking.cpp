#include "common/tile/cpu_blocking.h"

#include "common/integer_math.h"
#include "common/tile/cpu_blocks.h"

namespace fusebackend::tile {
namespace {

constexpr int64_t kBlockBytes = 32768;      // kRows, and kSquares where a dimension is short
constexpr int64_t kMinSquareElements = 512;  // elements below which setting up squares costs more than a gather
constexpr int64_t kMinBlocks = 8;           // small problems are cut into so many blocks, that threads may finish together

// The largest extent of at most `limit` that cuts `size` into even parts; where there are several, in multiples of `unit`.
int64_t even_part(int64_t size, int64_t limit, int64_t unit = 1) {
  return size <= limit ? size : std::min(limit, round_up(ceil_div(size, ceil_div(size, limit)), unit));
}

int64_t count_blocks(const Problem& p, const Blocking& b) {
  int64_t blocks = blocks_along(p.sizes[b.run_rank - 1], b.run_extent, b.min_extent);
  for (int d = b.run_rank; d < p.rank; ++d) blocks *= d == b.row_dim ? blocks_along(p.sizes[d], b.rows, b.min_rows) : p.sizes[d];
  return blocks;
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

// Makes a run of as many dimensions of [first, end) as `limit` elements hold, the last of them in part.
void choose_run(const Problem& p, int first, int end, int64_t limit, Blocking& b) {
  int64_t whole = 1;
  int d = first;
  while (d < end - 1 && whole * p.sizes[d] <= limit / 2) whole *= p.sizes[d++];
  b.run_rank = d + 1;
  b.run_extent = even_part(p.sizes[d], std::max<int64_t>(1, limit / whole));
  b.inner_length = whole;
}

// Squares, if every input can be read by a block's rows: it is contiguous or constant along the run, or contiguous along the rows' dimension.
bool choose_squares(const Plan& plan, Blocking& b) {
  const Problem& p = plan.problem;
  const int64_t side = square_side(p.element_bytes), line = kCpuLineBytes / p.element_bytes, elements = kBlockBytes / p.element_bytes;
  if (!plan.transposes() || side == 0) return false;
  b.row_dim = plan.staged_dim;
  const int64_t q = p.sizes[b.row_dim], limit = q >= line ? kMaxRun : std::clamp(elements / q, elements / 64, kMaxRun);
  choose_run(p, 0, p.sizes[0] >= line ? 1 : b.row_dim, limit, b);
  int64_t& extent = b.run_extent;
  const int64_t last = p.sizes[b.run_rank - 1], unit = b.inner_length == 1 ? line : 1, run = b.inner_length * last;
  if (std::min(run, q) < side || run * q < kMinSquareElements) return false;
  for (int r = kX; r < p.operands; ++r)
    if (!is_dense(plan, b, Operand(r)) && !is_constant(plan, b, Operand(r)) && p.strides[r][b.row_dim] != 1) return false;
  extent = even_part(last, std::max<int64_t>(1, limit / b.inner_length), unit);
  // Where one dimension is short, the other is longer.
  b.rows = std::min(q, run >= line ? line : std::max(line, elements / run / line * line));
  if (q < line) b.rows = q;
  b.min_extent = ceil_div(side, b.inner_length);
  b.min_rows = side;
  while (count_blocks(p, b) < kMinBlocks && extent > 1 && extent * b.inner_length >= 4 * line) extent = even_part(last, extent / 2, unit);
  while (count_blocks(p, b) < kMinBlocks && b.rows >= 4 * line) b.rows /= 2;
  b.min_extent = std::min(b.min_extent, extent);
  b.movement = Movement::kSquares;
  return true;
}

void choose_rows(const Problem& p, Blocking& b) {
  const int64_t row_bytes = p.sizes[0] * p.element_bytes;
  b.movement = Movement::kRows;
  if (row_bytes > 2 * kBlockBytes || p.rank == 1) {
    b.run_extent = even_part(p.sizes[0], kBlockBytes / p.element_bytes, kCpuLineBytes / p.element_bytes);
  } else {
    choose_run(p, 1, p.rank, std::clamp<int64_t>(kBlockBytes / row_bytes, 1, kGatherRun), b);
    b.inner_length *= p.sizes[0];
  }
}

void choose_gather(const Plan& plan, Blocking& b) {
  const Problem& p = plan.problem;
  choose_run(p, 0, p.rank, kGatherRun, b);
  if (!plan.transposes() || plan.staged_dim < b.run_rank) return;
  b.row_dim = plan.staged_dim;
  b.rows = std::min(p.sizes[b.row_dim], kCpuLineBytes / p.element_bytes);
  while (count_blocks(p, b) < kMinBlocks && b.rows > 1) b.rows = ceil_div(b.rows, 2);
}

}  // namespace

Blocking make_blocking(const Plan& plan) {
  Blocking b;
  if (plan.is_empty) return b;
  if (!choose_squares(plan, b)) {
    b = {};
    if (!plan.problem.is_sum() && plan.problem.strides[kX][0] == 1) choose_rows(plan.problem, b);
    else choose_gather(plan, b);
  }
  b.blocks = count_blocks(plan.problem, b);
  return b;
}

}  // namespace fusebackend::tile
