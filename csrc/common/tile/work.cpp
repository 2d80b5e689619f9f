#include "common/tile/work.h"

#include <algorithm>

#include "common/facts.h"
#include "common/integer_math.h"
#include "common/tile/box_plan.h"
#include "common/tile/memory_units.h"
#include "common/tile/route.h"

namespace fusebackend::tile {
namespace {

constexpr int64_t kRowBlockBytes = 8192;  // that a block of the rows kernel writes, at most

int64_t alignment(uintptr_t bits) {
  bits |= kLineBytes;
  return int64_t(bits & (~bits + 1));
}

void describe_box(const Plan& plan, int64_t elements, FactText& facts) {
  const BoxPlan box = plan_box(plan);
  const int64_t w = plan.problem.element_bytes;
  int64_t volume = 1;
  for (int d = 0; d < plan.problem.rank; ++d) volume *= box.extent[d];
  facts.add("in_run", box.in_length * w);
  facts.add("out_run", box.out_length * w);
  facts.add("blocks", box.count);
  facts.add("block_bytes", volume * w);
  facts.add("moved", double(box.count * volume) / double(elements));
  facts.add("shared", box.shared_bytes);
  facts.add("layout", int(box.layout));
  facts.add("inner", box.inner_length);
  const bool gathers_staged = plan.problem.strides[plan.staged][box.dims[0]] != 1 || plan.staged_pair;
  facts.add("gathers", int(gathers_staged) + int(plan.has_direct() && !box.direct_is_contiguous));
}

void describe_tiles(const Plan& plan, int64_t elements, FactText& facts) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes, o = p.sizes[0], q = p.sizes[plan.staged_dim];
  const bool shifted = row_address_bits(p, kOut) % kSectorBytes != 0;
  const int64_t halo = shifted ? kSectorBytes / w - 1 : 0;
  const int64_t tile_rows = tile_o(int(w), p.is_sum(), shifted), tile_columns = tile_q(int(w));
  const int64_t blocks = ceil_div(o + halo, tile_rows) * ceil_div(q, tile_columns) * (elements / (o * q));
  facts.add("in_run", q * w);
  facts.add("out_run", o * w);
  facts.add("blocks", blocks);
  facts.add("block_bytes", tile_rows * tile_columns * w);
  facts.add("moved", double(blocks * tile_rows * tile_columns) / double(elements));
  facts.add("shared", tile_rows * tile_columns * w);
  facts.add("layout", 0);
  facts.add("inner", 1);
  const bool gathers_staged = p.strides[plan.staged][plan.staged_dim] != 1 || plan.staged_pair;
  facts.add("gathers", int(gathers_staged) + int(plan.has_direct() && p.strides[plan.other()][0] != 1));
}

void describe_rows(const Plan& plan, int64_t elements, FactText& facts) {
  const Problem& p = plan.problem;
  const int64_t row = p.sizes[0] * p.element_bytes, chunks = ceil_div(row, kChunkBytes);
  facts.add("in_run", row);
  facts.add("out_run", row);
  facts.add("blocks", ceil_div(elements / p.sizes[0] * chunks * kChunkBytes, kRowBlockBytes));
  facts.add("block_bytes", kRowBlockBytes);
  facts.add("moved", double(chunks * kChunkBytes) / double(row));
  facts.add("shared", 0);
  facts.add("layout", 0);
  facts.add("inner", 1);
  facts.add("gathers", int(p.strides[kX][0] != 1) + int(p.is_sum() && p.strides[kY][0] != 1));
}

}  // namespace

std::string work_of(const Plan& plan) {
  FactText facts;
  const Route route = route_of(plan);
  if (route == Route::kEmpty) return "";
  const Problem& p = plan.problem;
  const int64_t elements = p.elements();
  facts.add("tiles", int(route == Route::kTiles));
  facts.add("boxes", int(route == Route::kBoxes));
  facts.add("element", p.element_bytes);
  facts.add("in_align", alignment(row_address_bits(p, plan.staged, plan.staged_dim)));
  facts.add("out_align", alignment(row_address_bits(p, kOut)));
  if (route == Route::kBoxes) describe_box(plan, elements, facts);
  if (route == Route::kTiles) describe_tiles(plan, elements, facts);
  if (route == Route::kRows) describe_rows(plan, elements, facts);
  return facts.str();
}

}  // namespace fusebackend::tile
