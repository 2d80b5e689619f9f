// The launch configuration of the wgmma kernel: the cheapest of a few divisions of the work, by a cost model fitted to an H200.
#include <algorithm>

#include "fp32_matmul/launch.h"

namespace fusebackend::fp32_matmul {
namespace {

// Microseconds; only their ratios matter.
constexpr double kBlockCost = 1.65;            // one k block of a tile
constexpr double kTileCost = 4.5;              // prologue and epilogue of a tile
constexpr double kUnpairedTileCost = 6;        // added where rows of C can't be stored in pairs (columns can't either, and suffer less)
constexpr double kHandOverCost = 4;            // a partial tile is written, waited for and read ...
constexpr double kPartCost = 2;                // ... and each further part
constexpr double kSharesCost = 24;             // shares begin and end anywhere in a tile: more parts, less reuse in L2 ...
constexpr double kSharesBeforeTilesCost = 60;  // ... and less still if whole tiles follow
constexpr double kSharesSlowdown = 1.05, kSharesBeforeTilesSlowdown = 1.3;
constexpr int kMinBlocksPerPart = 8;           // k blocks: smaller parts cost more to hand over than to compute

void consider(WgmmaPlan& best, const WgmmaPlan& plan) {
  if (plan.cost < best.cost) best = plan;
}

void consider_orientation(WgmmaPlan& best, const Problem& p, bool swap, int sms) {
  const int64_t m = swap ? p.n : p.m, n = swap ? p.m : p.n;
  const int64_t tiles = ceil_div(m, kTileM) * ceil_div(n, kTileN) * p.batch, blocks = ceil_div(p.k, kBlockK);
  const int64_t waves = tiles / sms, last_wave = tiles % sms;
  const double tile_ends = kTileCost + (p.c_col == 1 && !swap && !stores_pairs(p) ? kUnpairedTileCost : 0);
  const double tile_cost = blocks * kBlockCost + tile_ends;

  // Whole tiles. The last wave may leave multiprocessors idle.
  consider(best, {int(std::min<int64_t>(tiles, sms)), swap, 0, 0, 0, (waves + (last_wave > 0)) * tile_cost});
  if (last_wave == 0) return;

  // The last wave's tiles in equal parts: several blocks work on the same k at a time and share operands in L2.
  const int64_t parts = std::min(sms / last_wave, blocks / kMinBlocksPerPart);
  if (parts > 1 && sms * blocks < INT32_MAX) {  // the kernel counts k blocks in 32 bits
    const double cost = waves * tile_cost + ceil_div(blocks, parts) * kBlockCost + tile_ends + kHandOverCost + kPartCost * parts;
    consider(best, {int(waves ? sms : last_wave * parts), swap, int(last_wave), int(parts), 0, cost});
  }
  // The last two waves' tiles in equal shares of k blocks.
  const int64_t shared = waves ? last_wave + sms : last_wave;
  const int64_t share = std::max<int64_t>(ceil_div(shared * blocks, sms), std::min<int64_t>(blocks, kMinBlocksPerPart));
  if (shared * blocks + share < INT32_MAX) {
    const bool tiles_follow = waves > 1;
    double cost = share * kBlockCost * (tiles_follow ? kSharesBeforeTilesSlowdown : kSharesSlowdown) + kPartCost * ceil_div(blocks, share);
    cost += tiles_follow ? (waves - 1) * tile_cost + kSharesCost / 2 + kSharesBeforeTilesCost * last_wave / sms : kSharesCost;
    consider(best, {int(ceil_div(shared * blocks, share)), swap, int(shared), 0, int(share), cost});
  }
}

}  // namespace

double cost_of_tiles(int64_t tiles, int64_t k_blocks, int sm_count) { return ceil_div(tiles, int64_t(sm_count)) * (k_blocks * kBlockCost + kTileCost); }

WgmmaPlan plan_wgmma(const Problem& p, int sm_count) {
  WgmmaPlan best{};
  best.cost = 1e300;
  consider_orientation(best, p, false, sm_count);
  WgmmaPlan swapped = best;
  consider_orientation(swapped, p, true, sm_count);
  return swapped.cost < 0.98 * best.cost ? swapped : best;
}

}  // namespace fusebackend::fp32_matmul
