#include "bind.h"
#include "cpu.h"

namespace fusebackend::tile {
namespace {

// Work below this many elements a thread does not pay for waking it.
constexpr int64_t kGrainElements = 32768;

template <typename Body>
void parallel(const Plan& plan, Body body) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, cpu_unit_elements(plan)));
  torch::stable::parallel_for(0, cpu_units(plan), grain, body);
}

Tensor permute_copy(const Tensor& x, const std::vector<int64_t>& order) {
  return permute_copy_with(x, order, [](const Problem& problem) {
    const Plan plan = make_plan(problem);
    parallel(plan, [&](int64_t begin, int64_t end) { permute_copy_cpu(plan, begin, end); });
  });
}

Tensor transpose_add(const Tensor& x, const Tensor& y, double alpha, int64_t ialpha, const std::vector<int64_t>& order) {
  return transpose_add_with(x, y, alpha, ialpha, order, [](const Problem& problem, AddType type, Alpha a) {
    const Plan plan = make_plan(problem);
    parallel(plan, [&](int64_t begin, int64_t end) { add_cpu(plan, type, a, begin, end); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) {
  m.impl("permute_copy", TORCH_BOX(&permute_copy));
  m.impl("transpose_add", TORCH_BOX(&transpose_add));
  m.impl("tile_route", TORCH_BOX(&tile_route));
}

}  // namespace fusebackend::tile
