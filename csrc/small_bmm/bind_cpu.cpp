#include <algorithm>

#include "common/direct_call.h"
#include "small_bmm/binding.h"

namespace fusebackend::small_bmm {
namespace {

Tensor small_bmm(const Tensor& given_a, const Tensor& given_b) {
  Tensor a = given_a, b = given_b;
  Problem p = describe(a, b);
  if (!p.is_small) return torch::stable::matmul(a, b);
  Tensor out = empty_like_sized(a, {p.batch, p.m, p.n});
  p.out = out.data_ptr();
  constexpr int64_t kGrainProducts = 1 << 15;  // of two numbers
  const int64_t grain = std::max<int64_t>(kGrainProducts / (int64_t(p.m) * p.n * p.k), 1);
  torch::stable::parallel_for(0, p.batch, grain, [&](int64_t begin, int64_t end) { multiply_cpu(p, begin, end); });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) { direct::implement<&small_bmm>(m, "CPU", "small_bmm"); }

}  // namespace fusebackend::small_bmm
