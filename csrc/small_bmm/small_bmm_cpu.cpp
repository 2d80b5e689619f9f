// The products on a CPU: each operand is widened to fp32, by rows, and a row of the result is summed in registers.
#include <algorithm>

#include "common/cpu_half.h"
#include "small_bmm/small_bmm.h"

namespace fusebackend::small_bmm {
namespace {

constexpr int kTermsOfASum = 4;  // that are added first, and then their sum: fewer roundings of large numbers

// A matrix by rows of kMostSize numbers, of which the last are not written.
template <typename T>
void unpack(const T* from, int rows, int columns, bool transposed, float (&to)[kMostSize][kMostSize]) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) to[r][c] = widen(transposed ? from[c * rows + r] : from[r * columns + c]);
}

// Adds `count` terms from the k-th on to a row of the result. Their sum is added; a term alone is added to the row, which rounds once less.
inline void add_terms(const float* a, const float (&b)[kMostSize][kMostSize], int k, int count, int columns, float* row) {
  if (count == kTermsOfASum) {
    static_assert(kTermsOfASum == 4);
    const float a0 = a[k], a1 = a[k + 1], a2 = a[k + 2], a3 = a[k + 3];
    const float *b0 = b[k], *b1 = b[k + 1], *b2 = b[k + 2], *b3 = b[k + 3];
    for (int c = 0; c < columns; ++c) row[c] += multiply_add(a3, b3[c], multiply_add(a2, b2[c], multiply_add(a1, b1[c], a0 * b0[c])));
  } else if (count == 1) {
    for (int c = 0; c < columns; ++c) row[c] = multiply_add(a[k], b[k][c], row[c]);
  } else {
    float some[kMostSize];
    for (int c = 0; c < columns; ++c) some[c] = a[k] * b[k][c];
    for (int t = k + 1; t < k + count; ++t)
      for (int c = 0; c < columns; ++c) some[c] = multiply_add(a[t], b[t][c], some[c]);
    for (int c = 0; c < columns; ++c) row[c] += some[c];
  }
}

template <typename T>
void multiply(const Problem& p, int64_t begin, int64_t end) {
  float a[kMostSize][kMostSize] = {}, b[kMostSize][kMostSize] = {}, row[kMostSize];
  for (int64_t i = begin; i < end; ++i) {
    unpack(static_cast<const T*>(p.a) + i * p.m * p.k, p.m, p.k, p.a_transposed, a);
    unpack(static_cast<const T*>(p.b) + i * p.k * p.n, p.k, p.n, p.b_transposed, b);
    T* const out = static_cast<T*>(p.out) + i * p.m * p.n;
    for (int r = 0; r < p.m; ++r) {
      std::fill_n(row, p.n, 0.f);
      for (int k = 0; k < p.k; k += kTermsOfASum) add_terms(a[r], b, k, std::min(kTermsOfASum, p.k - k), p.n, row);
      for (int c = 0; c < p.n; ++c) narrow(row[c], out[r * p.n + c]);
    }
  }
}

}  // namespace

void multiply_cpu(const Problem& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kFloat16: return multiply<Float16>(p, begin, end);
    case DType::kBFloat16: return multiply<BFloat16>(p, begin, end);
    default: return multiply<float>(p, begin, end);
  }
}

}  // namespace fusebackend::small_bmm
