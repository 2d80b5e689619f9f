// How a product is cut up among the multiprocessors: the cheapest of a few ways, by a cost model fitted to an H200.
#include <algorithm>

#include "launch.h"

namespace fusebackend::matmul {
namespace {

// Microseconds. Only their proportions matter.
constexpr double kPerBlock = 1.65;             // a tile's k block
constexpr double kPerTile = 4.5;               // beginning and finishing a tile
constexpr double kPerOddTile = 6;              // more, where rows of C are not stored in pairs (columns are not, and suffer less)
constexpr double kHandOver = 4, kPerPart = 2;  // a partial tile written, waited for and read; each further part
constexpr double kPerShares = 24;              // unequal shares begin and end anywhere: more parts, less reuse in L2 ...
constexpr double kUnaligned = 60, kSlower = 1.05, kSlowerBeforeWaves = 1.3;    // ... all the less if whole tiles follow
constexpr int kLeastBlocks = 8;                // k blocks in a part: below this handing over costs more than computing

struct Candidate {
  Plan plan;
  double cost;
};

void consider(Candidate& best, const Plan& plan, double cost) {
  if (cost < best.cost) best = {plan, cost};
}

void consider_orientation(Candidate& best, const Problem& p, bool swap, int sms) {
  const int64_t m = swap ? p.n : p.m, n = swap ? p.m : p.n;
  const int64_t tiles = ceil_div(m, kTileM) * ceil_div(n, kTileN) * p.batch, blocks = ceil_div(p.k, kBlockK);
  const int64_t waves = tiles / sms, left = tiles % sms;
  const double per_tile = kPerTile + (p.c_col == 1 && !swap && !stores_pairs(p) ? kPerOddTile : 0);
  const double tile_cost = blocks * kPerBlock + per_tile;

  // Whole tiles, a last wave that may leave multiprocessors idle.
  consider(best, {int(std::min<int64_t>(tiles, sms)), swap, 0, 0, 0}, (waves + (left > 0)) * tile_cost);
  if (left == 0) return;

  // The last wave's tiles split into equal parts, of which several work on the same k at a time and share operands in L2.
  const int64_t parts = std::min(sms / left, blocks / kLeastBlocks);
  if (parts > 1 && sms * blocks < INT32_MAX) {         // the kernel counts k blocks in 32 bits
    const double cost = waves * tile_cost + ceil_div(blocks, parts) * kPerBlock + per_tile + kHandOver + kPerPart * parts;
    consider(best, {int(waves ? sms : left * parts), swap, int(left), int(parts), 0}, cost);
  }
  // The last two waves' tiles shared out evenly.
  const int64_t shared = waves ? left + sms : left;
  const int64_t share = std::max<int64_t>(ceil_div(shared * blocks, sms), std::min<int64_t>(blocks, kLeastBlocks));
  if (shared * blocks + share < INT32_MAX) {
    double cost = share * kPerBlock * (waves > 1 ? kSlowerBeforeWaves : kSlower) + kPerPart * ceil_div(blocks, share);
    cost += waves > 1 ? (waves - 1) * tile_cost + kPerShares / 2 + kUnaligned * left / sms : kPerShares;
    consider(best, {int(ceil_div(shared * blocks, share)), swap, int(shared), 0, int(share)}, cost);
  }
}

}  // namespace

Plan plan(const Problem& p, int sm_count) {
  if (p.k == 0) return {};
  Candidate best{{}, 1e300};
  consider_orientation(best, p, false, sm_count);
  Candidate swapped = best;
  consider_orientation(swapped, p, true, sm_count);
  return swapped.cost < 0.98 * best.cost ? swapped.plan : best.plan;
}

}  // namespace fusebackend::matmul
