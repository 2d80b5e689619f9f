#include "cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace fusebackend::accumulate {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float widen(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline void narrow(float f, BFloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out.bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t(rounded);
}

#ifdef __F16C__
inline float widen(Float16 x) { return _cvtsh_ss(x.bits); }
inline void narrow(float f, Float16& out) { out.bits = _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
#else
inline float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  float f;
  if (magnitude >= 0x7c00) {
    const uint32_t bits = sign | 0x7f800000 | ((magnitude & 0x3ff) << 13);
    std::memcpy(&f, &bits, 4);
    return f;
  }
  const uint32_t bits = magnitude << 13;  // exponent 2^-112 too small: rescaling also normalises subnormals
  std::memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  return sign ? -f : f;
}
inline void narrow(float f, Float16& out) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = uint16_t(bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) {
    out.bits = sign | 0x7e00;
  } else if (bits >= 0x477ff000) {
    out.bits = sign | 0x7c00;
  } else if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    out.bits = sign | uint16_t(bits - 0x3f000000);
  } else {
    out.bits = sign | uint16_t((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13);
  }
}
#endif
template <typename T> T widen(T x) { return x; }

template <typename T> struct AccOf { using type = T; };
template <> struct AccOf<BFloat16> { using type = float; };
template <> struct AccOf<Float16> { using type = float; };

