#include "common/tile/binding.h"

#include <string>

#include "common/tile/route.h"
#include "common/tile/work.h"

namespace fusebackend::tile {
namespace {

// The sizes of x + y (numpy's broadcasting).
std::vector<int64_t> broadcast_sizes(const Tensor& x, const Tensor& y) {
  const int64_t rank = std::max(x.dim(), y.dim());
  std::vector<int64_t> sizes(rank);
  for (int64_t d = 0; d < rank; ++d) {
    const int64_t dx = d - (rank - x.dim()), dy = d - (rank - y.dim());
    const int64_t nx = dx < 0 ? 1 : x.size(dx), ny = dy < 0 ? 1 : y.size(dy);
    STD_TORCH_CHECK(nx == ny || nx == 1 || ny == 1, "sizes ", nx, " and ", ny, " of dimension ", d, " do not broadcast");
    sizes[d] = nx == 1 ? ny : nx;
  }
  return sizes;
}

// The strides of torch.empty_permuted(sizes, order).
void set_result_strides(Problem& p, const std::vector<int64_t>& order) {
  STD_TORCH_CHECK(order.size() == size_t(p.rank), "order must name each of the ", p.rank, " output dimensions once, got ", order.size());
  int64_t* const strides = p.strides[kOut];
  std::fill_n(strides, p.rank, -1);
  int64_t step = 1;
  for (int i = p.rank; i-- > 0;) {
    const int64_t d = order[i];
    STD_TORCH_CHECK(d >= 0 && d < p.rank && strides[d] < 0, "order must be a permutation of the output's dimensions");
    strides[d] = step;
    step *= p.sizes[d] > 0 ? p.sizes[d] : 1;
  }
}

// An input in the problem's index space: it is broadcast along dimensions that it lacks, and along those of size 1.
void set_input(Problem& p, Operand operand, const Tensor& t) {
  p.data[operand] = static_cast<char*>(t.data_ptr());
  const IntHeaderOnlyArrayRef sizes = t.sizes(), strides = t.strides();
  const int missing = p.rank - int(sizes.size());
  for (int d = 0; d < p.rank; ++d) {
    const bool broadcast = d < missing || (sizes[d - missing] == 1 && p.sizes[d] != 1);
    p.strides[operand][d] = broadcast ? 0 : strides[d - missing];
  }
}

// The name of the CUDA kernel that would serve permute_copy(x, order) or transpose_add(x, y, ..., order), also where there is no CUDA.
// The result counts as aligned, as one from torch's allocator is.
std::string tile_route(const Tensor& x, const std::optional<Tensor>& y, const std::vector<int64_t>& order) {
  return route_name(route_of(make_plan(make_problem(x, y, order))));
}

// What permute_copy or transpose_add makes a GPU do (work.h), for operands that need not exist: their strides in the output's index space,
// in elements, no `y_strides` for a copy; `x_offset` and `y_offset`, bytes of their first elements behind an aligned address.
std::string tile_work(const std::vector<int64_t>& sizes, const std::vector<int64_t>& x_strides, const std::vector<int64_t>& y_strides,
                      const std::vector<int64_t>& order, int64_t element_bytes, int64_t x_offset, int64_t y_offset) {
  Problem p;
  STD_TORCH_CHECK(sizes.size() <= size_t(kMaxRank) && x_strides.size() == sizes.size(), "tile_work: up to ", kMaxRank, " sizes and strides");
  p.rank = int(sizes.size());
  p.operands = y_strides.empty() ? 2 : 3;
  p.element_bytes = int(element_bytes);
  std::copy(sizes.begin(), sizes.end(), p.sizes);
  set_result_strides(p, order);
  std::copy(x_strides.begin(), x_strides.end(), p.strides[kX]);
  p.data[kX] = reinterpret_cast<char*>(x_offset);
  if (p.is_sum()) {
    STD_TORCH_CHECK(y_strides.size() == sizes.size(), "tile_work: as many strides of y as sizes");
    std::copy(y_strides.begin(), y_strides.end(), p.strides[kY]);
    p.data[kY] = reinterpret_cast<char*>(y_offset);
  }
  return work_of(make_plan(p));
}

// What Python must know: the most dimensions of an operand.
int64_t tile_max_rank() { return kMaxRank; }

}  // namespace

Problem make_problem(const Tensor& x, const std::optional<Tensor>& y, const std::vector<int64_t>& order) {
  if (y) {
    STD_TORCH_CHECK(x.scalar_type() == y->scalar_type(), "x and y must have one dtype");
    STD_TORCH_CHECK(on_same_device(x, *y), "x and y must be on one device");
  }
  const std::vector<int64_t> sizes = y ? broadcast_sizes(x, *y) : to_vector(x.sizes());
  STD_TORCH_CHECK(sizes.size() <= size_t(kMaxRank), "rank ", sizes.size(), " exceeds ", kMaxRank);
  Problem p;
  p.rank = int(sizes.size());
  p.operands = y ? 3 : 2;
  p.element_bytes = int(x.element_size());
  std::copy(sizes.begin(), sizes.end(), p.sizes);
  set_result_strides(p, order);
  set_input(p, kX, x);
  if (y) set_input(p, kY, *y);
  return p;
}

Tensor allocate_result(Problem& p, const Tensor& like) {
  Tensor out = empty_strided_like(like, {p.sizes, p.sizes + p.rank}, {p.strides[kOut], p.strides[kOut] + p.rank});
  p.data[kOut] = static_cast<char*>(out.data_ptr());
  return out;
}

}  // namespace fusebackend::tile

STABLE_TORCH_LIBRARY_FRAGMENT(fusebackend, m) {
  m.def("tile_route(Tensor x, Tensor? y, int[] order) -> str");
  m.def("tile_work(int[] sizes, int[] x_strides, int[] y_strides, int[] order, int element_bytes, int x_offset, int y_offset) -> str");
  m.def("tile_max_rank() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("tile_route", TORCH_BOX(&fusebackend::tile::tile_route));
  m.impl("tile_work", TORCH_BOX(&fusebackend::tile::tile_work));
  m.impl("tile_max_rank", TORCH_BOX(&fusebackend::tile::tile_max_rank));
}
