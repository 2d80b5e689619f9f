#include "common/tile/route.h"

#include "common/integer_math.h"
#include "common/tile/box_plan.h"

namespace fusebackend::tile {
namespace {

constexpr int64_t kLongRowBytes = 512;  // rows whose ends matter little

// Least fractions of a tile's elements that hold values: in general, in copies of aligned rows, and in those of 1 or 2-byte elements.
constexpr double kMinTileUse = 0.7, kMinAlignedTileUse = 0.6, kMinSmallTileUse = 0.5;

bool cuts_sectors(const Problem& p) { return row_address_bits(p, kOut) % kSectorBytes != 0; }

// The fraction of the tiles' elements that hold values.
double tile_use(const Plan& plan) {
  const Problem& p = plan.problem;
  const int64_t o = p.sizes[0], q = p.sizes[plan.staged_dim];
  const int64_t halo = cuts_sectors(p) ? kSectorBytes / p.element_bytes - 1 : 0;
  return double(o * q) / double(round_up(o + halo, tile_o(p.element_bytes, p.is_sum(), cuts_sectors(p))) * round_up(q, tile_q(p.element_bytes)));
}

// Idle lanes at the ends of rows cost a copy little, unless rows of the input have to be shifted into alignment.
double min_tile_use(const Plan& plan) {
  const Problem& p = plan.problem;
  if (p.is_sum() || row_address_bits(p, plan.staged, plan.staged_dim) % (kChunkBytes / 2)) return kMinTileUse;
  return p.element_bytes <= 2 ? kMinSmallTileUse : kMinAlignedTileUse;
}

// Whether rows of the output follow one another in memory and end within sectors, and either another block would write the rest of such a
// sector, or most tiles would hold the end of a row. A sector that is written in part costs several times its bytes.
bool rows_share_sectors(const Plan& plan) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes, o = p.sizes[0];
  if (p.is_sum() || p.strides[kOut][1] != o || o > kMaxBoxTable || o * w % kSectorBytes == 0) return false;
  if (plan.staged_dim > 1) return o * w < kLongRowBytes;
  return (w == 2 || w == 4) && ceil_div(o + kSectorBytes / w - 1, tile_o(int(w), false, false)) <= (w == 2 ? 3 : 2);
}

bool rows_are_contiguous(const Problem& p) {
  for (int r = 0; r < p.operands; ++r)
    if (p.strides[r][0] != 1) return false;
  return true;
}

}  // namespace

uintptr_t row_address_bits(const Problem& p, Operand operand, int dim) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(p.data[operand]);
  for (int d = 0; d < p.rank; ++d)
    if (d != dim) bits |= p.strides[operand][d] * p.element_bytes;
  return bits;
}

bool rows_are_whole(const Problem& p) {
  uintptr_t bits = p.sizes[0] * p.element_bytes;
  for (int r = 0; r < p.operands; ++r) bits |= row_address_bits(p, Operand(r));
  return rows_are_contiguous(p) && bits % kChunkBytes == 0;
}

Route route_of(const Plan& plan) {
  if (plan.is_empty) return Route::kEmpty;
  if (plan.transposes()) return tile_use(plan) < min_tile_use(plan) || rows_share_sectors(plan) ? Route::kBoxes : Route::kTiles;
  const Problem& p = plan.problem;
  return !rows_are_contiguous(p) || p.rank == 1 || rows_are_whole(p) ? Route::kRows : Route::kBoxes;
}

const char* route_name(Route route) {
  switch (route) {
    case Route::kEmpty: return "empty";
    case Route::kRows: return "rows";
    case Route::kTiles: return "tiles";
    case Route::kBoxes: return "boxes";
  }
  return "";
}

}  // namespace fusebackend::tile