// One source row, or a part of it, onto its row of out. The strides are compile-time constants where that lets the loop vectorise.
template <bool kScaled, int kSourceStride, typename T, typename A>
inline void add_piece(T* __restrict out, const T* __restrict source, int64_t length, int64_t out_stride, int64_t source_stride, A scale) {
  if (kSourceStride >= 0) out_stride = 1, source_stride = kSourceStride;
  for (int64_t i = 0; i < length; ++i) {
    A x = source[i * source_stride];
    if (kScaled) x *= scale;
    out[i * out_stride] += x;
  }
}
// sum[i] += scale * source[i]
template <typename T>
inline void add_widened(float* __restrict sum, const T* __restrict source, int64_t length, int64_t stride, float scale) {
  int64_t i = 0;
#ifdef __F16C__
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

// out[i] = sum[i], rounded.
template <typename T>
inline void store_rounded(T* __restrict out, const float* __restrict sum, int64_t length, int64_t stride) {
  int64_t i = 0;
#ifdef __F16C__
  if (std::is_same_v<T, Float16> && stride == 1)
    for (; i + 8 <= length; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(sum + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  if (stride == 1)
    for (; i < length; ++i) narrow(sum[i], out[i]);
  for (; i < length; ++i) narrow(sum[i], out[i * stride]);
}

inline int64_t index_at(const RowVector& v, int64_t n) {
  return v.is64 ? static_cast<const int64_t*>(v.data)[n * v.stride] : static_cast<const int32_t*>(v.data)[n * v.stride];
}

// The source row of entry n, and its factor.
inline int64_t source_row(const Params& p, int64_t n) {
  if (!p.source_index.data) return n;
  const int64_t row = index_at(p.source_index, n);
  return row < 0 ? row + p.source_rows : row;
}
template <typename T>
inline auto factor(const Params& p, int64_t n) {
  using A = typename AccOf<T>::type;
  const T* const weight = static_cast<const T*>(p.weight.data);
  return weight ? A(p.alpha) * A(widen(weight[n * p.weight.stride])) : A(p.alpha);
}

// Rows come in no order that the hardware could foresee, and pieces of rows end before its prefetcher has warmed to them.
template <typename T>
inline void prefetch(const T* p, int64_t length) {
  constexpr int64_t kLine = 64 / int64_t(sizeof(T)), kMost = 8;
  for (int64_t i = 0; i < std::min(length, kMost * kLine); i += kLine) __builtin_prefetch(p + i);
}

constexpr int64_t kAhead = 8, kAtOnce = 512;  // entries
constexpr int64_t kCacheBytes = 2 << 20;

// The first `count` entries, or those that are listed, for `length` columns of out and source. Entries without a row are passed over.
template <typename T, bool kScaled, bool kListed>
void add_entries(const Params& p, const int64_t* target, const int64_t* entries, int64_t count, T* out, const T* source, int64_t length) {
  using A = typename AccOf<T>::type;
  const SliceDim& last = p.dims[p.n_dims - 1];
  const bool dense = last.out_stride == 1 && last.source_stride == 1;
  const bool fits_cache = p.rows * p.columns() * int64_t(sizeof(T)) <= kCacheBytes;
  for (int64_t k = 0; k < count; ++k) {
    if (k + kAhead < count) {
      const int64_t ahead = kListed ? entries[k + kAhead] : k + kAhead;
      if (!fits_cache) prefetch(out + target[ahead] * p.out_row_stride, length);
      prefetch(source + source_row(p, ahead) * p.source_row_stride, length);
    }
    const int64_t n = kListed ? entries[k] : k, row = target[n];
    if (!kListed && row < 0) continue;
    T* const to = out + row * p.out_row_stride;
    const T* const from = source + source_row(p, n) * p.source_row_stride;
    const A scale = kScaled ? factor<T>(p, n) : A(1);
    if (dense)
      add_piece<kScaled, 1>(to, from, length, 1, 1, scale);
    else if (last.out_stride == 1 && last.source_stride == 0)
      add_piece<kScaled, 0>(to, from, length, 1, 0, scale);
    else
      add_piece<kScaled, -1>(to, from, length, last.out_stride, last.source_stride, scale);
  }
}

// All entries in their own order, onto out[row_begin..row_end), for `length` columns from the given offsets on.
template <typename T, bool kScaled>
void walk(const Params& p, const int64_t* target, int64_t out_offset, int64_t source_offset, int64_t length,
          int64_t row_begin, int64_t row_end) {
  T* const out = static_cast<T*>(p.out) + out_offset;
  const T* const source = static_cast<const T*>(p.source) + source_offset;
  const bool all_rows = row_begin == 0 && row_end == p.rows;
  if (length == 1 && !kScaled && !p.source_index.data) {
    const bool all = all_rows && target == p.index.data;  // none is left out, or another thread's
    if (all && p.out_row_stride == 1 && p.source_row_stride == 1)
      for (int64_t n = 0; n < p.n; ++n) out[target[n]] += source[n];
    else
      for (int64_t n = 0; n < p.n; ++n)
        if (target[n] >= row_begin && target[n] < row_end) out[target[n] * p.out_row_stride] += source[n * p.source_row_stride];
    return;
  }
  if (all_rows) return add_entries<T, kScaled, false>(p, target, nullptr, p.n, out, source, length);
  // To jump over other threads' entries, which are anywhere, costs as much as to add them.
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

// 16-bit floats: the entries of a row one after the other, into fp32 sums that are rounded once. Takes the runs that begin in
// order[begin, end).
template <typename T>
void walk_runs(const Params& p, const CpuPlan& plan, int64_t out_offset, int64_t source_offset, int64_t length, int64_t begin,
               int64_t end) {
  constexpr int64_t kChunk = 1024;
  float sum[kChunk];
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
    for (int64_t c = 0; c < length; c += kChunk) {
      const int64_t chunk = std::min(kChunk, length - c);
      std::fill_n(sum, chunk, 0.0f);
      add_widened(sum, to + c * last.out_stride, chunk, last.out_stride, 1.0f);
      if (next < entries) prefetch(out + target[order[next]] * p.out_row_stride + c * last.out_stride, chunk);
      for (int64_t k = begin; k < next; ++k) {
        auto piece = [&](int64_t n) { return source + source_row(p, n) * p.source_row_stride + c * last.source_stride; };
        if (k + kAhead < entries) prefetch(piece(order[k + kAhead]), chunk);
        add_widened(sum, piece(order[k]), chunk, last.source_stride, factor<T>(p, order[k]));
      }
      store_rounded(to + c * last.out_stride, sum, chunk, last.out_stride);
    }
    begin = next;
  }
}

// Columns [begin, end) of the flattened slice, in pieces that lie along its last dimension: f(out offset, source offset, length).
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

// The same for slices of a few elements, where sorting costs more than an fp32 copy of out.
template <typename T>
void walk_wide(const Params& p, const int64_t* target) {
  const int64_t columns = p.columns();
  std::vector<int64_t> out_offset(columns), source_offset(columns);
  for (int64_t c = 0; c < columns; ++c) {
    for_pieces(p, c, c + 1, [&](int64_t out, int64_t source, int64_t) { out_offset[c] = out, source_offset[c] = source; });
  }
  T* const out = static_cast<T*>(p.out);
  const T* const source = static_cast<const T*>(p.source);
  std::vector<float> sum(p.rows * columns);
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t c = 0; c < columns; ++c) sum[row * columns + c] = widen(out[row * p.out_row_stride + out_offset[c]]);
  for (int64_t n = 0; n < p.n; ++n) {
    if (target[n] < 0) continue;
    const T* const from = source + source_row(p, n) * p.source_row_stride;
    const float scale = factor<T>(p, n);
    for (int64_t c = 0; c < columns; ++c) sum[target[n] * columns + c] += scale * widen(from[source_offset[c]]);
  }
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t c = 0; c < columns; ++c) narrow(sum[row * columns + c], out[row * p.out_row_stride + out_offset[c]]);
}

// Slices of a few elements onto many more rows than there are entries: an entry seldom meets another, so each is added, and rounded, as it
// comes.
template <typename T>
void walk_sparse(const Params& p, const int64_t* target) {
  T* const out = static_cast<T*>(p.out);
  const T* const source = static_cast<const T*>(p.source);
  for_pieces(p, 0, p.columns(), [&](int64_t out_offset, int64_t source_offset, int64_t length) {
    const SliceDim& last = p.dims[p.n_dims - 1];
    for (int64_t n = 0; n < p.n; ++n) {
      if (target[n] < 0) continue;
      T* const to = out + target[n] * p.out_row_stride + out_offset;
      const T* const from = source + source_row(p, n) * p.source_row_stride + source_offset;
      const float scale = factor<T>(p, n);
      for (int64_t i = 0; i < length; ++i) {
        T& sum = to[i * last.out_stride];
        narrow(widen(sum) + scale * widen(from[i * last.source_stride]), sum);
      }
    }
  });
}

// The entries that count, sorted stably by row.
std::vector<int64_t> sorted_entries(const int64_t* target, int64_t n, int64_t rows) {
  std::vector<int64_t> order;
  if (rows > 8 * n) {
    for (int64_t i = 0; i < n; ++i)
      if (target[i] >= 0) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return target[a] < target[b]; });
    return order;
  }
  std::vector<int64_t> start(rows + 2);  // start[row + 2] counts, start[row + 1] is the next free place
  for (int64_t i = 0; i < n; ++i)
    if (target[i] >= 0) ++start[target[i] + 2];
  std::partial_sum(start.begin(), start.end(), start.begin());
  order.resize(start[rows + 1]);
  for (int64_t i = 0; i < n; ++i)
    if (target[i] >= 0) order[start[target[i] + 1]++] = i;
  return order;
}

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

