// column_sum_plan(int[] sizes, int[] strides, int begin, int end, ScalarType dtype, ScalarType result, int multiprocessors,
// int misaligned) -> str: how a GPU computes a sum (Plan in column_sum.h), for a tensor that need not exist and begins so many bytes behind an
// aligned address.
#include <string>

#include "column_sum/binding.h"
#include "common/facts.h"

namespace fusebackend::column_sum {
namespace {

std::string column_sum_plan(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t begin, int64_t end,
                            ScalarType dtype, ScalarType result, int64_t multiprocessors, int64_t misaligned) {
  STD_TORCH_CHECK(sizes.size() == strides.size() && multiprocessors > 0, "column_sum_plan: sizes, as many strides, and a GPU");
  const auto found = describe(reinterpret_cast<const void*>(misaligned), sizes, strides, begin, end, false, dtype, result);
  STD_TORCH_CHECK(found, "column_sum_plan: a tensor that would be copied first");
  const Problem& p = *found;
  const Plan plan = make_plan(p, int(multiprocessors));
  FactText facts;
  facts.add("vector_bytes", plan.vector_bytes).add("fold", plan.fold).add("width", plan.width).add("lanes", plan.lanes)
      .add("threads", plan.threads).add("tiles", plan.tiles).add("splits", plan.splits).add("blocks", plan.blocks(p))
      .add("partials", plan.partials(p));
  return facts.str();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) { m.impl("column_sum_plan", TORCH_BOX(&column_sum_plan)); }

}  // namespace fusebackend::column_sum
