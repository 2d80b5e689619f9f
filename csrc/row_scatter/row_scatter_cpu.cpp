// Rows on a CPU: sources are added to a row of sums in fp32, one after the other, which is then rounded.
#include <algorithm>
#include <vector>

#include "common/cpu_half.h"
#include "row_scatter/row_scatter.h"

namespace fusebackend::row_scatter {
namespace {

template <typename T, typename Index>
void sum_rows(const Problem& p, int64_t begin, int64_t end, OutOfRange& bad) {
  std::vector<float> sums(p.bins);
  const int64_t own = p.own.size();
  for (int64_t i = begin; i < end; ++i) {
    const Offsets a = offsets_of(p.own, i % own), b = offsets_of(p.shared, i / own);
    const T* const source = static_cast<const T*>(p.source) + a.source + b.source;
    const Index* const index = static_cast<const Index*>(p.index) + a.index;
    const T* const self = p.self ? static_cast<const T*>(p.self) + a.out + b.out : nullptr;
    T* const out = static_cast<T*>(p.out) + a.out + b.out;
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t k = 0; k < p.sources; ++k) {
      const int64_t bin = index[k * p.index_step];
      if (bin >= 0 && bin < p.bins) sums[bin] += widen(source[k * p.source_step]);
      else if (!bad.found) bad.found = true, bad.index = bin;
    }
    for (int64_t j = 0; j < p.bins; ++j) narrow(self ? sums[j] + widen(self[j]) : sums[j], out[j]);
  }
}

template <typename T>
void sum_rows_of(const Problem& p, int64_t begin, int64_t end, OutOfRange& bad) {
  p.index_is_64 ? sum_rows<T, int64_t>(p, begin, end, bad) : sum_rows<T, int32_t>(p, begin, end, bad);
}

}  // namespace

void sum_rows_cpu(const Problem& p, int64_t begin, int64_t end, OutOfRange& bad) {
  switch (p.dtype) {
    case DType::kFloat16: return sum_rows_of<Float16>(p, begin, end, bad);
    case DType::kBFloat16: return sum_rows_of<BFloat16>(p, begin, end, bad);
    default: return sum_rows_of<float>(p, begin, end, bad);
  }
}

}  // namespace fusebackend::row_scatter
