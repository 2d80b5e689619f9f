// column_sum_plan(int[] sizes, int[] strides, int[]? y_strides, int begin, int end, bool plain, bool products, bool moments, ScalarType dtype,
// ScalarType result, int multiprocessors, int misaligned) -> str: how a GPU computes sums (Plan in column_sum.h), of tensors that need not exist and begin so
// many bytes behind an aligned address.
#include <string>

#include "column_sum/binding.h"
#include "common/facts.h"

namespace fusebackend::column_sum {
namespace {

std::string column_sum_plan(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                            const std::optional<std::vector<int64_t>>& y_strides, int64_t begin, int64_t end, bool plain, bool products, bool moments,
                            ScalarType dtype, ScalarType result, int64_t multiprocessors, int64_t misaligned) {
  STD_TORCH_CHECK(sizes.size() == strides.size() && multiprocessors > 0, "column_sum_plan: sizes, as many strides, and a GPU");
  STD_TORCH_CHECK(!y_strides || y_strides->size() == sizes.size(), "column_sum_plan: as many strides of y as sizes");
  STD_TORCH_CHECK(products || (plain && !y_strides), "column_sum_plan: sums of x or of products");
  STD_TORCH_CHECK(!moments || !products, "column_sum_plan: moments or products");
  const auto describe_like = [&](const std::vector<int64_t>& like) {
    const auto found = describe(reinterpret_cast<const void*>(misaligned), sizes, like, begin, end, false, dtype, result);
    STD_TORCH_CHECK(found, "column_sum_plan: a tensor that would be copied first");
    return *found;
  };
  Problem p = describe_like(strides);
  if (moments) p.form = Form::kMoments;
  if (products) p.form = y_strides ? (plain ? Form::kPlainAndProducts : Form::kProducts) : (plain ? Form::kPlainAndSquares : Form::kSquares);
  if (y_strides) {
    const Problem y = describe_like(*y_strides);
    p.y = y.x, p.y_batch_stride = y.batch_stride, p.y_row_stride = y.row_stride;
  }
  const Plan plan = make_plan(p, int(multiprocessors));
  FactText facts;
  facts.add("vector_bytes", plan.vector_bytes).add("fold", plan.fold).add("width", plan.width).add("lanes", plan.lanes)
      .add("threads", plan.threads).add("tiles", plan.tiles).add("splits", plan.splits).add("blocks", plan.blocks(p))
      .add("partials", plan.partials(p) * p.sums());
  return facts.str();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) { m.impl("column_sum_plan", TORCH_BOX(&column_sum_plan)); }

}  // namespace fusebackend::column_sum