// Threads that share by columns do so in whole cache lines.
int64_t line_elements(const Params& p) { return 64 / element_size(p.dtype); }

// The indices themselves, where they need no more than the check that they are in range.
const int64_t* plain_targets(const Params& p) {
  if (!p.index.is64 || p.index.stride != 1 || p.has_ignore) return nullptr;
  const int64_t* const index = static_cast<const int64_t*>(p.index.data);
  bool outside = false;
  for (int64_t n = 0; n < p.n; ++n) outside |= uint64_t(index[n]) >= uint64_t(p.rows);
  return outside ? nullptr : index;
}

// Where an index points: a row, kNone for nowhere, kBad for out of range.
constexpr int64_t kNone = -1, kBad = -2;
template <typename Index>
void resolve(const Params& p, std::vector<int64_t>& target, std::optional<int64_t>& bad) {
  for (int64_t n = 0; n < p.n; ++n) {
    const int64_t index = static_cast<const Index*>(p.index.data)[n * p.index.stride];
    int64_t row = index < 0 && p.bounds == Bounds::kWrap ? index + p.rows : index;
    if (row < 0 || row >= p.rows) row = p.bounds == Bounds::kDrop ? kNone : kBad;
    if (p.has_ignore && index == p.ignore) row = kNone;
    if (row == kBad && !bad) bad = index;
    target[n] = row;
  }
}

}  // namespace

