#include <algorithm>
#include <numeric>

#include "column_sum/column_sum.h"
#include "common/integer_math.h"

namespace fusebackend::column_sum {
namespace {

constexpr int kLeastThreads = 128, kWarp = 32;
constexpr int kTileVectors = 64;                // of a row that one block sums at most: more would leave more sums for the second kernel
constexpr int kLine = 8;                        // vectors of 16 bytes in a cache line
constexpr int kStepsOfAKernel = 4;              // of a thread, each a wait for memory, that take as long as launching a second kernel
constexpr int kMostWaves = 4;                   // of blocks
constexpr double kWaveCost = 0.05;              // the part of the multiprocessors' time that another wave of blocks must save
constexpr int kThreadsOfMultiprocessor = 1024;  // that find room with 64 registers each; half as many where more than sums of x are computed

// The longest vector, up to 16 bytes, at whose multiples all of these byte counts lie.
int common_alignment(std::initializer_list<int64_t> bytes) {
  int64_t unit = 16;
  for (int64_t b : bytes) unit = std::gcd(unit, b);
  return int(unit);
}

// The longest loads that rows without a gap between them allow, if `fold` of them may be read as one, or that each row allows by itself.
int load_bytes(const Problem& p, bool may_fold) {
  const int itemsize = element_size(p.in);
  const auto alignment = [&](const void* data, int64_t batch_stride, int64_t row_stride) {
    const int64_t base = int64_t(reinterpret_cast<uintptr_t>(data)), batch_step = p.batch > 1 ? batch_stride * itemsize : 0;
    return may_fold ? common_alignment({base, batch_step}) : common_alignment({base, batch_step, row_stride * itemsize, p.columns * itemsize});
  };
  int unit = alignment(p.x, p.batch_stride, p.row_stride);
  if (reads_two(p.form)) unit = std::min(unit, alignment(p.y, p.y_batch_stride, p.y_row_stride));
  return unit == 16 ? unit : unit >= 4 && itemsize < 4 ? 4 : itemsize;  // the lengths that there are kernels for
}

// Everything but the rows' distribution among blocks.
Plan lay_out(const Problem& p, bool may_fold) {
  Plan plan{};
  plan.vector_bytes = load_bytes(p, may_fold);
  const int64_t vector = plan.vector_bytes / element_size(p.in), columns = std::max<int64_t>(p.columns, 1);
  plan.fold = may_fold ? int(vector / std::gcd(vector, columns)) : 1;
  plan.width = plan.fold * columns / vector;
  plan.tiles = ceil_div(plan.width, int64_t(kTileVectors));
  plan.tile_vectors = int(plan.tiles == 1 ? plan.width : round_up(ceil_div(plan.width, plan.tiles), int64_t(kLine)));
  plan.tiles = ceil_div(plan.width, int64_t(plan.tile_vectors));
  return plan;
}

void set_threads(Plan& plan, int64_t rows, int threads) {
  plan.lanes = int(std::clamp<int64_t>(rows, 1, threads / plan.tile_vectors));
  plan.threads = int(round_up(int64_t(plan.lanes) * plan.tile_vectors, int64_t(kWarp)));
}

// Whether one block for some columns sums all rows before a second kernel could have begun. It is laid out so then.
bool is_short(Plan& plan, const Problem& p) {
  const int64_t rows = p.rows / plan.fold;
  set_threads(plan, rows, kMostThreads);
  plan.splits = 1;
  return plan.fold == 1 && ceil_div(rows, int64_t(plan.lanes) * kRowsAtOnce) <= kStepsOfAKernel;
}

}  // namespace

Plan make_plan(const Problem& p, int multiprocessors) {
  if (Plan plan = lay_out(p, false); is_short(plan, p)) return plan;
  Plan plan = lay_out(p, p.gapless());
  const int64_t rows = p.rows / plan.fold;
  // Smaller blocks where large ones, with a full step each, would not be enough for all multiprocessors.
  const int64_t matrices = p.batch * plan.tiles, vectors = p.batch * rows * plan.width;
  int threads = kMostThreads;
  while (threads > kLeastThreads && vectors < int64_t(threads) * kRowsAtOnce * multiprocessors) threads /= 2;
  set_threads(plan, rows, threads);
  // As many blocks as run at once, or a few times as many where that leaves fewer multiprocessors without work; each with one full step.
  const int64_t at_once = int64_t(multiprocessors) * (kThreadsOfMultiprocessor / (p.form == Form::kPlain ? 1 : 2) / plan.threads);
  const int64_t steps = std::max<int64_t>(rows / (int64_t(plan.lanes) * kRowsAtOnce), 1);
  double best = 0;
  for (int waves = 1; waves <= kMostWaves; ++waves) {
    const int64_t splits = std::clamp(at_once * waves / std::max<int64_t>(matrices, 1), int64_t(1), steps);
    const double busy = double(splits * matrices) / double(round_up(splits * matrices, at_once));
    if (waves == 1 || busy > best + kWaveCost) best = busy, plan.splits = splits;
  }
  return plan;
}

}  // namespace fusebackend::column_sum
