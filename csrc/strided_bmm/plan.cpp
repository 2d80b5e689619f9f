// Which products the kernels compute, and by which route.
#include <algorithm>
#include <optional>

#include "common/integer_math.h"
#include "strided_bmm/strided_bmm.h"

namespace fusebackend::strided_bmm {
namespace {

constexpr int64_t kMostSize = 1 << 30;
constexpr int64_t kMostTiles = 1 << 30;
constexpr int64_t kMostStride = 1 << 23;  // within a tile, whose offsets are counted in 32 bits

std::optional<Inner> inner_of(const Operand& x) {
  if (x.term == 1) return Inner::kTerms;
  if (x.row == 1) return Inner::kRows;
  if (x.batch == 1) return Inner::kBatch;
  return std::nullopt;
}

// How many of so many vectors of eight batch entries a tile takes. In 16 bits all of them, so that a row of a tile is one run in memory, else whole
// sectors of 32 bytes, of which memory does not take a part as fast; 0 if neither can be.
int span_of(int64_t vectors, int itemsize) {
  if (itemsize > 2) return 1;
  if (vectors <= kMostSpan) return int(vectors);
  return vectors % 4 == 0 ? 4 : vectors % 2 == 0 ? 2 : 0;
}

const char* describe_operand(const Strides& strides, int64_t outer, int64_t batch, int64_t rows, int64_t terms, int vector, Operand& x) {
  const int64_t sizes[4] = {outer, batch, rows, terms};
  int64_t kept[4];
  for (int d = 0; d < 4; ++d) kept[d] = sizes[d] > 1 ? strides[d] : 0;
  x.outer = kept[0], x.batch = kept[1], x.row = kept[2], x.term = kept[3];
  const std::optional<Inner> inner = inner_of(x);
  if (!inner) return "an operand without neighbouring elements along its rows, its terms or its batch";
  x.inner = *inner;
  const int at = x.inner == Inner::kTerms ? 3 : x.inner == Inner::kRows ? 2 : 1;
  for (int d = 0; d < 4; ++d)
    if (d != at && kept[d] % vector) return "an operand in which vectors of 16 bytes are not aligned";
  if (x.row > kMostStride || x.term > kMostStride) return "an operand with a stride of more than 2^23 elements";
  if (x.inner == Inner::kBatch && batch % kTileEntries) return "a batch, innermost in memory, of no multiple of 8 entries";
  return nullptr;
}

}  // namespace

bool is_permutation(Order order) {
  std::sort(order.begin(), order.end());
  return order == Order{0, 1, 2, 3};
}

Strides result_strides(const Sizes& sizes, const Order& order) {
  Strides strides;
  int64_t step = 1;
  for (int i = 3; i >= 0; --i) strides[order[i]] = step, step *= std::max<int64_t>(sizes[order[i]], 1);
  return strides;
}

const char* describe(const Sizes& sizes, const Strides& x, const Strides& y, const Order& order, DType dtype, Problem& p) {
  const auto [outer, batch, m, n, k] = sizes;
  if (!is_half(dtype) && dtype != DType::kFloat32) return "a dtype that is neither 16 bits wide nor fp32";
  const int itemsize = element_size(dtype), vector = 16 / itemsize;
  p.dtype = dtype;
  for (const int64_t size : sizes)
    if (size < 1 || size > kMostSize) return "a product without elements, or a dim of more than 2^30";
  if (const char* reason = describe_operand(x, outer, batch, m, k, vector, p.x)) return reason;
  if (const char* reason = describe_operand(y, outer, batch, n, k, vector, p.y)) return reason;
  if (!is_permutation(order)) return "an order that is no permutation of the result's dims";
  const Strides strides = result_strides(sizes, order);
  p.out.outer = strides[0], p.out.batch = strides[1], p.out.row = strides[2], p.out.column = strides[3];
  p.outer = int(outer), p.batch = int(batch), p.m = int(m), p.n = int(n), p.k = int(k);
  if (p.y.inner == Inner::kBatch) return "a batch that is innermost in y";
  const bool from_batch = p.x.inner == Inner::kBatch, to_batch = order[3] == 1;
  if (to_batch) {
    if (from_batch) return "a batch that is innermost in x and in the result";
    if (batch % kTileEntries) return "a batch, innermost in memory, of no multiple of 8 entries";
    p.span = span_of(batch / kTileEntries, itemsize);
    if (p.span == 0) return "a batch, innermost in the result, of an odd number of vectors of 16 bytes";
  } else {
    if (order[3] != 3) return "a result whose innermost dim in memory is neither its columns nor the batch";
    if (n % vector) return "a result in which vectors of 16 bytes are not aligned";
    if (from_batch && p.y.inner != Inner::kRows) return "a batch that is innermost in x, where columns are not in y";
    if (from_batch && p.y.batch > kMostStride) return "an operand with a stride of more than 2^23 elements";
    p.span = 1;
  }
  p.route = to_batch ? Route::kToBatch : from_batch ? Route::kFromBatch : Route::kOneEntry;
  const TileShape tile = tile_of(p.route, itemsize);
  if (outer * batch > kMostTiles || outer * batch * ceil_div(m, tile.rows) > kMostTiles / ceil_div(n, tile.columns)) return "too many tiles";
  return nullptr;
}

}  // namespace fusebackend::strided_bmm
