// resample_backward_plan(int[] sizes, int[] strides, int dim, int[] terms, int[] axis_sizes, int[] order, ScalarType dtype, ScalarType result,
// int multiprocessors, int misaligned) -> str: how a GPU computes sums (Plan in resample_backward.h) of a gradient that need not exist, so many bytes behind an aligned address.
#include <string>

#include "common/facts.h"
#include "resample_backward/binding.h"

namespace fusebackend::resample_backward {
namespace {

std::string resample_backward_plan(const Sizes& sizes, const Sizes& strides, int64_t dim, const Sizes& terms, const Sizes& axis_sizes, const Sizes& order,
                                   ScalarType dtype, ScalarType result, int64_t multiprocessors, int64_t misaligned) {
  STD_TORCH_CHECK(sizes.size() == strides.size() && multiprocessors > 0, "resample_backward_plan: sizes, as many strides, and a GPU");
  Sizes out_sizes;
  Problem p = describe(sizes, strides, dim, terms, axis_sizes, order, dtype, result, out_sizes);
  p.grad = reinterpret_cast<const void*>(misaligned);
  const Plan plan = make_plan(p, int(multiprocessors));
  FactText facts;
  facts.add("lanes", plan.form == Form::kLanes).add("planes", plan.form == Form::kPlanes).add("columns", plan.form == Form::kColumns)
      .add("elements", plan.form == Form::kElements).add("vector_bytes", plan.vector_bytes).add("block_rows", plan.block_rows).add("block_columns", plan.block_columns)
      .add("table_bytes", plan.table_bytes);
  return facts.str();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) { m.impl("resample_backward_plan", TORCH_BOX(&resample_backward_plan)); }

}  // namespace fusebackend::resample_backward
