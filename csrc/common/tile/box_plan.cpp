#include "common/tile/box_plan.h"

#include <algorithm>

#include "common/integer_math.h"
#include "common/tile/route.h"

namespace fusebackend::tile {
namespace {

constexpr int64_t kOutRunBytes = 256, kInRunBytes = 512;  // wanted of every run in global memory
constexpr int64_t kMinBoxes = 1024;                       // as many as a large GPU runs at once
constexpr int64_t kGoodSharedBytes = 44 * 1024;           // lets five blocks share a multiprocessor
constexpr int64_t kMinUncutRunBytes = 128;                // input runs are not cut below this for a smaller halo

// The extent of a box along a dimension of `size` elements of which about `wanted` are to be covered: all of them where that is at most 2.5
// times as many; else such that boxes are of similar size, in whole multiples of `unit`. If the last box `overlaps` the one before it, both
// move the same elements: then up to two more boxes are tried, for less overlap.
int64_t choose_extent(int64_t size, int64_t wanted, int64_t unit, bool overlaps) {
  if (wanted * 5 / 2 >= size) return size;
  const int64_t least = ceil_div(size, wanted);
  int64_t best = size, moved = INT64_MAX;
  for (int64_t count = least; count <= least + (overlaps ? 2 : 0) && moved - size > size / 32; ++count) {
    const int64_t extent = std::min(size, round_up(ceil_div(size, count), unit)), total = round_up(size, extent);
    if (total < moved) best = extent, moved = total;
  }
  return best;
}

// Grows a box along `order`, the dimensions from the fastest on in the output or the staged input, until runs there have about `wanted`
// elements or end.
void grow(const Problem& p, const int* order, Operand operand, int64_t wanted, int64_t* extent) {
  int64_t run = 1;
  for (int i = 0; i < p.rank && run < wanted; ++i) {
    const int d = order[i];
    const bool by_sectors = i == 0 && (operand == kOut || row_address_bits(p, operand, d) % kSectorBytes == 0);
    const int64_t unit = by_sectors ? kSectorBytes / p.element_bytes : 1;
    extent[d] = std::max(extent[d], choose_extent(p.sizes[d], ceil_div(wanted, run), unit, operand != kOut));
    if (extent[d] < p.sizes[d]) return;
    run *= extent[d];
  }
}

// Elements of a box that are neighbours in `order`.
int64_t run_length(const Problem& p, const int* order, const int64_t* extent) {
  int64_t run = 1;
  for (int i = 0; i < p.rank; ++i) {
    run *= extent[order[i]];
    if (extent[order[i]] < p.sizes[order[i]]) break;
  }
  return run;
}

int64_t volume(const Problem& p, const int64_t* extent) {
  int64_t v = 1;
  for (int d = 0; d < p.rank; ++d) v *= extent[d];
  return v;
}

// Whether dimension `outer` continues `inner` in an operand's memory, within a box.
bool continues(const Problem& p, const BoxPlan& box, Operand operand, int outer, int inner) {
  return box.extent[inner] == p.sizes[inner] && p.strides[operand][outer] == p.strides[operand][inner] * p.sizes[inner];
}

// Output runs: leading dimensions that a box covers whole, and a last one, which may be cut into windows. Where runs would not end at
// sectors, they continue into the next dimension, so that it is cut instead.
void find_out_runs(const Plan& plan, BoxPlan& box) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes;
  box.direct_is_contiguous = plan.has_direct();
  bool ended = false;
  for (int d = 0; d < p.rank; ++d) {
    const bool joins = d == 0 || (!ended && box.out_length <= kMaxBoxTable && continues(p, box, kOut, d, d - 1));
    const int64_t bytes = box.out_length * w;
    const bool is_enough = d > 0 && bytes % kSectorBytes == 0 && (box.extent[d] == 1 || bytes >= kOutRunBytes);
    if (joins && !is_enough) {
      box.out_length *= box.extent[d];
      ++box.out_rank;
      box.run_dim = d;
      if (p.is_sum() && p.strides[plan.other()][d] != p.strides[kOut][d]) box.direct_is_contiguous = false;
    } else {
      ended = true;
      box.out_runs *= box.extent[d];
    }
  }
  const int last = box.run_dim;
  box.inner_length = box.out_length / box.extent[last];
  box.window = box.run_extent = box.extent[last];
  if (box.extent[last] == p.sizes[last]) return;
  uintptr_t begins = reinterpret_cast<uintptr_t>(p.data[kOut]) | box.window * box.inner_length * w;  // low bits of windows' addresses
  for (int d = last + 1; d < p.rank; ++d) begins |= p.strides[kOut][d] * w;
  if (begins % kSectorBytes) box.halo = ceil_div(kSectorBytes / w - 1, box.inner_length);
  if (box.window + box.halo < p.sizes[last]) {
    box.window_dim = last;
    box.run_extent = p.sizes[last];
  } else {
    box.window = box.run_extent = p.sizes[last];
    box.halo = 0;
  }
  box.extent[last] = box.window + box.halo;
  box.out_length = box.inner_length * box.extent[last];
}

// Finds input runs of the halo that hold no element to be stored, and moves the dimensions of output runs to the end of `dims`, so that they
// are the first ones. Only where long input runs remain.
void find_unread_runs(const Plan& plan, BoxPlan& box) {
  const Problem& p = plan.problem;
  const int64_t* in_stride = p.strides[plan.staged];
  const int64_t unread = box.halo * box.inner_length - (kSectorBytes / p.element_bytes - 1);
  if (box.halo == 0 || unread <= 0 || plan.staged_pair) return;
  int ordered[kMaxRank], others = 0;
  int64_t in_length = 1, other_runs = 1;
  bool contiguous = true;
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k];
    if (d <= box.window_dim) {
      if (in_stride[d] == 0) return;
      contiguous = false;
      continue;
    }
    contiguous = contiguous && (others == 0 ? in_stride[d] == 1 : continues(p, box, plan.staged, d, ordered[others - 1]));
    if (contiguous) in_length *= box.extent[d];
    else if (in_stride[d]) other_runs *= box.extent[d];
    ordered[others++] = d;
  }
  if (in_length * p.element_bytes < kMinUncutRunBytes) return;
  for (int d = 0; d <= box.window_dim; ++d)
    if (box.extent[d] > 1) ordered[others++] = d;
  std::copy_n(ordered, others, box.dims);
  box.unread_runs = unread * other_runs;
}

