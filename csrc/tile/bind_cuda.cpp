#include "bind.h"

namespace fusebackend::tile {
namespace {

Tensor permute_copy(const Tensor& x, const std::vector<int64_t>& order) {
  const CudaScope scope(x);
  return permute_copy_with(
      x, order, [&](const Problem& problem) { check_cuda(launch_permute_copy(problem, scope.stream()), "permute_copy"); });
}

Tensor transpose_add(const Tensor& x, const Tensor& y, double alpha, int64_t ialpha, const std::vector<int64_t>& order) {
  const CudaScope scope(x);
  return transpose_add_with(x, y, alpha, ialpha, order, [&](const Problem& problem, AddType type, Alpha a) {
    check_cuda(launch_add(problem, type, a, scope.stream()), "transpose_add");
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  m.impl("permute_copy", TORCH_BOX(&permute_copy));
  m.impl("transpose_add", TORCH_BOX(&transpose_add));
  m.impl("tile_route", TORCH_BOX(&tile_route));
}

}  // namespace fusebackend::tile
