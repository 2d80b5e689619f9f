// What Python must know of the kernels: operators without tensors.
#include "index_add/make_params.h"
#include "index_add/work.h"

namespace fusebackend::index_add {
namespace {

std::tuple<int64_t, int64_t> index_add_limits() { return {kMaxSliceDims + 1, kChunkEntries}; }

// Tensors that need not exist: a pointer as aligned as torch's allocator gives them.
constexpr uintptr_t kSomewhere = 4096;

Device make_device(const std::vector<int64_t>& facts) {
  STD_TORCH_CHECK(facts.size() == 5, "index_add: five facts of the device are expected, got ", facts.size());
  return {int(facts[0]), int(facts[1]), int(facts[2]), int(facts[3]), int(facts[4])};
}

// Of index and source_index, alike in all sums: int64 vectors.
void set_entries(Params& p, int64_t n, int64_t rows, bool has_source_index, int64_t source_rows, bool leaves_out) {
  p.n = n;
  p.rows = rows;
  p.source_rows = source_rows;
  p.index.data = reinterpret_cast<const void*>(kSomewhere);
  if (has_source_index) p.source_index.data = p.index.data;
  if (leaves_out) p.bounds = Bounds::kDrop;
}

// What index_add would make a GPU do (work.h). `device`: multiprocessors, major compute capability, bytes of shared memory of a
// multiprocessor and of a block, of the L2 cache. `sizes`, `strides`: of self; source has `entries` rows, or `source_rows` with a
// source_index. `start`: 0 for zeros, 1 for self in place, 2 for a copy of self.
std::string index_add_work(const std::vector<int64_t>& device, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                           const std::vector<int64_t>& source_strides, int64_t dim, ScalarType dtype, int64_t entries,
                           int64_t source_rows, bool has_weight, bool has_source_index, double alpha, bool leaves_out, int64_t start,
                           bool precise, bool deterministic, bool planned) {
  const int64_t rank = int64_t(sizes.size());
  STD_TORCH_CHECK(rank <= kMaxSliceDims + 1 && strides.size() == sizes.size() && source_strides.size() == sizes.size(),
                  "index_add_work: up to ", kMaxSliceDims + 1, " sizes, and as many strides");
  const std::optional<DType> type = to_dtype(dtype);
  STD_TORCH_CHECK(type.has_value(), "index_add_work: dtype is not supported");
  dim = wrap_dim(dim, rank);
  Params p;
  set_entries(p, entries, sizes[dim], has_source_index, source_rows, leaves_out);
  p.dtype = *type;
  p.out = reinterpret_cast<void*>(kSomewhere);
  p.source = p.out;
  p.initial = start == 0 ? nullptr : start == 1 ? p.out : reinterpret_cast<const void*>(2 * kSomewhere);
  if (has_weight) p.weight.data = p.out;
  if (planned) p.sorted_index = p.out;
  p.out_row_stride = strides[dim];
  p.source_row_stride = source_strides[dim];
  p.out_numel = 1;
  for (int64_t d = 0; d < rank; ++d) {
    p.out_numel *= sizes[d];
    if (d != dim) p.dims[p.n_dims++] = {sizes[d], strides[d], source_strides[d]};
  }
  merge_slice_dims(p);
  p.alpha = alpha;
  p.precise = precise;
  p.deterministic = deterministic;
  return work_of(p, make_device(device));
}

// The same of index_plan.
std::string index_plan_work(const std::vector<int64_t>& device, int64_t entries, int64_t rows, bool has_source_index, bool leaves_out) {
  Params p;
  set_entries(p, entries, rows, has_source_index, entries, leaves_out);
  return work_of_sort(p, make_device(device));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("index_add_limits", TORCH_BOX(&index_add_limits));
  m.impl("index_add_work", TORCH_BOX(&index_add_work));
  m.impl("index_plan_work", TORCH_BOX(&index_plan_work));
}

}  // namespace fusebackend::index_add
