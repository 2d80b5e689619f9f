#include "column_sum/binding.h"
#include "common/direct_call.h"

namespace fusebackend::column_sum {
namespace {

struct Cpu {
  static void run(const Problem& p, const Tensor&) {
    const CpuPlan plan = make_cpu_plan(p);
    std::vector<double> partials(p.sums() * p.batch * plan.chunks * plan.width);
    torch::stable::parallel_for(0, p.batch * plan.chunks, 1,
                                [&](int64_t first, int64_t last) { sum_chunks_cpu(p, plan, partials.data(), first, last); });
    constexpr int64_t kGrain = 1024;  // results
    torch::stable::parallel_for(0, p.sums() * p.batch * p.columns, kGrain,
                                [&](int64_t first, int64_t last) { sum_partials_cpu(p, plan, partials.data(), first, last); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) {
  direct::implement<&Operators<Cpu>::column_sum>(m, "CPU", "column_sum");
  direct::implement<&Operators<Cpu>::column_sums>(m, "CPU", "column_sums");
}

}  // namespace fusebackend::column_sum
