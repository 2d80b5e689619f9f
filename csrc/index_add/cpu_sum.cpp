#include "index_add/cpu_sum.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/cpu_half.h"
#include "index_add/cpu_index.h"

// A product that overflows is infinite before it is added, as in eager mode: no fused multiply-add, in which it may be finite.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace fusebackend::index_add {
namespace {

constexpr int64_t kLineBytes = 64;

template <typename F>
void dispatch(DType t, F&& f) {
  switch (t) {
    case DType::kFloat64: return f(double());
    case DType::kFloat32: return f(float());
    case DType::kFloat16: return f(Float16());
    case DType::kBFloat16: return f(BFloat16());
    case DType::kInt64: return f(int64_t());
    case DType::kInt32: return f(int32_t());
    case DType::kInt16: return f(int16_t());
    case DType::kInt8: return f(int8_t());
    case DType::kUInt8: return f(uint8_t());
  }
}

// ---- rows ----

// out += scale * source, for a part of a row. With kSourceStride >= 0 both strides are compile-time constants (out's is 1), so that the
// loop is vectorised.
template <bool kScaled, int kSourceStride, typename T, typename A>
inline void add_row(T* __restrict out, const T* __restrict source, int64_t length, int64_t out_stride, int64_t source_stride, A scale) {
  if (kSourceStride >= 0) out_stride = 1, source_stride = kSourceStride;
  for (int64_t i = 0; i < length; ++i) {
    A x = source[i * source_stride];
    if (kScaled) x *= scale;
    out[i * out_stride] += x;
  }
}

// sum += scale * source
template <typename T>
inline void add_widened(float* __restrict sum, const T* __restrict source, int64_t length, int64_t stride, float scale) {
  int64_t i = 0;
#if FUSE_HAS_AVX2  // the compiler does not vectorise these conversions
  if (std::is_same_v<T, Float16> && stride == 1)
    for (; i + 8 <= length; i += 8) {
      const __m256 x = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))), _mm256_set1_ps(scale));
      _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), x));
    }
#endif
  if (stride == 1)
    for (; i < length; ++i) sum[i] += scale * widen(source[i]);
  for (; i < length; ++i) sum[i] += scale * widen(source[i * stride]);
}

