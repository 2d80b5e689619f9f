// Where a box's elements lie in shared memory, and which lanes store which of them.
#include <algorithm>

#include "common/integer_math.h"
#include "common/tile/box_plan.h"

namespace fusebackend::tile {
namespace {

constexpr int64_t kMaxSpan = 1 << 24;     // bytes; boxes that do not fit need not be described further
constexpr int64_t kMinHashConflicts = 4;  // lanes in one bank, from which addresses are hashed
constexpr int kFirstHash = 3, kLastHash = 9;  // the shifts that were seen to help

// The offset in shared memory of element `index` of some dimensions, which are given by their indices in `box.dims`.
uint32_t offset_of(const BoxPlan& box, const int* dims, int rank, uint32_t index) {
  uint32_t offset = 0;
  for (int k = 0; k < rank; ++k) {
    const uint32_t extent = uint32_t(box.extent[box.dims[dims[k]]]), rest = k + 1 < rank ? index / extent : 0;
    offset += (index - rest * extent) * uint32_t(box.shared_stride[dims[k]]);
    index = rest;
  }
  return offset;
}

// The indices in `box.dims` of the dimensions of output runs, in the output's order. Returns how many.
int list_run_dims(const BoxPlan& box, int rank, int* run_dims) {
  int listed = 0;
  for (int d = 0; d < rank && listed < box.out_rank; ++d)
    for (int k = 0; k < box.rank; ++k)
      if (box.dims[k] == d) run_dims[listed++] = k;
  return listed;
}

// Whether input runs are whole aligned chunks, wherever a box lies.
bool in_runs_are_chunks(const Plan& plan, const BoxPlan& box) {
  const Problem& p = plan.problem;
  int64_t bits = int64_t(reinterpret_cast<uintptr_t>(p.data[plan.staged])), length = p.element_bytes;
  for (int d = 0; d < p.rank; ++d) {
    const int64_t stride = p.strides[plan.staged][d] * p.element_bytes;
    const bool joined = std::find(box.dims, box.dims + box.in_rank, d) != box.dims + box.in_rank;
    if (joined) length *= box.extent[d];
    const int64_t step = d == box.window_dim ? 1 : box.extent[d];
    if (!joined) bits |= stride;
    else if (step < p.sizes[d]) bits |= stride * step | stride * (p.sizes[d] - step);
  }
  return (bits | length) % kChunkBytes == 0;
}

// The largest number of lanes that read different words of one bank of shared memory, when each reads the first word of its chunk.
int bank_conflicts(const uint32_t* runs, const uint32_t* chunks, const uint32_t* swizzle, int hash_shift, int warp_runs_log2) {
  uint32_t words[32][32];
  int in_bank[32] = {}, most = 1;
  for (int lane = 0; lane < 32; ++lane) {
    const int chunk = lane & ((32 >> warp_runs_log2) - 1);
    uint32_t address = (runs[lane >> (5 - warp_runs_log2)] + chunks[chunk]) ^ swizzle[chunk];
    address ^= address >> hash_shift & (kLineBytes - kChunkBytes);
    const uint32_t word = address / 4, bank = word % 32;
    int& n = in_bank[bank];
    if (std::find(words[bank], words[bank] + n, word) == words[bank] + n) words[bank][n++] = word;
    most = std::max(most, n);
  }
  return most;
}

}  // namespace

// The stride of each dimension in shared memory equals that in the input modulo a chunk, so that aligned chunks stay aligned; or modulo a
// line, where runs are long: a line of the input that lies in one line of shared memory takes one request to L2, across two it takes four.
void lay_out_box(const Plan& plan, BoxPlan& box) {
  const Problem& p = plan.problem;
  const int64_t* in_stride = p.strides[plan.staged];
  const int64_t w = p.element_bytes, chunk_elements = kChunkBytes / w;
  const bool chunked = in_stride[box.dims[0]] == 1 && !plan.staged_pair;
  const int64_t unread = box.halo * box.inner_length - (kSectorBytes / w - 1);  // elements of the halo before the first that is read
  int64_t span = w;  // bytes that the dimensions so far take
  int64_t unread_bytes = 0, inner = 1;
  int run_dim_stride = 0;
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k], before = k ? box.dims[k - 1] : d;
    const int64_t extent = box.extent[d], stride = in_stride[d] * w;
    const bool has_unread = box.unread_runs && d <= box.window_dim;
    const bool continues = k == 0 || (box.in_rank == k && box.extent[before] == p.sizes[before] &&
                                      in_stride[d] == in_stride[before] * p.sizes[before] && !has_unread);
    // Lanes are a chunk's worth of elements of the output's first dimension apart: at some distances they would meet few banks.
    const bool conflicts = chunked && k > 0 && d == 0 && extent >= 4 * chunk_elements && span >= (continues ? 2 : 1) * kLineBytes &&
                           chunk_elements * stride % (box.out_rank == 1 ? 32 : 64) == 0;
    if (continues && !conflicts) {
      box.shared_stride[k] = int(chunked ? stride : span);
      box.in_length *= extent;
      ++box.in_rank;
      span += (extent - 1) * box.shared_stride[k];
    } else if (stride == 0) {
      box.shared_stride[k] = 0;
    } else {
      box.in_runs *= extent;
      // Short runs, and those that are skewed in steps of a chunk, keep their alignment modulo less than a line.
      const bool skewed_by_chunks = conflicts && box.out_rank > 1;
      const int64_t run_bytes = box.in_length * w;
      const int unit = skewed_by_chunks || run_bytes < 2 * kSectorBytes ? kChunkBytes
                       : run_bytes < kLineBytes * 3 / 2                 ? kSectorBytes
                                                                        : kLineBytes;
      int64_t shared_stride = span;
      if (!chunked || !in_runs_are_chunks(plan, box)) shared_stride += 2 * (kChunkBytes - w);  // room for any shift on either side
      shared_stride += ((stride - shared_stride) % unit + unit) % unit;
      if (unit == kChunkBytes && shared_stride / kChunkBytes % 2 == 0) shared_stride += kChunkBytes;  // odd steps meet more banks
      box.shared_stride[k] = int(std::min(shared_stride, kMaxSpan));
      span += (extent - 1) * shared_stride;
      if (conflicts) {
        box.skewed = true;
        span += (extent - 1) / chunk_elements * (skewed_by_chunks ? kChunkBytes : kLineBytes);
      }
    }
    span = std::min(span, kMaxSpan);
    if (d == box.run_dim) run_dim_stride = box.shared_stride[k];
    if (box.unread_runs && d < box.window_dim) {
      unread_bytes += unread / inner % extent * box.shared_stride[k];
      inner *= extent;
    }
  }
  box.unread_bytes = int(unread_bytes / kLineBytes * kLineBytes);
  box.in_runs -= box.unread_runs;
  if (box.out_rank > 1) box.layout = RunLayout::kTabulated;
  else if (box.skewed) box.layout = RunLayout::kSwizzled;
  else if (run_dim_stride == w) box.layout = RunLayout::kContiguous;
  const bool tabulated = box.layout == RunLayout::kTabulated;

  // Chunks that begin in an output run may reach beyond its end, and chunks may be permuted within a line.
  const int64_t line = box.layout == RunLayout::kSwizzled || tabulated ? kLineBytes : 0;
  int run_dims[kMaxRank];
  const int run_rank = list_run_dims(box, p.rank, run_dims);
  int64_t end = 0, beyond = line;  // offsets of the run's last element, and from there to the last one that is read
  for (int i = 0; i < run_rank; ++i) end += (box.extent[box.dims[run_dims[i]]] - 1) * box.shared_stride[run_dims[i]];
  for (int64_t i = 0; i < chunk_elements - 1; ++i)
    beyond = std::max(beyond, line + offset_of(box, run_dims, run_rank, uint32_t(box.out_length + i)) - end);

  const int64_t entries = tabulated ? box_table_entries(int(box.inner_length), int(chunk_elements)) : 0;
  int64_t tables = kChunkBytes * (box.in_runs + box.out_runs) + (p.is_sum() ? 8 * box.out_runs : 0);
  if (tabulated) tables += ((entries + entries / chunk_elements) * chunk_elements + entries + chunk_elements) * 2;
  if (tabulated && p.is_sum()) tables += 8 * (entries + chunk_elements);
  if (!tabulated) tables = std::max(tables, beyond);  // a chunk that begins before its run reads as far in front of the elements
  const int64_t stage = round_up(tables + kChunkBytes, kLineBytes) - kChunkBytes;  // after the chunk in front, a line begins
  // A chunk in front, any alignment in the input's line, chunks that reach over the end.
  const int64_t data = round_up(span - box.unread_bytes + 3 * kChunkBytes, kLineBytes) + kLineBytes + line;
  box.stage_offset = int(std::min(stage, kMaxBoxBytes));
  box.shared_bytes = int(std::min(stage + data + beyond, kMaxBoxBytes + 1));
}

