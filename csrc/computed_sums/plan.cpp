#include <algorithm>
#include <limits>

#include "common/integer_math.h"
#include "computed_sums/computed_sums.h"

namespace fusebackend::computed_sums {
namespace {

constexpr int kWarp = 32, kLeastThreads = 128;
constexpr int kTileVectors = 64, kLeastTileVectors = 32;  // of a row that one block sums: more would leave more sums for the second kernel
constexpr int kLine = 8;            // vectors of 16 bytes in a cache line
constexpr int kStepsOfAKernel = 4;  // of a thread, each a wait for memory, that take as long as launching a second kernel
// Of blocks that sum images: the fewest threads, the most of a row, how many ways to divide a row are looked at, and the steps that take as long as
// the start and the end of a block.
constexpr int kLeastImageThreads = 64, kImageTileVectors = 128, kMostDivisions = 16, kStepsOfABlock = 2;
constexpr int kRegisters = 120;     // of the 128 that a thread may have where one block of the most threads runs at once
constexpr int kHalfTheRegisters = 80;  // of the 64 that it may have where two do: what is counted is more than what is needed
constexpr int kOtherRegisters = 30; // of counters, addresses, and what a program computes

// Of a row, that a thread loads anew.
int row_bytes(const Variant& v, int vector) {
  int bytes = 0;
  for (size_t k = 0; k < v.types.size(); ++k)
    if (!is_read_once(v.kinds[k])) bytes += element_bytes(v.types[k]) * (is_vector(v.kinds[k]) ? vector : 1);
  return bytes;
}

// Four loads of 16 bytes at once hide their latency, or half as much where twice as many threads load: more would take registers.
int rows_at_once(const Variant& v, int bytes) { return bytes <= (v.adds() ? 16 : 8) ? 4 : bytes <= 64 ? 2 : 1; }

int registers_of(const Variant& v, int vector) {
  const int bytes = row_bytes(v, vector);
  int registers = kOtherRegisters + int(ceil_div(bytes, 4)) * rows_at_once(v, bytes) + v.outs * vector;
  for (char kind : v.kinds) registers += is_one_row(kind) ? vector : 2;
  return registers;
}

// Blocks of at most so many threads that have so much of each row, one for all rows of an image.
Plan lay_out(const Variant& v, int64_t batch, int64_t rows, int64_t columns, int threads, int tile_vectors) {
  Plan plan{};
  plan.tile_vectors = tile_vectors, plan.tiles = ceil_div(columns / v.vector, int64_t(tile_vectors));
  plan.lanes = int(std::clamp<int64_t>(rows, 1, threads / tile_vectors));
  plan.threads = int(round_up(int64_t(plan.lanes) * tile_vectors, int64_t(kWarp)));
  plan.batch = batch, plan.splits = 1;
  return plan;
}

Plan plan_of_rows(const Variant& v, int64_t rows, int64_t columns, int multiprocessors) {
  const int64_t width = columns / v.vector, at_once = v.rows_at_once();
  // Whether one block for some columns sums all rows before a second kernel could have begun.
  const Plan whole = lay_out(v, 1, rows, columns, kMostThreads, int(std::min<int64_t>(width, kTileVectors)));
  if (v.adds() && ceil_div(rows, whole.lanes * at_once) <= kStepsOfAKernel) return whole;
  // Smaller blocks where large ones, with a full step each, would not be enough for all multiprocessors.
  int threads = kMostThreads;
  while (threads > kLeastThreads && rows * width < threads * at_once * multiprocessors) threads /= 2;
  // As many blocks as run at once, each with one full step. Of the tiles that may be, those that leave the fewest threads and blocks without work.
  const int64_t blocks = int64_t(multiprocessors) * v.blocks_at_once() * (kMostThreads / threads);
  Plan best{};
  double best_busy = -1;
  const int least = width <= kTileVectors ? int(width) : kLeastTileVectors;
  for (int tile_vectors = int(std::min<int64_t>(width, kTileVectors)); tile_vectors >= least; tile_vectors -= kLine) {
    Plan plan = lay_out(v, 1, rows, columns, threads, tile_vectors);
    plan.splits = std::clamp(blocks / plan.tiles, int64_t(1), std::max<int64_t>(rows / (plan.lanes * at_once), 1));
    const double busy = double(width) / double(plan.tiles * tile_vectors) * double(plan.lanes * tile_vectors) / threads *
                        double(plan.blocks()) / double(round_up(plan.blocks(), blocks));
    if (busy > best_busy) best_busy = busy, best = plan;
  }
  return best;
}

// The tiles, the size of blocks, and the splits, with which the fewest steps are taken one after the other. Of equal ones those with the longest runs
// in memory, and then the smallest blocks, some of which load while others add their lanes.
Plan plan_of_images(const Variant& v, int64_t batch, int64_t rows, int64_t columns, int multiprocessors) {
  const int64_t width = columns / v.vector, at_once = v.rows_at_once(), fewest_tiles = ceil_div(width, int64_t(kImageTileVectors));
  const int64_t most_blocks = int64_t(multiprocessors) * v.blocks_at_once();  // of the most threads, that run at once
  Plan best{};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t tiles = fewest_tiles; tiles < fewest_tiles + kMostDivisions; ++tiles) {
    const int tile_vectors = int(ceil_div(width, tiles));
    if (tile_vectors < std::min<int64_t>(width, kLine)) break;
    for (int threads = kLeastImageThreads; threads <= kMostThreads; threads *= 2) {
      if (threads < tile_vectors) continue;
      Plan plan = lay_out(v, batch, rows, columns, threads, tile_vectors);
      const int64_t at_a_time = most_blocks * (kMostThreads / threads);
      const int64_t most = std::max<int64_t>(rows / (plan.lanes * at_once), 1);
      for (int64_t splits : {int64_t(1), std::clamp(at_a_time / (batch * plan.tiles), int64_t(1), most)}) {
        plan.splits = splits;
        const int64_t steps = kStepsOfABlock + ceil_div(rows, plan.lanes * at_once * splits);
        const int64_t time = steps * ceil_div(plan.blocks(), at_a_time) + (splits > 1 ? kStepsOfAKernel : 0);
        if (time < least) least = time, best = plan;
      }
    }
  }
  return best;
}

}  // namespace

