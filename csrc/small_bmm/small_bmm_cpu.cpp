// The products on a CPU: each operand is widened to fp32, by rows, and a row of the result is summed in registers.
#include <algorithm>

#include "common/cpu_half.h"
#include "small_bmm/small_bmm.h"

namespace fusebackend::small_bmm {
namespace {

// A matrix by rows of kMostSize numbers, of which the last are not written.
template <typename T>
void unpack(const T* from, int rows, int columns, bool transposed, float (&to)[kMostSize][kMostSize]) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) to[r][c] = widen(transposed ? from[c * rows + r] : from[r * columns + c]);
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
      for (int k = 0; k < p.k; ++k)
        for (int c = 0; c < p.n; ++c) row[c] = multiply_add(a[r][k], b[k][c], row[c]);
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
