#include "common/direct_call.h"
#include "common/tile/cpu_binding.h"
#include "permute/permute.h"

namespace fusebackend::permute {
namespace {

Tensor permute_copy(const Tensor& x, const std::vector<int64_t>& order) {
  tile::Problem problem = tile::make_problem(x, std::nullopt, order);
  Tensor out = tile::allocate_result(problem, x);
  tile::run_on_cpu(problem, copy_cpu);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) { direct::implement<&permute_copy>(m, "CPU", "permute_copy"); }

}  // namespace fusebackend::permute
