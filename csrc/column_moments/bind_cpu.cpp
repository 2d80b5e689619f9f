#include "column_moments/binding.h"
#include "common/direct_call.h"

namespace fusebackend::column_moments {
namespace {

std::tuple<Tensor, Tensor, Tensor> column_moments(const Tensor& given, int64_t begin, int64_t end, double correction, double epsilon,
                                                  ScalarType dtype) {
  Tensor x = given;
  const Results found = make(x, begin, end, correction, epsilon, dtype);
  constexpr int64_t kGrain = 64;  // columns: a task walks over all rows of some of them
  torch::stable::parallel_for(0, found.p.rows.batch * found.p.rows.columns, kGrain,
                              [&](int64_t first, int64_t last) { moments_cpu(found.p, first, last); });
  return found.tensors;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) { direct::implement<&column_moments>(m, "CPU", "column_moments"); }

}  // namespace fusebackend::column_moments