// With few idle lanes, few bank conflicts and few requests to L2, which takes one a line and instruction. Where lanes would still meet few
// banks, addresses from the lookup table are hashed.
void spread_lanes(const Plan& plan, BoxPlan& box) {
  const Problem& p = plan.problem;
  const int64_t chunk_elements = kChunkBytes / p.element_bytes, chunks = ceil_div(box.window * box.inner_length, chunk_elements);
  int run_dims[kMaxRank], other_dims[kMaxRank], other_rank = 0;  // indices of box.dims
  const int run_rank = list_run_dims(box, p.rank, run_dims);
  for (int k = 0; k < box.rank; ++k)
    if (std::find(run_dims, run_dims + run_rank, k) == run_dims + run_rank) other_dims[other_rank++] = k;
  uint32_t run_offset[16], chunk_offset[32], swizzle[32] = {};  // of first elements
  for (int r = 0; r < 16; ++r) run_offset[r] = offset_of(box, other_dims, other_rank, uint32_t(std::min<int64_t>(r, box.out_runs - 1)));
  for (int j = 0; j < 32; ++j) {
    chunk_offset[j] = offset_of(box, run_dims, run_rank, uint32_t(j * chunk_elements));
    if (box.layout == RunLayout::kSwizzled) swizzle[j] = uint32_t(j * kChunkBytes % kLineBytes);
    else if (box.skewed) chunk_offset[j] += uint32_t(j * chunk_elements % box.extent[0] / chunk_elements * kChunkBytes);
  }
  int64_t least = INT64_MAX, conflicts = 1;  // of what was chosen
  const auto choose = [&](int hash_shift) {
    for (int runs_log2 = 0; runs_log2 <= 4; ++runs_log2) {
      const int64_t runs = int64_t(1) << runs_log2, lanes = 32 >> runs_log2;
      if (runs_log2 > 0 && runs / 2 >= box.out_runs) break;
      const int64_t most = bank_conflicts(run_offset, chunk_offset, swizzle, hash_shift, runs_log2);
      const int64_t requests = runs * (4 * lanes * kChunkBytes / kLineBytes + 3) / 4, groups = ceil_div(box.out_runs, runs);
      // In instructions: a multiprocessor starts four of them in the time of an access to shared memory, and eight in that of a request.
      const int64_t chunk_cost = 24 + 2 * chunk_elements + (most - 1) * chunk_elements * 4 + requests * 8;
      for (int warps_log2 = 0; kBoxWarps >> warps_log2 > 0; ++warps_log2) {
        const int64_t setups = ceil_div(groups, kBoxWarps >> warps_log2);
        const int64_t rounds = setups * ceil_div(ceil_div(chunks, lanes), 1 << warps_log2);
        const int64_t cost = setups * 24 + rounds * chunk_cost;
        if (cost >= least) continue;
        least = cost, conflicts = most;
        box.warp_runs_log2 = runs_log2, box.warps_per_run_log2 = warps_log2, box.hash_shift = hash_shift;
      }
    }
  };
  choose(kNoHash);
  const bool hashes = box.layout == RunLayout::kTabulated && !p.is_sum() && p.strides[plan.staged][box.dims[0]] == 1;
  if (hashes && conflicts >= kMinHashConflicts)
    for (int shift = kFirstHash; shift <= kLastHash; ++shift) choose(shift);
}

}  // namespace fusebackend::tile
