#include <algorithm>
#include <stdexcept>
#include <string>

#include "bind.h"
#include "cpu.h"

namespace fusebackend::accumulate {
namespace {

// Becomes Python's IndexError, which PyTorch's own operators raise.
[[noreturn]] void throw_out_of_range(int64_t index, int64_t size) {
  throw std::out_of_range("index " + std::to_string(index) + " is out of bounds for a dimension of size " + std::to_string(size));
}

void run(const Params& p) {
  const CpuPlan plan = cpu_plan(p, int(torch::stable::get_num_threads()));
  if (plan.out_of_range) throw_out_of_range(*plan.out_of_range, plan.bounded_by);
  if (!p.in_place()) {
    torch::stable::parallel_for(0, p.out_numel * element_size(p.dtype), 1 << 18,
                                [&](int64_t begin, int64_t end) { cpu_initialise(p, begin, end); });
  }
  torch::stable::parallel_for(0, plan.units, plan.grain, [&](int64_t begin, int64_t end) { cpu_accumulate(p, plan, begin, end); });
}

void index_add_(const Tensor& self, FUSEBACKEND_INDEX_ADD_OPTIONS) { index_add_in_place(self, FUSEBACKEND_INDEX_ADD_FORWARD, run); }
Tensor index_add(const Tensor& self, FUSEBACKEND_INDEX_ADD_OPTIONS) { return index_add_onto(self, FUSEBACKEND_INDEX_ADD_FORWARD, run); }
Tensor index_add_zeros(int64_t rows, FUSEBACKEND_INDEX_ADD_OPTIONS) { return index_add_onto_zeros(rows, FUSEBACKEND_INDEX_ADD_FORWARD, run); }

Tensor index_plan(const Tensor& index, int64_t rows, std::optional<int64_t> ignore_index, int64_t bounds,
                  const std::optional<Tensor>& source_index, int64_t source_rows) {
  return make_index_plan(index, rows, ignore_index, bounds, source_index, source_rows, [](const Params& p, int32_t* plan) {
    cpu_index_plan(p, plan, throw_out_of_range);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) {
  m.impl("index_add_", TORCH_BOX(&index_add_));
  m.impl("index_add", TORCH_BOX(&index_add));
  m.impl("index_add_zeros", TORCH_BOX(&index_add_zeros));
  m.impl("index_plan", TORCH_BOX(&index_plan));
}

}  // namespace fusebackend::accumulate
