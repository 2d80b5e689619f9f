#include <algorithm>

#include "row_scatter/row_scatter.h"

namespace fusebackend::row_scatter {
namespace {

constexpr int kVectorBytes = 16, kSectorBytes = 32;
constexpr int kTileBytes = 42 << 10;          // of a tile that is loaded along rows, with what is sorted: five blocks find room on sm_90
constexpr int kAcrossTileBytes = 108 << 10;   // across rows whole sectors are loaded: two blocks
constexpr int kSortBytes = 32 << 10;          // of shared memory
constexpr int kListVector = 8;                // words of what is sorted that are loaded at once
constexpr int kBlocksOfMultiprocessor = 8;    // that should be there at least, so that all have work until the end
constexpr int kMostBlockGroups = 8;

// Whether the rows of the first `count` dims begin at multiples of a vector.
bool is_aligned(const Dims& dims, int count, int64_t vector) {
  for (int d = 0; d < count; ++d)
    if (dims.dim[d].source_stride % vector != 0) return false;
  return true;
}

// The widest group that the rows which share a row of the index fill.
int widest_group(int64_t shared, int itemsize, Load load) {
  if (shared == 1) return 1;
  return shared > 4 && itemsize == 2 && load != Load::kAcrossRows ? 8 : 4;
}

// Of shared memory, of a row of a tile and of what is sorted.
int64_t row_bytes(const Plan& plan, int itemsize) { return int64_t(plan.pitch) * plan.group * itemsize + plan.row_words * 2; }

}  // namespace

Plan make_plan(const Problem& p, int multiprocessors, int most_shared_bytes, int misaligned) {
  Plan plan{};
  const int itemsize = element_size(p.dtype), vector = kVectorBytes / itemsize;
  const int64_t rows = p.own.size(), shared = p.shared.size();
  const bool aligned = misaligned % kVectorBytes == 0 && is_aligned(p.shared, p.shared.count, vector);
  const Dim* const last = p.own.count > 0 ? &p.own.dim[p.own.count - 1] : nullptr;
  plan.across = p.source_step != 1 && p.sources > 1 && last && last->source_stride == 1;
  plan.pitch = int(round_up(p.sources, 8) + 1);  // odd: rows begin on other banks
  plan.begin_words = round_up(p.bins + 1, kListVector);
  plan.row_words = plan.begin_words + round_up(p.sources, kListVector);
  plan.workspace_bytes = rows * plan.row_words * 2;
  plan.run = plan.across ? last->size : rows;
  plan.load = Load::kElements;
  if (aligned && (p.source_step == 1 || p.sources == 1) && is_aligned(p.own, p.own.count, vector))
    plan.load = Load::kAlongRows;
  if (aligned && plan.across && p.source_step % vector == 0 && is_aligned(p.own, p.own.count - 1, vector))
    plan.load = Load::kAcrossRows;

  const int64_t tile_bytes = std::min<int64_t>(most_shared_bytes - kBesideTheTile - 16, plan.across ? kAcrossTileBytes : kTileBytes);
  for (plan.group = widest_group(shared, itemsize, plan.load);; plan.group = plan.group == 8 ? 4 : 1) {
    if (row_bytes(plan, itemsize) * (plan.across ? kSectorBytes / itemsize : 1) <= tile_bytes || plan.group == 1) break;
  }
  const int64_t fitting = std::max<int64_t>(tile_bytes / row_bytes(plan, itemsize), 1);
  if (plan.load == Load::kAcrossRows) {
    plan.tile_rows = kSectorBytes / itemsize;
    if (fitting < plan.tile_rows) plan.load = Load::kElements;
  }
  if (plan.load != Load::kAcrossRows) plan.tile_rows = int(std::min<int64_t>({fitting, kMostTileRows, plan.run}));
  plan.tile_rows = std::max(plan.tile_rows, 1);
  plan.run = std::max<int64_t>(plan.run, 1);
  plan.tiles = rows / plan.run * ceil_div(plan.run, plan.tile_rows);
  plan.groups = ceil_div(shared, plan.group);
  plan.block_groups = int(std::min<int64_t>(kMostBlockGroups, kMostCopies / plan.group));
  while (plan.block_groups > 1 && plan.blocks() < int64_t(kBlocksOfMultiprocessor) * multiprocessors) plan.block_groups /= 2;
  plan.lists_at = int(round_up(int64_t(plan.tile_rows) * plan.pitch * plan.group * itemsize, 16));
  plan.shared_bytes = int(plan.lists_at + plan.tile_rows * plan.row_words * 2);

  plan.sort_warps = int(std::clamp<int64_t>(p.sources / kSortWarpSources, 1, kMostSortWarps));
  while (plan.sort_warps > 1 && plan.sort_warps * p.bins * 2 > kSortBytes) plan.sort_warps /= 2;
  plan.sort_bytes = int(plan.sort_warps * round_up(std::max<int64_t>(p.bins, 1), 2) * 2);
  return plan;
}

}  // namespace fusebackend::row_scatter
