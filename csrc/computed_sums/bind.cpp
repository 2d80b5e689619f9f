// Operators without tensors, in every library. `dtypes` are those of the inputs, `kinds` a letter for each of how it lies (Kind in computed_sums.h).
//
//   computed_sums_kind(int[] sizes, int[] strides, int[] domain, int batch_dims) -> str: how an input lies whose sizes broadcast to those of
//       `domain`, of which so many dims are not added; "" if it would be copied first.
//   computed_sums_plan(ScalarType[] dtypes, str kinds, int outs, ScalarType[] stored, int batch, int rows, int columns, int multiprocessors,
//       int misaligned) -> str: how a GPU computes it (Plan), of inputs that begin so many bytes behind an aligned address, and whose full rows follow
//       one another without gaps. Results are added, or stored as `stored` says.
//   computed_sums_compile(str program, ScalarType[] dtypes, str kinds, int outs, ScalarType[] stored, int vector, str architecture) -> str: compiles
//       the kernel for so many columns a thread (0: the most) and e.g. "sm_90", unless it was compiled before; what it takes of a multiprocessor.
//       Where that can't be done, "failed: " and the reason.
//   computed_sums_compilations() -> str: how often NVRTC was run in this process.
#include <string>

#include "common/facts.h"
#include "computed_sums/binding.h"
#include "computed_sums/nvrtc.h"

namespace fusebackend::computed_sums {
namespace {

Variant make_variant(const std::string& program, const std::vector<ScalarType>& dtypes, const std::string& kinds, int64_t outs,
                     const std::vector<ScalarType>& stored) {
  check_counts(dtypes.size(), size_t(outs));
  STD_TORCH_CHECK(kinds.size() == dtypes.size(), "computed_sums: ", kinds.size(), " kinds for ", dtypes.size(), " inputs");
  STD_TORCH_CHECK(kinds.find_first_not_of("rgftics") == std::string::npos, "computed_sums: kinds are the letters r, g, f, t, i, c and s, not ", kinds);
  STD_TORCH_CHECK(stored.empty() || int64_t(stored.size()) == outs, "computed_rows: ", stored.size(), " types for ", outs, " results");
  const Program& prepared = prepare(program);
  Variant v{prepared.text, int(prepared.numbers.size()), "", kinds, int(outs), "", 1};
  for (size_t s = 0; s < stored.size(); ++s) v.stored += result_type(stored[s], s);
  for (size_t k = 0; k < dtypes.size(); ++k) v.types += input_type(dtypes[k], k);
  return v;
}

std::string computed_sums_kind(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, const std::vector<int64_t>& domain, int64_t batch_dims) {
  const bool right = domain.size() >= 2 && sizes.size() == domain.size() && strides.size() == domain.size();
  STD_TORCH_CHECK(right, "computed_sums_kind: as many sizes and strides as dims");
  const auto lies = describe(sizes, strides, domain, batch_dims);
  return lies ? std::string(1, lies->kind) : "";
}

std::string computed_sums_plan(const std::vector<ScalarType>& dtypes, const std::string& kinds, int64_t outs,
                               const std::vector<ScalarType>& stored, int64_t batch, int64_t rows, int64_t columns, int64_t multiprocessors,
                               int64_t misaligned) {
  const bool right = 0 < batch && 0 < rows && batch <= kMostRows / rows && columns > 0 && multiprocessors > 0;
  STD_TORCH_CHECK(right, "computed_sums_plan: 1 to ", kMostRows, " rows, columns, and a GPU");
  Variant v = make_variant("", dtypes, kinds, outs, stored);
  Arguments p{};
  p.columns = columns;
  for (size_t k = 0; k < dtypes.size(); ++k) p.inputs[k].data = reinterpret_cast<const void*>(misaligned), p.inputs[k].row_stride = columns;
  v.vector = vector_of(v, p);
  const Plan plan = make_plan(v, batch, rows, columns, int(multiprocessors));
  FactText facts;
  facts.add("vector", v.vector).add("rows_at_once", v.rows_at_once()).add("tile_vectors", plan.tile_vectors).add("lanes", plan.lanes)
      .add("threads", plan.threads).add("blocks_at_once", v.blocks_at_once()).add("tiles", plan.tiles).add("splits", plan.splits).add("blocks", plan.blocks())
      .add("partials", (v.adds() ? plan.partials(columns) * outs : 0)).add("shared_bytes", shared_bytes(v, plan.threads));
  return facts.str();
}

std::string computed_sums_compile(const std::string& program, const std::vector<ScalarType>& dtypes, const std::string& kinds, int64_t outs,
                                  const std::vector<ScalarType>& stored, int64_t vector, const std::string& architecture) {
  Variant v = make_variant(program, dtypes, kinds, outs, stored);
  STD_TORCH_CHECK(vector == 0 || vector == 1 || vector == 2 || vector == 4 || vector == 8, "computed_sums_compile: a vector of 1, 2, 4 or 8, not ", vector);
  v.vector = vector ? int(vector) : widest_vector(v);
  const Compiled& found = compiled(v, architecture);
  if (!found.failure.empty()) return "failed: " + found.failure;
  FactText facts;
  facts.add("vector", v.vector).add("rows_at_once", v.rows_at_once()).add("registers", found.registers).add("stack_bytes", found.stack_bytes)
      .add("spill_bytes", found.spill_bytes).add("code_bytes", found.machine_code.size());
  return facts.str();
}

std::string computed_sums_compilations() { return FactText().add("compilations", compilations()).str(); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("computed_sums_kind", TORCH_BOX(&computed_sums_kind));
  m.impl("computed_sums_plan", TORCH_BOX(&computed_sums_plan));
  m.impl("computed_sums_compile", TORCH_BOX(&computed_sums_compile));
  m.impl("computed_sums_compilations", TORCH_BOX(&computed_sums_compilations));
}

}  // namespace fusebackend::computed_sums