// out = sum, rounded.
template <typename T>
inline void store_rounded(T* __restrict out, const float* __restrict sum, int64_t length, int64_t stride) {
  int64_t i = 0;
#if FUSE_HAS_AVX2
  if (std::is_same_v<T, Float16> && stride == 1)
    for (; i + 8 <= length; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(sum + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  if (stride == 1)
    for (; i < length; ++i) narrow(sum[i], out[i]);
  for (; i < length; ++i) narrow(sum[i], out[i * stride]);
}

template <typename T>
inline Acc<T> factor_of(const Params& p, int64_t entry) {
  using A = Acc<T>;
  const T* const weight = static_cast<const T*>(p.weight.data);
  return weight ? A(p.alpha) * A(widen(weight[entry * p.weight.stride])) : A(p.alpha);
}

// The hardware's prefetcher can't foresee which row comes next, and rows end before it has started.
constexpr int64_t kPrefetchEntries = 8;  // so many entries ahead
template <typename T>
inline void prefetch(const T* p, int64_t length) {
  constexpr int64_t kLine = kLineBytes / int64_t(sizeof(T)), kMaxLines = 8;
  for (int64_t i = 0; i < std::min(length, kMaxLines * kLine); i += kLine) __builtin_prefetch(p + i);
}

// Columns [begin, end) of a row, in pieces that lie along the last slice dimension: f(out offset, source offset, length).
template <typename F>
void for_pieces(const Params& p, int64_t begin, int64_t end, F f) {
  const int64_t last = p.dims[p.n_dims - 1].size;
  while (begin < end) {
    const int64_t start = begin % last, length = std::min(end - begin, last - start);
    int64_t rest = begin / last, out = start * p.dims[p.n_dims - 1].out_stride, source = start * p.dims[p.n_dims - 1].source_stride;
    for (int d = p.n_dims - 2; d >= 0; --d) {
      const int64_t i = rest % p.dims[d].size;
      rest /= p.dims[d].size;
      out += i * p.dims[d].out_stride;
      source += i * p.dims[d].source_stride;
    }
    f(out, source, length);
    begin += length;
  }
}

// ---- kInOrder ----

// The first `count` entries, or those that are listed, for `length` columns of out and source. Skips entries without a row.
template <typename T, bool kScaled, bool kListed>
void add_entries(const Params& p, const int64_t* target, const int64_t* entries, int64_t count, T* out, const T* source, int64_t length) {
  constexpr int64_t kCacheBytes = 2 << 20;
  using A = Acc<T>;
  const SliceDim& last = p.dims[p.n_dims - 1];
  const bool dense = last.out_stride == 1 && last.source_stride == 1;
  const bool fits_cache = p.rows * p.columns() * int64_t(sizeof(T)) <= kCacheBytes;
  for (int64_t k = 0; k < count; ++k) {
    if (k + kPrefetchEntries < count) {
      const int64_t ahead = kListed ? entries[k + kPrefetchEntries] : k + kPrefetchEntries;
      if (!fits_cache) prefetch(out + target[ahead] * p.out_row_stride, length);
      prefetch(source + source_row(p, ahead) * p.source_row_stride, length);
    }
    const int64_t n = kListed ? entries[k] : k, row = target[n];
    if (!kListed && row < 0) continue;
    T* const to = out + row * p.out_row_stride;
    const T* const from = source + source_row(p, n) * p.source_row_stride;
    const A scale = kScaled ? factor_of<T>(p, n) : A(1);
    if (dense)
      add_row<kScaled, 1>(to, from, length, 1, 1, scale);
    else if (last.out_stride == 1 && last.source_stride == 0)
      add_row<kScaled, 0>(to, from, length, 1, 0, scale);
    else
      add_row<kScaled, -1>(to, from, length, last.out_stride, last.source_stride, scale);
  }
}

// All entries of out's rows [row_begin, row_end), for `length` columns from the given offsets on.
template <typename T, bool kScaled>
void add_in_order(const Params& p, const int64_t* target, int64_t out_offset, int64_t source_offset, int64_t length, int64_t row_begin,
                  int64_t row_end) {
  constexpr int64_t kAtOnce = 512;  // entries
  T* const out = static_cast<T*>(p.out) + out_offset;
  const T* const source = static_cast<const T*>(p.source) + source_offset;
  const bool all_rows = row_begin == 0 && row_end == p.rows;
  if (length == 1 && !kScaled && !p.source_index.data) {
    const bool every_entry = all_rows && target == p.index.data;
    if (every_entry && p.out_row_stride == 1 && p.source_row_stride == 1)
      for (int64_t n = 0; n < p.n; ++n) out[target[n]] += source[n];
    else
      for (int64_t n = 0; n < p.n; ++n)
        if (target[n] >= row_begin && target[n] < row_end) out[target[n] * p.out_row_stride] += source[n * p.source_row_stride];
    return;
  }
  if (all_rows) return add_entries<T, kScaled, false>(p, target, nullptr, p.n, out, source, length);
  // The entries are listed first: a branch on whose an entry is can't be predicted, and costs as much as adding it.
  int64_t entries[kAtOnce];
  for (int64_t first = 0; first < p.n; first += kAtOnce) {
    int64_t count = 0;
    for (int64_t n = first; n < std::min(first + kAtOnce, p.n); ++n) {
      entries[count] = n;
      count += target[n] >= row_begin && target[n] < row_end;
    }
    add_entries<T, kScaled, true>(p, target, entries, count, out, source, length);
  }
}

// ---- the other methods, for 16-bit floats ----

// The runs of one row that begin in order[begin, end), for `length` columns from the given offsets on.
template <typename T>
void sum_sorted(const Params& p, const CpuPlan& plan, int64_t out_offset, int64_t source_offset, int64_t length, int64_t begin,
                int64_t end) {
  constexpr int64_t kColumns = 1024;  // at once
  float sum[kColumns];
  T* const out = static_cast<T*>(p.out) + out_offset;
  const T* const source = static_cast<const T*>(p.source) + source_offset;
  const SliceDim& last = p.dims[p.n_dims - 1];
  const std::vector<int64_t>& order = plan.order;
  const int64_t* const target = plan.target;
  const int64_t entries = int64_t(order.size());
  while (begin > 0 && begin < end && target[order[begin]] == target[order[begin - 1]]) ++begin;
  while (begin < end) {
    const int64_t row = target[order[begin]];
    int64_t next = begin + 1;
    while (next < entries && target[order[next]] == row) ++next;
    T* const to = out + row * p.out_row_stride;
    for (int64_t c = 0; c < length; c += kColumns) {
      const int64_t columns = std::min(kColumns, length - c);
      std::fill_n(sum, columns, 0.0f);
      add_widened(sum, to + c * last.out_stride, columns, last.out_stride, 1.0f);
      if (next < entries) prefetch(out + target[order[next]] * p.out_row_stride + c * last.out_stride, columns);
      for (int64_t k = begin; k < next; ++k) {
        auto piece = [&](int64_t n) { return source + source_row(p, n) * p.source_row_stride + c * last.source_stride; };
        if (k + kPrefetchEntries < entries) prefetch(piece(order[k + kPrefetchEntries]), columns);
        add_widened(sum, piece(order[k]), columns, last.source_stride, factor_of<T>(p, order[k]));
      }
      store_rounded(to + c * last.out_stride, sum, columns, last.out_stride);
    }
    begin = next;
  }
}

template <typename T>
void sum_into_fp32_copy(const Params& p, const int64_t* target) {
  const int64_t columns = p.columns();
  std::vector<int64_t> out_offset(columns), source_offset(columns);
  for (int64_t c = 0; c < columns; ++c)
    for_pieces(p, c, c + 1, [&](int64_t out, int64_t source, int64_t) { out_offset[c] = out, source_offset[c] = source; });
  T* const out = static_cast<T*>(p.out);
  const T* const source = static_cast<const T*>(p.source);
  std::vector<float> sum(p.rows * columns);
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t c = 0; c < columns; ++c) sum[row * columns + c] = widen(out[row * p.out_row_stride + out_offset[c]]);
  for (int64_t n = 0; n < p.n; ++n) {
    if (target[n] < 0) continue;
    const T* const from = source + source_row(p, n) * p.source_row_stride;
    const float scale = factor_of<T>(p, n);
    for (int64_t c = 0; c < columns; ++c) sum[target[n] * columns + c] += scale * widen(from[source_offset[c]]);
  }
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t c = 0; c < columns; ++c) narrow(sum[row * columns + c], out[row * p.out_row_stride + out_offset[c]]);
}

