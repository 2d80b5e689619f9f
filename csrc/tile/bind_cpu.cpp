#include "bind.h"
#include "cpu.h"

namespace fusebackend::tile {
namespace {

// Work below this many elements a thread does not pay for waking it.
constexpr int64_t kGrainElements = 8192;

template <typename Body>
void parallel(const Problem& problem, Body body) {
  const Plan plan = make_plan(problem);
  const Cut cut = make_cut(plan);
  const int64_t unit = std::max<int64_t>(1, cut.part * cut.inner * cut.rows);
  torch::stable::parallel_for(0, cut.units, std::max<int64_t>(1, kGrainElements / unit),
                              [&](int64_t begin, int64_t end) { body(plan, cut, begin, end); });
}

Tensor permute_copy(const Tensor& x, const std::vector<int64_t>& order) {
  return permute_copy_with(x, order, [](const Problem& problem) { parallel(problem, permute_copy_cpu); });
}

Tensor transpose_add(const Tensor& x, const Tensor& y, double alpha, int64_t ialpha, const std::vector<int64_t>& order) {
  return transpose_add_with(x, y, alpha, ialpha, order, [](const Problem& problem, AddType type, Alpha a) {
    parallel(problem, [&](const Plan& plan, const Cut& cut, int64_t begin, int64_t end) { add_cpu(plan, cut, type, a, begin, end); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) {
  m.impl("permute_copy", TORCH_BOX(&permute_copy));
  m.impl("transpose_add", TORCH_BOX(&transpose_add));
  m.impl("tile_route", TORCH_BOX(&tile_route));
}

}  // namespace fusebackend::tile
