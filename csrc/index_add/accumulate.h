// out = initial + sum over n of alpha * weight[n] * source[source_index[n] or n], added to row index[n] of out. Knows nothing of torch.
//
// The indexed dimension is the "row"; all others are slice dimensions, collapsed where out and source agree and ordered so that the
// last one is the fastest in out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusebackend::accumulate {

enum class DType : int { kFloat64, kFloat32, kFloat16, kBFloat16, kInt64, kInt32, kInt16, kInt8, kUInt8 };

constexpr int element_size(DType t) {
  switch (t) {
    case DType::kFloat64: case DType::kInt64: return 8;
    case DType::kFloat32: case DType::kInt32: return 4;
    case DType::kInt8: case DType::kUInt8: return 1;
    default: return 2;
  }
}
constexpr bool is_half(DType t) { return t == DType::kFloat16 || t == DType::kBFloat16; }
constexpr bool is_floating(DType t) { return t <= DType::kBFloat16; }

constexpr int kMaxSliceDims = 8;

struct SliceDim {
  int64_t size, out_stride, source_stride;  // elements; a source stride of 0 is an expanded dimension
};

// What an index outside [0, rows) means.
enum class Bounds : int {
  kStrict,  // an error (index_add, scatter_add)
  kWrap,    // -1 is the last row, and so on down to -rows; beyond, an error (index_put)
  kDrop,    // the entry contributes nothing (embedding backward)
};

// A vector of n entries that a kernel reads beside the rows; data == nullptr means that it is absent.
struct RowVector {
  const void* data = nullptr;
  int64_t stride = 1;
  bool is64 = true;  // of indices: int64 or int32
};

struct Params {
  DType dtype = DType::kFloat32;
  void* out = nullptr;
  const void* initial = nullptr;  // laid out as out; nullptr: zeros; == out: in place
  const void* source = nullptr;
  RowVector index, source_index, weight;
  const void* plan = nullptr;  // of index and source_index, if it was made before: see PlanView
  int64_t n = 0, rows = 0, source_rows = 0;
  int64_t out_row_stride = 0, source_row_stride = 0;  // elements
  int n_dims = 0;
  SliceDim dims[kMaxSliceDims];
  int64_t out_numel = 0;       // of the dense storage that out covers; read only when initial != out
  double alpha = 1.0;
  Bounds bounds = Bounds::kStrict;
  bool source_wraps = true;  // negative source indices count from the end (indexing); else they are errors (gather)
  bool has_ignore = false;  // entries whose index is `ignore` contribute nothing (an embedding's padding_idx)
  int64_t ignore = 0;
  bool precise = false;        // 16-bit floats: sum in fp32 and round once, whatever it costs
  bool deterministic = false;

  constexpr int64_t columns() const {
    int64_t c = 1;
    for (int d = 0; d < n_dims; ++d) c *= dims[d].size;
    return c;
  }
  constexpr bool in_place() const { return initial == out; }
};

// A plan: the entries stably sorted by row, those that are left out last. In 32-bit words.
constexpr uint32_t kChunk = 128;
template <typename Word>
struct PlanView {
  Word* entries;     // [n]
  Word* from;        // [n]: the source row of each, if there is a source_index; else nullptr
  Word* offsets;     // [rows + 1]: how many sorted entries are before each row's first; then, before those that are left out
  Word* chunk_rows;  // the row of every kChunk-th sorted entry, `rows` for those that are left out
};
template <typename Word>
PlanView<Word> view_plan(const Params& p, Word* words) {
  const int64_t lists = p.source_index.data ? 2 : 1;
  return {words, lists == 2 ? words + p.n : nullptr, words + lists * p.n, words + lists * p.n + p.rows + 1};
}
constexpr int64_t plan_words(int64_t n, int64_t rows, bool gathers) { return (gathers ? 2 : 1) * n + rows + 1 + (n + kChunk - 1) / kChunk; }

// Sorts slice dimensions by falling out stride and merges neighbours that both tensors let merge.
inline void collapse(Params& p) {
  int kept = 0;
  for (int d = 0; d < p.n_dims; ++d)
    if (p.dims[d].size != 1) p.dims[kept++] = p.dims[d];
  for (int i = 1; i < kept; ++i)
    for (int j = i; j > 0 && p.dims[j - 1].out_stride < p.dims[j].out_stride; --j) {
      const SliceDim t = p.dims[j];
      p.dims[j] = p.dims[j - 1];
      p.dims[j - 1] = t;
    }
  int last = 0;
  for (int d = 1; d < kept; ++d) {
    SliceDim& a = p.dims[last];
    const SliceDim& b = p.dims[d];
    if (a.out_stride == b.out_stride * b.size && a.source_stride == b.source_stride * b.size) {
      a = {a.size * b.size, b.out_stride, b.source_stride};
    } else {
      p.dims[++last] = b;
    }
  }
  if (kept == 0) p.dims[0] = {1, 1, 1};
  p.n_dims = last + 1;
}

}  // namespace fusebackend::accumulate
