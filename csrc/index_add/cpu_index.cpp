#include "index_add/cpu_index.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "index_add/cpu_sum.h"

namespace fusebackend::index_add {
namespace {

// Becomes Python's IndexError where indices count from the end, as index_put's do, else RuntimeError: PyTorch's index_add, scatter_add and
// gather raise that.
[[noreturn]] void throw_out_of_range(int64_t index, int64_t size, bool wraps) {
  const std::string message = "index " + std::to_string(index) + " is out of bounds for a dimension of size " + std::to_string(size);
  if (wraps) throw std::out_of_range(message);
  throw std::runtime_error(message);
}

template <typename Index>
void resolve(const Params& p, std::vector<int64_t>& target) {
  for (int64_t n = 0; n < p.n; ++n) {
    const int64_t index = static_cast<const Index*>(p.index.data)[n * p.index.stride];
    int64_t row = index < 0 && p.bounds == Bounds::kWrap ? index + p.rows : index;
    const bool outside = row < 0 || row >= p.rows, ignored = p.has_ignore && index == p.ignore;
    if (outside && !ignored && p.bounds != Bounds::kDrop) throw_out_of_range(index, p.rows, p.bounds == Bounds::kWrap);
    target[n] = outside || ignored ? -1 : row;
  }
}

}  // namespace

std::vector<int64_t> target_rows(const Params& p) {
  std::vector<int64_t> target(p.n);
  p.index.is64 ? resolve<int64_t>(p, target) : resolve<int32_t>(p, target);
  return target;
}

void check_source_index(const Params& p) {
  for (int64_t n = 0; p.source_index.data && n < p.n; ++n)
    if (const int64_t row = index_at(p.source_index, n); row < (p.source_wraps ? -p.source_rows : 0) || row >= p.source_rows)
      throw_out_of_range(row, p.source_rows, p.source_wraps);
}

std::vector<int64_t> sorted_entries(const int64_t* target, int64_t n, int64_t rows) {
  std::vector<int64_t> order;
  if (rows > 8 * n) {
    for (int64_t i = 0; i < n; ++i)
      if (target[i] >= 0) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return target[a] < target[b]; });
    return order;
  }
  std::vector<int64_t> start(rows + 2);  // start[row + 2] counts; then start[row + 1] is the row's next free place
  for (int64_t i = 0; i < n; ++i)
    if (target[i] >= 0) ++start[target[i] + 2];
  std::partial_sum(start.begin(), start.end(), start.begin());
  order.resize(start[rows + 1]);
  for (int64_t i = 0; i < n; ++i)
    if (target[i] >= 0) order[start[target[i] + 1]++] = i;
  return order;
}

void cpu_sort_index(const Params& p, uint32_t* words) {
  const SortedIndex<uint32_t> sorted(p, words);
  const std::vector<int64_t> target = target_rows(p), kept = sorted_entries(target.data(), p.n, p.rows);
  check_source_index(p);
  uint32_t* end = std::copy(kept.begin(), kept.end(), sorted.entries);
  for (int64_t n = 0; n < p.n; ++n)
    if (target[n] < 0) *end++ = uint32_t(n);
  auto row_of = [&](uint32_t entry) { return uint32_t(target[entry] < 0 ? p.rows : target[entry]); };
  std::fill_n(sorted.row_begins, p.rows + 1, 0);
  for (const int64_t n : kept) ++sorted.row_begins[target[n] + 1];
  std::partial_sum(sorted.row_begins, sorted.row_begins + p.rows + 1, sorted.row_begins);
  for (int64_t k = 0; k < p.n; k += kChunkEntries) sorted.chunk_rows[k / kChunkEntries] = row_of(sorted.entries[k]);
  for (int64_t k = 0; sorted.source_rows && k < p.n; ++k) sorted.source_rows[k] = uint32_t(source_row(p, sorted.entries[k]));
}

}  // namespace fusebackend::index_add
