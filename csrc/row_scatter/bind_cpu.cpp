#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>

#include "common/direct_call.h"
#include "row_scatter/binding.h"

namespace fusebackend::row_scatter {
namespace {

Tensor row_scatter(const Tensor& source, const Tensor& index, int64_t bins, std::optional<Tensor> self) {
  Tensor out = source;
  const Problem p = describe(source, index, bins, self, out);
  if (out.numel() == 0) return out;
  constexpr int64_t kGrainElements = 1 << 14;
  const int64_t grain = std::max<int64_t>(kGrainElements / (p.sources + p.bins), 1);
  OutOfRange bad;
  std::mutex lock;
  torch::stable::parallel_for(0, p.own.size() * p.shared.size(), grain, [&](int64_t begin, int64_t end) {
    OutOfRange here;
    sum_rows_cpu(p, begin, end, here);
    const std::lock_guard<std::mutex> guard(lock);
    if (here.found) bad = here;
  });
  if (bad.found)  // becomes Python's RuntimeError, which PyTorch's scatter_add raises
    throw std::runtime_error("index " + std::to_string(bad.index) + " is out of bounds for a dimension of size " + std::to_string(p.bins));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) { direct::implement<&row_scatter>(m, "CPU", "row_scatter"); }

}  // namespace fusebackend::row_scatter
