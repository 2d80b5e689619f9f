#include "index_add/bind.h"
#include "index_add/cpu_sum.h"

namespace fusebackend::index_add {
namespace {

struct Cpu {
  static void sum(const Params& p, const Tensor&) {
    const CpuPlan plan = make_cpu_plan(p, int(torch::stable::get_num_threads()));
    if (!p.in_place())
      torch::stable::parallel_for(0, p.out_numel * element_size(p.dtype), 1 << 18,
                                  [&](int64_t begin, int64_t end) { cpu_initialise(p, begin, end); });
    torch::stable::parallel_for(0, plan.units, plan.grain, [&](int64_t begin, int64_t end) { cpu_sum(p, plan, begin, end); });
  }
  static void sort(const Params& p, uint32_t* words, const Tensor&) { cpu_sort_index(p, words); }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) { Operators<Cpu>::implement(m, "CPU"); }

}  // namespace fusebackend::index_add