template <typename T>
void add_and_round_each(const Params& p, const int64_t* target) {
  const SliceDim& last = p.dims[p.n_dims - 1];
  for_pieces(p, 0, p.columns(), [&](int64_t out_offset, int64_t source_offset, int64_t length) {
    for (int64_t n = 0; n < p.n; ++n) {
      if (target[n] < 0) continue;
      T* const to = static_cast<T*>(p.out) + target[n] * p.out_row_stride + out_offset;
      const T* const from = static_cast<const T*>(p.source) + source_row(p, n) * p.source_row_stride + source_offset;
      const float scale = factor_of<T>(p, n);
      for (int64_t i = 0; i < length; ++i) {
        T& sum = to[i * last.out_stride];
        narrow(widen(sum) + scale * widen(from[i * last.source_stride]), sum);
      }
    }
  });
}

// ---- how threads share the work ----

// The indices themselves, where they need no more than a check that they are in range; otherwise nullptr.
const int64_t* plain_targets(const Params& p) {
  if (!p.index.is64 || p.index.stride != 1 || p.has_ignore) return nullptr;
  const int64_t* const index = static_cast<const int64_t*>(p.index.data);
  bool outside = false;
  for (int64_t n = 0; n < p.n; ++n) outside |= uint64_t(index[n]) >= uint64_t(p.rows);
  return outside ? nullptr : index;
}

