#include "common/tile/work.h"

#include <algorithm>
#include <sstream>

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

struct Writer {
  std::ostringstream out;
  template <typename Value>
  void operator()(const char* name, Value value) {
    out << name << '=' << value << ' ';
  }
};

void describe_box(const Plan& plan, int64_t elements, Writer& fact) {
  const BoxPlan box = plan_box(plan);
  const int64_t w = plan.problem.element_bytes;
  int64_t volume = 1;
  for (int d = 0; d < plan.problem.rank; ++d) volume *= box.extent[d];
  fact("in_run", box.in_length * w);
  fact("out_run", box.out_length * w);
  fact("blocks", box.count);
  fact("block_bytes", volume * w);
  fact("moved", double(box.count * volume) / double(elements));
  fact("shared", box.shared_bytes);
  fact("layout", int(box.layout));
  fact("inner", box.inner_length);
  const bool gathers_staged = plan.problem.strides[plan.staged][box.dims[0]] != 1 || plan.staged_pair;
  fact("gathers", int(gathers_staged) + int(plan.has_direct() && !box.direct_is_contiguous));
}

void describe_tiles(const Plan& plan, int64_t elements, Writer& fact) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes, o = p.sizes[0], q = p.sizes[plan.staged_dim];
  const bool shifted = row_address_bits(p, kOut) % kSectorBytes != 0;
  const int64_t halo = shifted ? kSectorBytes / w - 1 : 0;
  const int64_t tile_rows = tile_o(int(w), p.is_sum(), shifted), tile_columns = tile_q(int(w));
  const int64_t blocks = ceil_div(o + halo, tile_rows) * ceil_div(q, tile_columns) * (elements / (o * q));
  fact("in_run", q * w);
  fact("out_run", o * w);
  fact("blocks", blocks);
  fact("block_bytes", tile_rows * tile_columns * w);
  fact("moved", double(blocks * tile_rows * tile_columns) / double(elements));
  fact("shared", tile_rows * tile_columns * w);
  fact("layout", 0);
  fact("inner", 1);
  const bool gathers_staged = p.strides[plan.staged][plan.staged_dim] != 1 || plan.staged_pair;
  fact("gathers", int(gathers_staged) + int(plan.has_direct() && p.strides[plan.other()][0] != 1));
}

void describe_rows(const Plan& plan, int64_t elements, Writer& fact) {
  const Problem& p = plan.problem;
  const int64_t row = p.sizes[0] * p.element_bytes, chunks = ceil_div(row, kChunkBytes);
  fact("in_run", row);
  fact("out_run", row);
  fact("blocks", ceil_div(elements / p.sizes[0] * chunks * kChunkBytes, kRowBlockBytes));
  fact("block_bytes", kRowBlockBytes);
  fact("moved", double(chunks * kChunkBytes) / double(row));
  fact("shared", 0);
  fact("layout", 0);
  fact("inner", 1);
  fact("gathers", int(p.strides[kX][0] != 1) + int(p.is_sum() && p.strides[kY][0] != 1));
}

}  // namespace

std::string work_of(const Plan& plan) {
  Writer fact;
  const Route route = route_of(plan);
  if (route == Route::kEmpty) return "";
  const Problem& p = plan.problem;
  const int64_t elements = p.elements();
  fact("tiles", int(route == Route::kTiles));
  fact("boxes", int(route == Route::kBoxes));
  fact("element", p.element_bytes);
  fact("in_align", alignment(row_address_bits(p, plan.staged, plan.staged_dim)));
  fact("out_align", alignment(row_address_bits(p, kOut)));
  if (route == Route::kBoxes) describe_box(plan, elements, fact);
  if (route == Route::kTiles) describe_tiles(plan, elements, fact);
  if (route == Route::kRows) describe_rows(plan, elements, fact);
  return fact.out.str();
}

}  // namespace fusebackend::tile
