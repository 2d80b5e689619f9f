// Indices on the CPU.
#pragma once

#include <vector>

#include "index_add/params.h"

namespace fusebackend::index_add {

inline int64_t index_at(const EntryVector& v, int64_t entry) {
  return v.is64 ? static_cast<const int64_t*>(v.data)[entry * v.stride] : static_cast<const int32_t*>(v.data)[entry * v.stride];
}

// The source row of an entry, whose source index is in range.
inline int64_t source_row(const Params& p, int64_t entry) {
  if (!p.source_index.data) return entry;
  const int64_t row = index_at(p.source_index, entry);
  return row < 0 ? row + p.source_rows : row;
}

// The row of each entry, or -1 for those that add nothing. Throws std::out_of_range if an index is out of range.
std::vector<int64_t> target_rows(const Params& p);

// Throws std::out_of_range if a source index is out of range.
void check_source_index(const Params& p);

// The entries that add something, stably sorted by row.
std::vector<int64_t> sorted_entries(const int64_t* target, int64_t n, int64_t rows);

}  // namespace fusebackend::index_add
