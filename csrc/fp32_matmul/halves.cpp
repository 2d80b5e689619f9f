#include "fp32_matmul/halves.h"

namespace fusebackend::fp32_matmul {
namespace {

// Microseconds of the model of plan_wgmma; only their ratios matter.
constexpr double kLaunchCost = 6;       // of the split and of the product
constexpr double kBytes = 4e6;          // that memory moves in one of them

constexpr int64_t kLeastK = 4096;       // that is halved

// What it takes to write the planes of an operand: they have 3/2 of its bytes.
double split_cost(const Operand& op) { return (1 + 2. / 3) * double(PlaneLayout(op).bytes()) / kBytes; }

void divide(Problem& first, Problem& second, Index index, int64_t size) {
  switch (index) {
    case Index::kBatch:
      first.batch = size, second.batch -= size;
      for (Matrix* x : {&second.a, &second.b, &second.d}) x->data += size * x->batch;
      second.c += size * second.c_batch;
      break;
    case Index::kM:
      first.m = size, second.m -= size;
      second.a.data += size * second.a.row, second.d.data += size * second.d.row;
      second.c += size * second.c_row;
      break;
    case Index::kN:
      first.n = size, second.n -= size;
      second.b.data += size * second.b.col, second.d.data += size * second.d.col;
      second.c += size * second.c_col;
      break;
    case Index::kK:
      first.k = size, second.k -= size;
      second.a.data += size * second.a.col, second.b.data += size * second.b.row;
      second.d = {second.c, second.c_row, second.c_col, second.c_batch}, second.beta = 1.f;
      break;
    case Index::kNone: break;
  }
}

}  // namespace

std::pair<Problem, Problem> Halves::of(const Problem& p) const {
  Problem first = p, second = p;
  divide(first, second, index, size);
  return {first, second};
}

double cost_of(const Problem& p, Kernel kernel, int sm_count) {
  double cost = kLaunchCost + (p.a.planes ? 0 : split_cost(a_operand(p))) + (p.b.planes ? 0 : split_cost(b_operand(p)));
  if (kernel == Kernel::kWgmma) return cost + plan_wgmma(p, sm_count).cost;
  const int64_t tiles = ceil_div(p.m, int64_t(kMmaTileM)) * ceil_div(p.n, int64_t(kMmaTileN)) * p.batch;
  return cost + cost_of_tiles(tiles, ceil_div(p.k, int64_t(kMmaBlockK)), sm_count);
}

Halves best_halves(const Problem& p, size_t a_bytes, size_t b_bytes, size_t most_kept, double allowed, Kernel kernel, int sm_count) {
  const auto halve = [&](Index index, int64_t size, int64_t multiple, double extra_cost, bool keeps = false) {
    const Halves halves{index, round_up(ceil_div(size, int64_t(2)), multiple), 0, keeps};
    if (halves.size >= size) return Halves{};
    const auto [first, second] = halves.of(p);
    return Halves{index, halves.size, cost_of(first, kernel, sm_count) + cost_of(second, kernel, sm_count) + extra_cost, keeps};
  };
  const bool all_to_be_made = !p.a.planes && !p.b.planes;
  if (p.batch > 1) return all_to_be_made ? halve(Index::kBatch, p.batch, 1, 0) : Halves{};

  // Along k all planes become fewer.
  Halves by_k{}, by_row{};
  if (all_to_be_made && p.k >= kLeastK) by_k = halve(Index::kK, p.k, kBlockK, 2. * sizeof(float) * double(p.m * p.n) / kBytes);
  if (by_k.index != Index::kNone && by_k.cost <= allowed) return by_k;
  const bool by_m = a_bytes >= b_bytes;
  const size_t other = by_m ? b_bytes : a_bytes;
  const bool keeps = other > 0 && other <= most_kept;
  const double saved = keeps ? split_cost(by_m ? b_operand(p) : a_operand(p)) : 0;
  if ((by_m ? p.m : p.n) > 2 * kTileN) by_row = halve(by_m ? Index::kM : Index::kN, by_m ? p.m : p.n, kTileN, -saved, keeps);
  if (by_row.index == Index::kNone || (by_k.index != Index::kNone && by_k.cost < by_row.cost)) return by_k;
  return by_row;
}

}  // namespace fusebackend::fp32_matmul
