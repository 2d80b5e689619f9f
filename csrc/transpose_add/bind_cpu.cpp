#include "common/direct_call.h"
#include "common/tile/cpu_binding.h"
#include "transpose_add/binding.h"

namespace fusebackend::transpose_add {
namespace {

Tensor transpose_add(const Tensor& x, const Tensor& y, double alpha, int64_t ialpha, const std::vector<int64_t>& order) {
  return add_with(x, y, order, [&](const tile::Problem& problem, DType type) {
    tile::run_on_cpu(problem, [&](const tile::Plan& plan, const tile::Blocking& blocking, int64_t begin, int64_t end) {
      add_cpu(plan, blocking, type, {alpha, ialpha}, begin, end);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) { direct::implement<&transpose_add>(m, "CPU", "transpose_add"); }

}  // namespace fusebackend::transpose_add
