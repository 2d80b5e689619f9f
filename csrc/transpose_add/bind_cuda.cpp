#include "common/direct_call.h"
#include "transpose_add/binding.h"

namespace fusebackend::transpose_add {
namespace {

Tensor transpose_add(const Tensor& x, const Tensor& y, double alpha, int64_t ialpha, const std::vector<int64_t>& order) {
  return add_with(x, y, order, [&](const tile::Problem& problem, DType type) {
    const CudaScope scope(x);  // x may be on a CPU until add_with has checked it
    check_cuda(launch_add(problem, type, {alpha, ialpha}, scope.stream()), "transpose_add");
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { direct::implement<&transpose_add>(m, "CUDA", "transpose_add"); }

}  // namespace fusebackend::transpose_add
