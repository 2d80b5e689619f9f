// row_scatter_plan(int[] sizes, int[] strides, int[] index_sizes, int[] index_strides, int bins, ScalarType dtype,
// int multiprocessors, int shared_bytes, int misaligned) -> str: how a GPU computes sums (Plan in row_scatter.h), for tensors that need not exist.
// row_scatter_limits() -> (int dims, int row): the most dims of a tensor, and the most elements of a row.
#include <tuple>

#include "common/facts.h"
#include "row_scatter/binding.h"

namespace fusebackend::row_scatter {
namespace {

std::string row_scatter_plan(const Sizes& sizes, const Sizes& strides, const Sizes& index_sizes, const Sizes& index_strides, int64_t bins,
                             ScalarType dtype, int64_t multiprocessors, int64_t shared_bytes, int64_t misaligned) {
  STD_TORCH_CHECK(sizes.size() == strides.size() && index_sizes.size() == index_strides.size(), "row_scatter_plan: sizes and as many strides");
  const Problem p = describe(sizes, strides, index_sizes, index_strides, bins, dtype);
  const Plan plan = make_plan(p, int(multiprocessors), int(shared_bytes), int(misaligned));
  FactText facts;
  facts.add("along", plan.load == Load::kAlongRows).add("across", plan.load == Load::kAcrossRows).add("group", plan.group)
      .add("tile_rows", plan.tile_rows).add("block_groups", plan.block_groups).add("shared_bytes", plan.shared_bytes).add("blocks", plan.blocks()).add("sort_warps", plan.sort_warps)
      .add("sort_bytes", plan.sort_bytes).add("index_rows", p.own.size()).add("copies", p.shared.size())
      .add("workspace_bytes", plan.workspace_bytes).add("coalesced", p.source_step == 1 || plan.across);
  return facts.str();
}

std::tuple<int64_t, int64_t> row_scatter_limits() { return {kMostDims, kMostRow}; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("row_scatter_plan", TORCH_BOX(&row_scatter_plan));
  m.impl("row_scatter_limits", TORCH_BOX(&row_scatter_limits));
}

}  // namespace fusebackend::row_scatter