int64_t longest_run(const CpuPlan& plan) {
  int64_t longest = 0, run = 0, row = -1;
  for (const int64_t n : plan.order) {
    run = plan.target[n] == row ? run + 1 : 1;
    row = plan.target[n];
    longest = std::max(longest, run);
  }
  return longest;
}

int64_t line_elements(const Params& p) { return kLineBytes / element_size(p.dtype); }

}  // namespace

CpuPlan make_cpu_plan(const Params& p, int threads) {
  constexpr int64_t kMinElementsPerThread = 32768, kNarrow = 8;  // elements of a row
  CpuPlan plan;
  plan.target = plain_targets(p);
  if (!plan.target) {
    plan.resolved = target_rows(p);
    plan.target = plan.resolved.data();
  }
  check_source_index(p);

  const int64_t columns = p.columns(), lines = ceil_div(columns, line_elements(p));
  if (is_half(p.dtype)) {
    plan.method = columns >= kNarrow       ? CpuMethod::kSorted
                  : p.rows <= 4 * p.n ? CpuMethod::kFp32Copy
                  : p.precise         ? CpuMethod::kSorted
                                      : CpuMethod::kRoundEach;
    if (plan.method == CpuMethod::kSorted) plan.order = sorted_entries(plan.target, p.n, p.rows);
  }
  const bool sorted = plan.method == CpuMethod::kSorted;
  const int64_t entries = is_half(p.dtype) ? int64_t(plan.order.size()) : p.n;
  int64_t useful = std::clamp<int64_t>(entries * columns / kMinElementsPerThread, 1, threads);
  // Sorted entries are best shared by rows, since each row is set up once then, unless one row has most of them.
  plan.by_rows = lines < useful || (sorted && useful > 1 && longest_run(plan) <= entries / (2 * useful));
  if (plan.method == CpuMethod::kFp32Copy || plan.method == CpuMethod::kRoundEach) {
    plan.units = useful = 1;
  } else {
    // To read every index and add a part of the entries costs more than it shares if rows are only a few elements.
    if (plan.by_rows && !sorted && columns < kNarrow) useful = 1;
    plan.units = !plan.by_rows ? lines : sorted ? entries : p.rows;
  }
  plan.grain = std::max<int64_t>(1, ceil_div(plan.units, useful));
  return plan;
}

void cpu_sum(const Params& p, const CpuPlan& plan, int64_t begin, int64_t end) {
  const int64_t line = line_elements(p), columns = p.columns();
  const int64_t column_begin = plan.by_rows ? 0 : begin * line, column_end = plan.by_rows ? columns : std::min(end * line, columns);
  dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr bool kIsHalf = !std::is_same_v<Acc<T>, T>;
    if constexpr (kIsHalf) {
      if (plan.method == CpuMethod::kFp32Copy) return sum_into_fp32_copy<T>(p, plan.target);
      if (plan.method == CpuMethod::kRoundEach) return add_and_round_each<T>(p, plan.target);
    }
    for_pieces(p, column_begin, column_end, [&](int64_t out, int64_t source, int64_t length) {
      if constexpr (kIsHalf) {
        sum_sorted<T>(p, plan, out, source, length, plan.by_rows ? begin : 0, plan.by_rows ? end : int64_t(plan.order.size()));
      } else {
        const int64_t row_begin = plan.by_rows ? begin : 0, row_end = plan.by_rows ? end : p.rows;
        const auto add = p.scales() ? add_in_order<T, true> : add_in_order<T, false>;
        add(p, plan.target, out, source, length, row_begin, row_end);
      }
    });
  });
}

void cpu_initialise(const Params& p, int64_t begin, int64_t end) {
  char* const out = static_cast<char*>(p.out) + begin;
  if (p.initial)
    std::memcpy(out, static_cast<const char*>(p.initial) + begin, size_t(end - begin));
  else
    std::memset(out, 0, size_t(end - begin));
}

}  // namespace fusebackend::index_add
