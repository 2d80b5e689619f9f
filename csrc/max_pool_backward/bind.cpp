// max_pool_backward_plan(...) -> str: how a GPU computes the gradient (Plan in max_pool_backward.h), of tensors that need not exist, so many bytes behind
// an aligned address.
#include <string>

#include "common/facts.h"
#include "max_pool_backward/binding.h"

namespace fusebackend::max_pool_backward {
namespace {

std::string max_pool_backward_plan(const Sizes& sizes, const Sizes& strides, const Sizes& offset_strides, const Sizes& axis_sizes, const Sizes& kernel,
                                   const Sizes& stride, const Sizes& padding, const Sizes& dilation, const Sizes& order, ScalarType dtype,
                                   int64_t multiprocessors, int64_t misaligned) {
  STD_TORCH_CHECK(sizes.size() == strides.size() && sizes.size() == offset_strides.size() && multiprocessors > 0,
                  "max_pool_backward_plan: sizes, as many strides, and a GPU");
  Sizes out_sizes;
  Problem p = describe(sizes, strides, offset_strides, axis_sizes, kernel, stride, padding, dilation, order, dtype, out_sizes);
  p.grad = reinterpret_cast<const void*>(misaligned);
  const Plan plan = make_plan(p, int(multiprocessors));
  FactText facts;
  facts.add("lanes", plan.form == Form::kLanes).add("vector", plan.vector).add("block_rows", plan.block_rows).add("row_threads", plan.row_threads)
      .add("kept", plan.kept);
  return facts.str();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) { m.impl("max_pool_backward_plan", TORCH_BOX(&max_pool_backward_plan)); }

}  // namespace fusebackend::max_pool_backward
