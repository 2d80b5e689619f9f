// Operators without tensors, compiled into every library: what Python asks of the kernels, where there is no GPU as well.
//
//   small_bmm_most_size() -> int: the most rows, columns and terms of a product.
//   small_bmm_plan(int[] sizes, bool[] transposed, ScalarType dtype, int[] misaligned) -> str: how a GPU computes products (Plan in
//       small_bmm.h). sizes: batch, m, n, k.  misaligned: how many bytes behind an aligned address each operand begins.
#include <string>

#include "common/facts.h"
#include "small_bmm/binding.h"

namespace fusebackend::small_bmm {
namespace {

int64_t small_bmm_most_size() { return kMostSize; }

std::string small_bmm_plan(const std::vector<int64_t>& sizes, const std::vector<bool>& transposed, ScalarType dtype,
                           const std::vector<int64_t>& misaligned) {
  STD_TORCH_CHECK(sizes.size() == 4 && transposed.size() == 2 && misaligned.size() == 2, "small_bmm_plan: four sizes, and two operands");
  const int64_t m = sizes[1], n = sizes[2], k = sizes[3];
  Problem p = describe({sizes[0], m, k}, {m * k, k, 1}, {sizes[0], k, n}, {k * n, n, 1}, dtype);
  STD_TORCH_CHECK(p.is_small, "small_bmm_plan: matrices of 1 to ", kMostSize, " rows and columns");
  p.a_transposed = transposed[0], p.b_transposed = transposed[1];
  p.a = reinterpret_cast<const void*>(misaligned[0]), p.b = reinterpret_cast<const void*>(misaligned[1]);
  const Plan plan = make_plan(p);
  FactText facts;
  facts.add("vectors", plan.vectors).add("row_tile", plan.row_tile).add("threads_a_product", plan.threads_a_product)
      .add("products", plan.products).add("shared_bytes", plan.shared_bytes).add("blocks", plan.blocks);
  return facts.str();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("small_bmm_most_size", TORCH_BOX(&small_bmm_most_size));
  m.impl("small_bmm_plan", TORCH_BOX(&small_bmm_plan));
}

}  // namespace fusebackend::small_bmm
