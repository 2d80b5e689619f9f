#include <algorithm>
#include <stdexcept>
#include <string>

#include "bind.h"
#include "cpu.h"

namespace fusebackend::accumulate {
namespace {

void run(const Params& p) {
  const CpuPlan plan = cpu_plan(p, int(torch::stable::get_num_threads()));
  if (plan.out_of_range) {
    // Becomes Python's IndexError, which PyTorch's own operators raise.
    throw std::out_of_range("index " + std::to_string(*plan.out_of_range) + " is out of bounds for a dimension of size " +
                            std::to_string(plan.bounded_by));
  }
  if (!p.in_place()) {
    torch::stable::parallel_for(0, p.out_numel * element_size(p.dtype), 1 << 18,
                                [&](int64_t begin, int64_t end) { cpu_initialise(p, begin, end); });
  }
  torch::stable::parallel_for(0, plan.units, plan.grain, [&](int64_t begin, int64_t end) { cpu_accumulate(p, plan, begin, end); });
}

void index_add_(const Tensor& self, FUSEBACKEND_INDEX_ADD_OPTIONS) { index_add_in_place(self, FUSEBACKEND_INDEX_ADD_FORWARD, run); }
Tensor index_add(const Tensor& self, FUSEBACKEND_INDEX_ADD_OPTIONS) { return index_add_onto(self, FUSEBACKEND_INDEX_ADD_FORWARD, run); }
Tensor index_add_zeros(int64_t rows, FUSEBACKEND_INDEX_ADD_OPTIONS) { return index_add_onto_zeros(rows, FUSEBACKEND_INDEX_ADD_FORWARD, run); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) {
  m.impl("index_add_", TORCH_BOX(&index_add_));
  m.impl("index_add", TORCH_BOX(&index_add));
  m.impl("index_add_zeros", TORCH_BOX(&index_add_zeros));
}

}  // namespace fusebackend::accumulate