int Variant::rows_at_once() const { return computed_sums::rows_at_once(*this, row_bytes(*this, vector)); }

int Variant::blocks_at_once() const { return !adds() && registers_of(*this, vector) <= kHalfTheRegisters ? 2 : 1; }

int widest_vector(const Variant& v) {
  int narrowest = 4;  // bytes of an element
  for (size_t k = 0; k < v.types.size(); ++k)
    if (is_vector(v.kinds[k])) narrowest = std::min(narrowest, element_bytes(v.types[k]));
  int vector = narrowest == 4 ? 4 : 8;
  // Sums hide latency by what a thread has under way; where it stores, more threads do that better.
  if (!v.adds() && vector == 8 && registers_of(v, vector) > kHalfTheRegisters) vector = 4;
  while (vector > 1 && registers_of(v, vector) > kRegisters) vector /= 2;
  return vector;
}

int vector_of(const Variant& v, const Arguments& p) {
  constexpr int64_t kLoadBytes = 16;
  int vector = widest_vector(v);
  const auto fits = [&] {
    bool all = p.columns % vector == 0;
    for (size_t k = 0; k < v.types.size(); ++k) {
      const int64_t bytes = element_bytes(v.types[k]), unit = std::min(kLoadBytes, bytes * vector);
      const int64_t base = int64_t(reinterpret_cast<uintptr_t>(p.inputs[k].data));
      all &= !is_vector(v.kinds[k]) || (base % unit == 0 && p.inputs[k].row_stride * bytes % unit == 0);
    }
    return all;
  };
  while (vector > 1 && !fits()) vector /= 2;
  return vector;
}

namespace {

// One number a row, of images that lie column by column, one behind the other.
std::optional<Lies> describe_transposed(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, const std::vector<int64_t>& domain) {
  std::vector<size_t> dims;  // from the innermost outwards
  for (size_t d = domain.size() - 1; d-- > 0;) {
    if (sizes[d] != domain[d]) return std::nullopt;
    if (domain[d] != 1) dims.push_back(d);
  }
  if (dims.size() < 2) return std::nullopt;
  const int64_t width = domain[dims[0]], height = domain[dims[1]];
  if (strides[dims[0]] != height || strides[dims[1]] != 1) return std::nullopt;
  int64_t next = width * height;
  for (size_t i = 2; i < dims.size(); next *= domain[dims[i++]])
    if (strides[dims[i]] != next) return std::nullopt;
  return Lies{kTransposed, 1, width, height};
}

}  // namespace

std::optional<Lies> describe(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, const std::vector<int64_t>& domain, int64_t batch_dims) {
  const size_t last = domain.size() - 1;
  const auto stride_of = [&](size_t d) { return sizes[d] == 1 ? 0 : strides[d]; };
  const bool columns = domain[last] == 1 || stride_of(last) == 1;
  if (!columns && stride_of(last) != 0) return std::nullopt;
  // From the innermost dim outwards: dims along which it is broadcast, dims that lie in memory like one, and again dims along which it is broadcast.
  int64_t rows = 1, rows_of_image = 1, divisor = 1, period = 1, row_stride = 0;
  bool again = false;
  for (size_t d = last; d-- > 0;) {
    if (domain[d] == 1) continue;
    rows *= domain[d];
    if (int64_t(d) >= batch_dims) rows_of_image *= domain[d];
    const int64_t stride = stride_of(d);
    if (stride == 0 && period == 1) {
      divisor *= domain[d];
    } else if (stride == 0) {
      again = true;
    } else {
      if (again || (period > 1 && stride != period * row_stride)) return columns ? std::nullopt : describe_transposed(sizes, strides, domain);
      if (period == 1) row_stride = stride;
      period *= domain[d];
    }
  }
  const bool varies = period > 1;
  const bool is_of_images = rows_of_image > 0 && divisor % rows_of_image == 0;  // where there are no rows, any kind is right
  const Kind rows_kind = period == rows ? kRows : is_of_images ? kImages : kGroups;
  const Kind kind = columns ? (varies ? rows_kind : kColumns) : varies ? kFactors : kScalar;
  return Lies{kind, row_stride, varies ? divisor : 1, period};
}

Plan make_plan(const Variant& v, int64_t batch, int64_t rows, int64_t columns, int multiprocessors) {
  return batch == 1 ? plan_of_rows(v, rows, columns, multiprocessors) : plan_of_images(v, batch, rows, columns, multiprocessors);
}

}  // namespace fusebackend::computed_sums