int64_t longest_run(const CpuPlan& plan) {
  int64_t longest = 0, run = 0, row = -1;
  for (const int64_t n : plan.order) {
    run = plan.target[n] == row ? run + 1 : 1;
    row = plan.target[n];
    longest = std::max(longest, run);
  }
  return longest;
}

CpuPlan cpu_plan(const Params& p, int threads) {
  constexpr int64_t kWorthAThread = 32768, kNarrow = 8;  // elements
  CpuPlan plan;
  plan.target = plain_targets(p);
  if (!plan.target) {
    plan.resolved.resize(p.n);
    plan.target = plan.resolved.data();
    p.index.is64 ? resolve<int64_t>(p, plan.resolved, plan.out_of_range) : resolve<int32_t>(p, plan.resolved, plan.out_of_range);
  }
  plan.bounded_by = p.rows;
  if (p.source_index.data && !plan.out_of_range) {
    plan.bounded_by = p.source_rows;
    for (int64_t n = 0; n < p.n && !plan.out_of_range; ++n)
      if (const int64_t row = index_at(p.source_index, n); row < (p.source_wraps ? -p.source_rows : 0) || row >= p.source_rows) plan.out_of_range = row;
  }
  if (plan.out_of_range) return plan;

  const int64_t columns = p.columns(), lines = (columns + line_elements(p) - 1) / line_elements(p);
  plan.wide = is_half(p.dtype) && columns < kNarrow && p.rows <= 4 * p.n;
  plan.sparse = is_half(p.dtype) && columns < kNarrow && !plan.wide && !p.precise;
  if (is_half(p.dtype) && !plan.wide && !plan.sparse) plan.order = sorted_entries(plan.target, p.n, p.rows);
  const int64_t entries = is_half(p.dtype) ? int64_t(plan.order.size()) : p.n;
  int64_t useful = std::clamp<int64_t>(entries * columns / kWorthAThread, 1, threads);
  // Sorted entries are best shared by rows, each row being set up once, unless one row has most of them.
  plan.by_rows = lines < useful || (is_half(p.dtype) && useful > 1 && longest_run(plan) <= entries / (2 * useful));
  // Reading every index and taking half of them, at random, costs more than it shares when a slice is only a few elements.
  if (plan.wide || plan.sparse || (plan.by_rows && !is_half(p.dtype) && columns < kNarrow)) useful = 1;
  plan.units = plan.wide || plan.sparse ? 1 : !plan.by_rows ? lines : is_half(p.dtype) ? entries : p.rows;
  plan.grain = std::max<int64_t>(1, (plan.units + useful - 1) / useful);
  return plan;
}

void cpu_accumulate(const Params& p, const CpuPlan& plan, int64_t begin, int64_t end) {
  const int64_t line = line_elements(p), columns = p.columns();
  const int64_t column_begin = plan.by_rows ? 0 : begin * line, column_end = plan.by_rows ? columns : std::min(end * line, columns);
  dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr bool kRoundOnce = !std::is_same_v<typename AccOf<T>::type, T>;
    if constexpr (kRoundOnce)
      if (plan.wide || plan.sparse) return plan.wide ? walk_wide<T>(p, plan.target) : walk_sparse<T>(p, plan.target);
    for_pieces(p, column_begin, column_end, [&](int64_t out, int64_t source, int64_t length) {
      if constexpr (kRoundOnce) {
        walk_runs<T>(p, plan, out, source, length, plan.by_rows ? begin : 0, plan.by_rows ? end : int64_t(plan.order.size()));
      } else {
        const int64_t row_begin = plan.by_rows ? begin : 0, row_end = plan.by_rows ? end : p.rows;
        if (p.weight.data || p.alpha != 1.0)
          walk<T, true>(p, plan.target, out, source, length, row_begin, row_end);
        else
          walk<T, false>(p, plan.target, out, source, length, row_begin, row_end);
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

}  // namespace fusebackend::accumulate