BoxPlan box_of(const Plan& plan, int64_t out_run_bytes, int64_t in_run_bytes, int64_t box_bytes) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes, *in_stride = p.strides[plan.staged];
  BoxPlan box;
  int in_order[kMaxRank], out_order[kMaxRank];
  for (int d = 0; d < p.rank; ++d) in_order[d] = out_order[d] = d, box.extent[d] = 1;
  std::sort(in_order, in_order + p.rank, [&](int x, int y) {
    if ((in_stride[x] == 0) != (in_stride[y] == 0)) return in_stride[y] == 0;
    return in_stride[x] != in_stride[y] ? in_stride[x] < in_stride[y] : x < y;
  });
  grow(p, out_order, kOut, std::max<int64_t>(out_run_bytes / w, 2), box.extent);
  grow(p, in_order, plan.staged, std::max<int64_t>(in_run_bytes / w, 2), box.extent);
  // A small box grows along its shorter runs, or the others, by at most three quarters more than is wanted.
  for (bool grew = true; grew && volume(p, box.extent) * w < box_bytes;) {
    const int64_t out = run_length(p, out_order, box.extent), in = run_length(p, in_order, box.extent);
    grew = false;
    for (const bool along_out : {out <= in, out > in}) {
      int64_t extent[kMaxRank];
      std::copy_n(box.extent, p.rank, extent);
      grow(p, along_out ? out_order : in_order, along_out ? kOut : plan.staged, 2 * (along_out ? out : in), extent);
      const int64_t before = volume(p, box.extent), after = volume(p, extent);
      grew = after > before && after * w <= box_bytes * 7 / 4;
      if (grew) {
        std::copy_n(extent, p.rank, box.extent);
        break;
      }
    }
  }
  for (int d = 0; d < p.rank; ++d) {  // or it takes in more runs
    const int64_t times = box_bytes / (volume(p, box.extent) * w);
    if (times >= 2) box.extent[d] = std::min(p.sizes[d], box.extent[d] * times);
  }
  find_out_runs(plan, box);
  for (int i = 0; i < p.rank; ++i)
    if (box.extent[in_order[i]] > 1) box.dims[box.rank++] = in_order[i];
  if (box.rank == 0) box.dims[box.rank++] = 0;
  find_unread_runs(plan, box);
  for (int d = 0; d < p.rank; ++d) box.count *= ceil_div(p.sizes[d], d == box.window_dim ? box.window : box.extent[d]);
  lay_out_box(plan, box);
  return box;
}

}  // namespace

BoxPlan plan_box(const Plan& plan) {
  int64_t out_run = kOutRunBytes, in_run = kInRunBytes;
  const int64_t total = plan.problem.elements() * plan.problem.element_bytes;
  int64_t bytes = std::clamp<int64_t>(total / kMinBoxes, kTileBytes / 4, kTileBytes);
  BoxPlan box = box_of(plan, out_run, in_run, bytes);
  // Shorter runs let more blocks share a multiprocessor.
  if (box.shared_bytes > kGoodSharedBytes) box = box_of(plan, out_run, in_run / 2, bytes);
  if (box.shared_bytes > kGoodSharedBytes) box = box_of(plan, out_run / 2, in_run / 2, bytes);
  if (box.shared_bytes > kGoodSharedBytes && box.count < kMinBoxes) box = box_of(plan, out_run / 2, in_run / 4, bytes);
  while (!box.fits() && out_run > 16) {
    (in_run * 2 > out_run ? in_run : out_run) /= 2;
    bytes /= 2;
    box = box_of(plan, out_run, in_run, bytes);
  }
  spread_lanes(plan, box);
  return box;
}

}  // namespace fusebackend::tile
