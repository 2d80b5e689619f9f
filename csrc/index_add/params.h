// The problem that every kernel of this family solves, as plain data. Knows nothing of torch.
//
//     out = initial;   for each entry k:  out[index[k]] += alpha * weight[k] * source[source_index ? source_index[k] : k]
//
// out[r] and source[r] are rows: slices along the indexed dimension. The other dimensions are the slice dimensions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "common/integer_math.h"

namespace fusebackend::index_add {

constexpr int kMaxSliceDims = 8;

struct SliceDim {
  int64_t size, out_stride, source_stride;  // strides in elements; the source's is 0 where it is expanded
};

// What an index outside [0, rows) means.
enum class Bounds : int {
  kStrict,  // an error (index_add, scatter_add)
  kWrap,    // -1 is the last row, and so on down to -rows; beyond, an error (index_put)
  kDrop,    // the entry adds nothing (embedding backward)
};

// A vector with one element for each entry; absent if data is nullptr.
struct EntryVector {
  const void* data = nullptr;
  int64_t stride = 1;
  bool is64 = true;  // of indices: int64 or int32
};

struct Params {
  DType dtype = DType::kFloat32;
  void* out = nullptr;
  const void* initial = nullptr;  // laid out as out; nullptr: zeros; == out: in place
  const void* source = nullptr;
  EntryVector index, source_index, weight;
  const void* sorted_index = nullptr;  // what index_plan made of index and source_index (SortedIndex), or nullptr
  int64_t n = 0, rows = 0, source_rows = 0;  // entries, rows of out, rows of source
  int64_t out_row_stride = 0, source_row_stride = 0;  // elements
  int n_dims = 0;
  SliceDim dims[kMaxSliceDims];
  int64_t out_numel = 0;  // of the dense storage that out covers; read only if initial != out
  double alpha = 1.0;
  Bounds bounds = Bounds::kStrict;
  bool source_wraps = true;  // a negative source index counts from the end (indexing); else it is an error (gather)
  bool has_ignore = false;   // entries whose index is `ignore` add nothing (an embedding's padding_idx)
  int64_t ignore = 0;
  bool precise = false;  // 16-bit floats: sum in fp32 and round once, whatever it costs
  bool deterministic = false;

  constexpr int64_t columns() const {
    int64_t c = 1;
    for (int d = 0; d < n_dims; ++d) c *= dims[d].size;
    return c;
  }
  constexpr bool in_place() const { return initial == out; }
  constexpr bool scales() const { return weight.data || alpha != 1.0; }  // entries have factors
  constexpr bool leaves_out() const { return has_ignore || bounds == Bounds::kDrop; }  // entries may add nothing
  constexpr bool is_plain() const { return !scales() && !source_index.data && !leaves_out(); }
};

// The entries, stably sorted by row; those that add nothing come last. What the operator index_plan returns, in 32-bit words.
constexpr uint32_t kChunkEntries = 128;
template <typename Word>
struct SortedIndex {
  Word* entries;      // [n]
  Word* source_rows;  // [n]: of each entry; nullptr without a source_index, where an entry's source row is the entry
  Word* row_begins;   // [rows + 1]: how many sorted entries come before each row's first; at last, how many add something
  Word* chunk_rows;   // the row of every kChunkEntries-th sorted entry; `rows` for those that add nothing

  SortedIndex(const Params& p, Word* words)
      : entries(words),
        source_rows(p.source_index.data ? words + p.n : nullptr),
        row_begins(words + (p.source_index.data ? 2 : 1) * p.n),
        chunk_rows(row_begins + p.rows + 1) {}
};
inline int64_t sorted_index_words(const Params& p) {
  return (p.source_index.data ? 2 : 1) * p.n + p.rows + 1 + ceil_div(p.n, kChunkEntries);
}

}  // namespace fusebackend::index_add
