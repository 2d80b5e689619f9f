#include "fp32_matmul/work.h"

#include <algorithm>

#include "common/facts.h"
#include "fp32_matmul/launch.h"

namespace fusebackend::fp32_matmul {
namespace {

struct Tile {
  int64_t m, n, k;
  int64_t products;    // of planes
  int64_t item_bytes;  // of an element of K that is staged, all planes
};

Tile tile_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::kWgmma: return {kTileM, kTileN, kBlockK, kProducts, 2 * kPlanes};
    case Kernel::kMma: return {kMmaTileM, kMmaTileN, kMmaBlockK, kProducts, 2 * kPlanes};
    default: return {kFfmaTileM, kFfmaTileN, kFfmaBlockK, 1, 4};
  }
}

// The k blocks and the tiles of the thread block that has most of them.
struct Longest {
  int64_t k_blocks, tiles;
};

Longest longest(const WgmmaPlan& plan, int64_t tiles, int64_t k_blocks) {
  const int64_t whole = ceil_div(tiles - plan.split_tiles, plan.grid);
  if (!plan.split_tiles) return {whole * k_blocks, whole};
  if (plan.split_parts) return {whole * k_blocks + ceil_div(k_blocks, plan.split_parts), whole + 1};
  return {whole * k_blocks + plan.split_share, whole + ceil_div(plan.split_share, k_blocks)};
}

}  // namespace

std::string work_of(const Problem& given, Kernel kernel, int sm_count) {
  if (given.m * given.n * given.batch * given.k == 0) return "";
  const WgmmaPlan plan = kernel == Kernel::kWgmma ? plan_wgmma(given, sm_count) : WgmmaPlan{};
  const Problem p = plan.swap ? transposed(given) : given;
  const Tile tile = tile_of(kernel);
  const int64_t tiles = ceil_div(p.m, tile.m) * ceil_div(p.n, tile.n) * p.batch, k_blocks = ceil_div(p.k, tile.k);
  const int64_t waves = ceil_div(tiles, sm_count);
  const Longest most = kernel == Kernel::kWgmma ? longest(plan, tiles, k_blocks) : Longest{waves * k_blocks, waves};
  const double flops = 2. * double(most.k_blocks * tile.k) * double(tile.m * tile.n * tile.products);
  const bool exact = kernel == Kernel::kWgmma && p.k < kExactSumsBelowK;
  const bool splits = kernel != Kernel::kFfma;
  const Operand a = a_operand(p), b = b_operand(p);
  const auto plane_bytes = [&](const Operand& op) { return splits ? PlaneLayout(op).bytes() : size_t{0}; };
  FactText facts;
  facts.add("wgmma", kernel == Kernel::kWgmma).add("mma", kernel == Kernel::kMma)
      .add("blocks", kernel == Kernel::kWgmma ? plan.grid : std::min<int64_t>(tiles, sm_count)).add("flops", exact ? 0 : flops)
      .add("exact_flops", exact ? flops : 0).add("ends", most.tiles)
      .add("parts", plan.split_tiles ? plan.split_parts ? plan.split_parts : ceil_div(k_blocks, plan.split_share) : 0)
      .add("shares", plan.split_tiles && !plan.split_parts).add("swaps", plan.swap).add("unpaired", p.c_col == 1 && !stores_pairs(p))
      .add("staged_bytes", double(tiles * k_blocks * tile.k) * double((tile.m + tile.n) * tile.item_bytes)).add("a_mn_inner", a.mn_inner)
      .add("b_mn_inner", b.mn_inner).add("a_gathers", splits && !splits_vectors(a)).add("b_gathers", splits && !splits_vectors(b))
      .add("a_plane_bytes", plane_bytes(a)).add("b_plane_bytes", plane_bytes(b));
  return facts.str();
}

}  // namespace fusebackend::fp32_matmul
