// Operators without tensors, compiled into every library: what Python asks of the kernels, where there is no GPU as well.
//
//   strided_bmm_refusal(int[] sizes, int[] x_strides, int[] y_strides, int[] order, ScalarType dtype) -> str: why there is no kernel for a product
//       (describe in strided_bmm.h); empty if there is one.
//   strided_bmm_plan(the same) -> str: rows and columns of the tile of the result that a block computes, and how many entries of the batch.
//   strided_bmm_shared_bytes() -> int: the shared memory that a block must be able to have.
#include <string>

#include "common/facts.h"
#include "strided_bmm/binding.h"

namespace fusebackend::strided_bmm {
namespace {

using Numbers = std::vector<int64_t>;

const char* describe_numbers(const Numbers& sizes, const Numbers& x_strides, const Numbers& y_strides, const Numbers& order,
                             ScalarType dtype, Problem& p) {
  const std::optional<DType> type = to_dtype(dtype);
  STD_TORCH_CHECK(type, "strided_bmm: dtype is not supported");
  return describe(to_array<Sizes>(sizes, "sizes"), to_array<Strides>(x_strides, "strides of x"), to_array<Strides>(y_strides, "strides of y"),
                  to_array<Order>(order, "order"), *type, p);
}

std::string strided_bmm_refusal(const Numbers& sizes, const Numbers& x_strides, const Numbers& y_strides, const Numbers& order, ScalarType dtype) {
  Problem p{};
  const char* refusal = describe_numbers(sizes, x_strides, y_strides, order, dtype, p);
  return refusal ? refusal : "";
}

std::string strided_bmm_plan(const Numbers& sizes, const Numbers& x_strides, const Numbers& y_strides, const Numbers& order, ScalarType dtype) {
  Problem p{};
  const char* refusal = describe_numbers(sizes, x_strides, y_strides, order, dtype, p);
  STD_TORCH_CHECK(!refusal, "strided_bmm_plan: ", refusal);
  const TileShape tile = tile_of(p.route, element_size(p.dtype));
  const int entries = p.route == Route::kOneEntry ? 1 : kTileEntries * p.span;
  return FactText().add("rows", tile.rows).add("columns", tile.columns).add("entries", entries).str();
}

int64_t strided_bmm_shared_bytes() { return kMostSharedBytes; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("strided_bmm_refusal", TORCH_BOX(&strided_bmm_refusal));
  m.impl("strided_bmm_plan", TORCH_BOX(&strided_bmm_plan));
  m.impl("strided_bmm_shared_bytes", TORCH_BOX(&strided_bmm_shared_bytes));
}

}  // namespace fusebackend::strided_bmm
