#include "cuda_plan.h"

#include <algorithm>

namespace fusebackend::tile {
namespace {

constexpr int64_t kChunk = 16, kSector = 32;
constexpr int64_t kOutRunBytes = 256;      // wanted of every run in global memory; short writes cost more than short reads
constexpr int64_t kInRunBytes = 128;
constexpr int64_t kMinRowBytes = 512;      // shorter rows that are not aligned go through boxes
constexpr int64_t kMaxSharedBytes = 48 * 1024;
constexpr double kMinTileUse = 0.75;       // fraction of tile elements that are not padding

int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

double tile_use(const Plan& plan) {
  const Problem& p = plan.problem;
  const int64_t o = p.sizes[0], q = p.sizes[plan.staged_dim], to = tile_o(p.element_bytes), tq = tile_q(p.element_bytes);
  return double(o * q) / double(ceil_div(o, to) * to * ceil_div(q, tq) * tq);
}

// Extent of a dimension that contributes at least `wanted` of its `size` elements: all of it if that is not much more, else pieces of
// like size, whole chunks each.
int64_t cut(int64_t size, int64_t wanted, int64_t chunk) {
  if (wanted * 5 / 2 >= size) return size;
  const int64_t even = ceil_div(size, ceil_div(size, wanted));
  return std::min(size, ceil_div(even, chunk) * chunk);
}

// Grows extents along `order` until a run has `wanted` elements.
void grow(const Problem& p, const int* order, int64_t wanted, int64_t* extent) {
  int64_t run = 1;
  for (int i = 0; i < p.rank && run < wanted; ++i) {
    const int d = order[i];
    extent[d] = std::max(extent[d], cut(p.sizes[d], ceil_div(wanted, run), i == 0 ? kSector / p.element_bytes : 1));
    run *= extent[d];
  }
}

int64_t volume(const Problem& p, const int64_t* extent) {
  int64_t v = 1;
  for (int d = 0; d < p.rank; ++d) v *= extent[d];
  return v;
}

BoxPlan box_of(const Plan& plan, int64_t out_run, int64_t in_run, int64_t box_bytes) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes;
  BoxPlan box;
  int in_order[kMaxRank], out_order[kMaxRank];
  for (int d = 0; d < p.rank; ++d) in_order[d] = out_order[d] = d, box.extent[d] = 1;
  const int64_t* in_stride = p.strides[plan.staged];
  std::sort(in_order, in_order + p.rank, [&](int x, int y) {
    if ((in_stride[x] == 0) != (in_stride[y] == 0)) return in_stride[y] == 0;
    return in_stride[x] != in_stride[y] ? in_stride[x] < in_stride[y] : x < y;
  });
  grow(p, out_order, std::max<int64_t>(out_run / w, 2), box.extent);
  grow(p, in_order, std::max<int64_t>(in_run / w, 2), box.extent);
  // Small boxes take in more of the output's next dimensions.
  for (int d = 0; d < p.rank && volume(p, box.extent) * w < box_bytes; ++d) {
    const int64_t others = volume(p, box.extent) / box.extent[d];
    box.extent[d] = std::max(box.extent[d], cut(p.sizes[d], box_bytes / w / others, d == 0 ? kSector / w : 1));
  }

  for (int i = 0; i < p.rank; ++i)
    if (box.extent[in_order[i]] > 1) box.dims[box.rank++] = in_order[i];
  if (box.rank == 0) box.dims[box.rank++] = 0;
  int64_t in_length = 1, in_runs = 1;
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k], before = k ? box.dims[k - 1] : d;
    const bool joins = k == 0 || (box.in_rank == k && box.extent[before] == p.sizes[before] &&
                                  in_stride[d] == in_stride[before] * p.sizes[before]);
    if (joins) in_length *= box.extent[d], ++box.in_rank;
    else in_runs *= box.extent[d];
  }
  const int direct = plan.staged == kA ? kB : kA;
  box.direct_follows = p.operands == 3 && !plan.staged_pair;
  int64_t out_length = 1, out_runs = 1;
  int before = -1, seen = 0;
  for (int d = 0; d < p.rank; ++d) {
    if (box.extent[d] == 1 && d != box.dims[0]) continue;
    const bool joins = before < 0 || (box.out_rank == seen && out_length < kMaxBoxTable && box.extent[before] == p.sizes[before] &&
                                      p.strides[kOut][d] == p.strides[kOut][before] * p.sizes[before]);
    if (joins) {
      out_length *= box.extent[d];
      ++box.out_rank;
      if (p.operands == 3 && p.strides[direct][d] != p.strides[kOut][d]) box.direct_follows = false;
    } else {
      out_runs *= box.extent[d];
    }
    ++seen;
    before = d;
  }
  const int64_t pitch = ((in_length * w + 2 * kChunk - 2) / kChunk | 1) * kChunk;
  const int64_t data = ceil_div(in_runs * pitch + ceil_div(in_runs, kChunk / w) * kChunk, 128) * 128;
  const int64_t tables = (kMaxBoxTable + kChunk) * 12 + in_runs * 12 + out_runs * 20;
  box.data_bytes = int(std::min<int64_t>(data, kMaxSharedBytes + 1));
  box.shared_bytes = int(std::min<int64_t>(data + tables, kMaxSharedBytes + 1));
  return box;
}

}  // namespace

bool is_aligned(const Problem& p, Role role) {
  if (reinterpret_cast<uintptr_t>(p.data[role]) % kChunk) return false;
  for (int d = 1; d < p.rank; ++d)
    if (p.strides[role][d] * p.element_bytes % kChunk) return false;
  return true;
}

bool rows_are_whole(const Problem& p) {
  if (p.sizes[0] * p.element_bytes % kChunk) return false;
  for (int r = 0; r < p.operands; ++r)
    if (p.strides[r][0] != 1 || !is_aligned(p, Role(r))) return false;
  return true;
}

CudaRoute cuda_route(const Plan& plan) {
  const Problem& p = plan.problem;
  switch (plan.route) {
    case Route::kEmpty: return CudaRoute::kEmpty;
    case Route::kTiles: return tile_use(plan) >= kMinTileUse ? CudaRoute::kTiles : CudaRoute::kBoxes;
    case Route::kRows: break;
  }
  for (int r = 0; r < p.operands; ++r)
    if (p.strides[r][0] != 1) return CudaRoute::kRows;
  const bool short_rows = p.rank > 1 && p.sizes[0] * p.element_bytes < kMinRowBytes;
  return short_rows && !rows_are_whole(p) ? CudaRoute::kBoxes : CudaRoute::kRows;
}

BoxPlan plan_box(const Plan& plan) {
  int64_t out_run = kOutRunBytes, in_run = kInRunBytes, bytes = kTileBytes;
  BoxPlan box = box_of(plan, out_run, in_run, bytes);
  while (!box_fits(box) && out_run > 16) {
    (in_run * 2 > out_run ? in_run : out_run) /= 2;
    bytes /= 2;
    box = box_of(plan, out_run, in_run, bytes);
  }
  return box;
}

bool box_fits(const BoxPlan& box) { return box.shared_bytes <= kMaxSharedBytes - 1024; }  // 1 KB: the kernel's static part

}  // namespace fusebackend::tile
