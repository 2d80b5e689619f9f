#include "common/direct_call.h"
#include "common/tile/binding.h"
#include "permute/permute.h"

namespace fusebackend::permute {
namespace {

Tensor permute_copy(const Tensor& x, const std::vector<int64_t>& order) {
  const CudaScope scope(x);
  tile::Problem problem = tile::make_problem(x, std::nullopt, order);
  Tensor out = tile::allocate_result(problem, x);
  check_cuda(launch_copy(problem, scope.stream()), "permute_copy");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { direct::implement<&permute_copy>(m, "CUDA", "permute_copy"); }

}  // namespace fusebackend::permute
