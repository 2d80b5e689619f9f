#include "cuda_plan.h"

#include <algorithm>

namespace fusebackend::tile {
namespace {

constexpr int64_t kChunk = 16, kSector = kSectorBytes;
constexpr int64_t kOutRunBytes = 256, kInRunBytes = 512;  // wanted of every run in global memory
constexpr int64_t kLongRow = 512;                         // bytes of a row whose ends matter little
constexpr double kMinTileUse = 0.7;                       // fraction of tile elements that are not padding;
constexpr double kMinAlignedUse = 0.6, kMinSmallUse = 0.5;  // the same in copies of aligned rows, and of small elements
constexpr int64_t kManyBoxes = 1024;                      // as many as are under way at once on a large GPU
constexpr int64_t kMuch = 1 << 24;                        // of shared memory: boxes that do not fit need not be described further
constexpr int64_t kGoodSharedBytes = 44 * 1024;           // lets five blocks share a multiprocessor
constexpr int64_t kManyConflicts = 4;                     // lanes in one bank, from which places are hashed
constexpr int kFirstHash = 3, kLastHash = 9;              // bits that were seen to help
constexpr int64_t kMinSparedRun = 128;                    // input runs that are not cut further, for a smaller halo

int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Low bits that the beginnings of an operand's rows along dimension `row` have in common.
uintptr_t begins_of_rows(const Problem& p, int role, int row) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(p.data[role]);
  for (int d = 0; d < p.rank; ++d)
    if (d != row) bits |= p.strides[role][d] * p.element_bytes;
  return bits;
}

double tile_use(const Plan& plan) {
  const Problem& p = plan.problem;
  uintptr_t ends = reinterpret_cast<uintptr_t>(p.data[kOut]);
  for (int d = 1; d < p.rank; ++d) ends |= p.strides[kOut][d] * p.element_bytes;
  const bool cuts_sectors = ends % kSector != 0;
  const int64_t o = p.sizes[0], q = p.sizes[plan.staged_dim], tq = tile_q(p.element_bytes);
  const int64_t to = tile_o(p.element_bytes, p.operands == 3, cuts_sectors);
  const int64_t halo = cuts_sectors ? kSector / p.element_bytes - 1 : 0;
  return double(o * q) / double(ceil_div(o + halo, to) * to * ceil_div(q, tq) * tq);
}

// Lanes that are idle beside the ends of rows cost a copy little, as long as the input's rows need not be shifted.
double least_tile_use(const Plan& plan) {
  const Problem& p = plan.problem;
  if (p.operands != 2 || begins_of_rows(p, plan.staged, plan.staged_dim) % (kChunk / 2)) return kMinTileUse;
  return p.element_bytes <= 2 ? kMinSmallUse : kMinAlignedUse;
}

// Whether short rows of the output end within sectors, which the tile of another batch item would write in part too; or most tiles would
// hold an end of the rows.
bool rows_share_sectors(const Plan& plan) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes, o = p.sizes[0];
  if (p.operands != 2 || p.strides[kOut][1] != o || o > kMaxBoxTable || o * w % kSector == 0) return false;
  if (plan.staged_dim > 1) return o * w < kLongRow;
  return (w == 2 || w == 4) && ceil_div(o + kSector / w - 1, tile_o(int(w), false, false)) <= (w == 2 ? 3 : 2);
}

// Extent of a dimension that contributes about `wanted` of its `size` elements: all of it if that is not much more, else pieces of like
// size, whole chunks each. If the last piece will `overlap` the one before it, so that both move the same, pieces that do so little.
int64_t cut(int64_t size, int64_t wanted, int64_t chunk, bool overlap) {
  if (wanted * 5 / 2 >= size) return size;
  const int64_t least = ceil_div(size, wanted);
  int64_t best = size, moved = INT64_MAX;
  for (int64_t count = least; count <= least + (overlap ? 2 : 0) && moved - size > size / 32; ++count) {
    const int64_t even = ceil_div(size, count), piece = std::min(size, ceil_div(even, chunk) * chunk);
    const int64_t total = ceil_div(size, piece) * piece;
    if (total < moved) best = piece, moved = total;
  }
  return best;
}

// Grows extents along `order`, the output's or the staged input's, until a run has about `wanted` elements or ends.
void grow(const Problem& p, const int* order, int role, int64_t wanted, int64_t* extent) {
  int64_t run = 1;
  for (int i = 0; i < p.rank && run < wanted; ++i) {
    const int d = order[i];
    // (The output's runs are cut in windows, which do not overlap.)
    const bool by_sectors = i == 0 && (role == kOut || begins_of_rows(p, role, d) % kSector == 0);
    extent[d] = std::max(extent[d], cut(p.sizes[d], ceil_div(wanted, run), by_sectors ? kSector / p.element_bytes : 1, role != kOut));
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

// Low bits that the beginnings of the output's runs of dimensions up to `last` have in common.
uintptr_t run_bits(const Problem& p, int last) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(p.data[kOut]);
  for (int d = last + 1; d < p.rank; ++d) bits |= p.strides[kOut][d] * p.element_bytes;
  return bits;
}

// Output runs: leading dimensions that are covered whole, and a last one that may be cut. Where runs would not end at sectors, the next
// dimension is cut instead, if it follows on.
void find_out_runs(const Plan& plan, BoxPlan& box) {
  const Problem& p = plan.problem;
  const int direct = plan.staged == kA ? kB : kA;
  box.direct_follows = p.operands == 3 && !plan.staged_pair;
  int before = -1, run_dim = 0;
  bool ended = false;
  for (int d = 0; d < p.rank; ++d) {
    const bool follows = before < 0 || (!ended && box.out_length <= kMaxBoxTable && box.extent[before] == p.sizes[before] &&
                                        p.strides[kOut][d] == p.strides[kOut][before] * p.sizes[before]);
    const int64_t bytes = box.out_length * p.element_bytes;
    const bool ends = before >= 0 && bytes % kSector == 0 && (box.extent[d] == 1 || bytes >= kOutRunBytes);
    if (follows && !ends) {
      box.out_length *= box.extent[d];
      ++box.out_rank;
      run_dim = d;
      if (p.operands == 3 && p.strides[direct][d] != p.strides[kOut][d]) box.direct_follows = false;
    } else {
      ended = true;
      box.out_runs *= box.extent[d];
    }
    before = d;
  }
  const int last = run_dim;
  box.march_dim = last;
  box.lead = box.out_length / box.extent[last];
  box.window = box.run_size = box.extent[last];
  if (box.extent[last] == p.sizes[last]) return;
  if ((run_bits(p, last) | box.window * box.lead * p.element_bytes) % kSector) box.halo = ceil_div(kSector / p.element_bytes - 1, box.lead);
  if (box.window + box.halo < p.sizes[last]) {
    box.window_dim = last;
    box.run_size = p.sizes[last];
  } else {
    box.window = box.run_size = p.sizes[last];
    box.halo = 0;
  }
  box.extent[last] = box.window + box.halo;
  box.out_length = box.lead * box.extent[last];
}

// Where elements of a window's halo are apart in the input, the dimensions of output runs come last in `dims`: then those that no store
// needs are in front.
void spare_halo(const Plan& plan, BoxPlan& box) {
  const Problem& p = plan.problem;
  const int64_t needed = box.halo * box.lead - (kSector / p.element_bytes - 1);
  if (box.halo == 0 || needed <= 0 || plan.staged_pair) return;
  int ordered[kMaxRank], others = 0;
  int64_t in_length = 1, other_runs = 1;
  bool contiguous = true;
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k];
    if (d <= box.window_dim) {
      if (p.strides[plan.staged][d] == 0) return;
      contiguous = false;
      continue;
    }
    const int before = others ? ordered[others - 1] : -1;
    contiguous = contiguous && (before < 0 ? p.strides[plan.staged][d] == 1 : box.extent[before] == p.sizes[before] &&
                                p.strides[plan.staged][d] == p.strides[plan.staged][before] * p.sizes[before]);
    if (contiguous) in_length *= box.extent[d];
    else if (p.strides[plan.staged][d]) other_runs *= box.extent[d];
    ordered[others++] = d;
  }
  if (in_length * p.element_bytes < kMinSparedRun) return;
  for (int d = 0; d <= box.window_dim; ++d)
    if (box.extent[d] > 1) ordered[others++] = d;
  std::copy_n(ordered, others, box.dims);
  box.spared_runs = needed * other_runs;
}

// Place in shared memory of element `index` of the dimensions of `box.dims` listed in `along`.
uint32_t place_of(const BoxPlan& box, const int* along, int rank, uint32_t index) {
  uint32_t place = 0;
  for (int k = 0; k < rank; ++k) {
    const uint32_t extent = uint32_t(box.extent[box.dims[along[k]]]), rest = k + 1 < rank ? index / extent : 0;
    place += (index - rest * extent) * uint32_t(box.weight[along[k]]);
    index = rest;
  }
  return place;
}

// The indices in `box.dims` of the dimensions of output runs, in the output's order. Returns how many.
int list_run_dims(const BoxPlan& box, int rank, int* run_dims) {
  int listed = 0;
  for (int d = 0; d < rank && listed < box.out_rank; ++d)
    for (int k = 0; k < box.rank; ++k)
      if (box.dims[k] == d) run_dims[listed++] = k;
  return listed;
}

// Whether input runs are whole chunks, wherever a box lies.
bool runs_are_chunks(const Plan& plan, const BoxPlan& box) {
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
  return (bits | length) % kChunk == 0;
}

// Places in shared memory: each dimension has a weight there that is its stride modulo a chunk, so that aligned chunks stay aligned, or
// modulo a line: a line of the input that lies in one line of shared memory takes one request of L2, one across two takes four.
void lay_out(const Plan& plan, const int64_t* in_stride, BoxPlan& box) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes, count = kChunk / w;
  const bool chunked = in_stride[box.dims[0]] == 1 && !plan.staged_pair;
  int64_t span = w;  // bytes that the dimensions so far take
  int march = 0;
  const int64_t needed = box.halo * box.lead - (kSector / w - 1);  // with spared runs: the first element of the halo that is read
  int64_t front = 0, lead = 1;
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k], before = k ? box.dims[k - 1] : d;
    const int64_t extent = box.extent[d], stride = in_stride[d] * w;
    const bool apart = box.spared_runs && d <= box.window_dim;
    const bool follows = k == 0 || (box.in_rank == k && box.extent[before] == p.sizes[before] &&
                                    in_stride[d] == in_stride[before] * p.sizes[before] && !apart);
    // Lanes are `count` elements of the output's first dimension apart: at some distances they would meet few banks.
    const bool crowded = chunked && k > 0 && d == 0 && extent >= 4 * count && span >= (follows ? 2 : 1) * kLineBytes &&
                         count * stride % (box.out_rank == 1 ? 32 : 64) == 0;
    const bool joins = follows && !crowded;
    if (joins) {
      box.weight[k] = int(chunked ? stride : span);
      box.in_length *= extent;
      ++box.in_rank;
      span += (extent - 1) * box.weight[k];
    } else if (stride == 0) {
      box.weight[k] = 0;
    } else {
      box.in_runs *= extent;
      // Short runs, and those that are skewed in steps of a chunk, lie as the input does modulo less than a line.
      const bool skewed = crowded && box.out_rank > 1;
      const int64_t run_bytes = box.in_length * w;
      const int64_t unit = skewed || run_bytes < 2 * kSector ? kChunk : run_bytes < kLineBytes * 3 / 2 ? kSector : kLineBytes;
      int64_t weight = span;
      if (!chunked || !runs_are_chunks(plan, box)) weight += 2 * (kChunk - w);  // room for any shift on either side
      weight += ((stride - weight) % unit + unit) % unit;
      if (unit == kChunk && weight / kChunk % 2 == 0) weight += kChunk;  // steps meet more banks
      box.weight[k] = int(std::min(weight, kMuch));
      span += (extent - 1) * weight;
      if (crowded) {
        box.skewed = true;
        span += (extent - 1) / count * (skewed ? kChunk : kLineBytes);
      }
    }
    span = std::min(span, kMuch);
    if (d == box.march_dim) march = box.weight[k];
    if (box.spared_runs && d < box.window_dim) {
      front += needed / lead % extent * box.weight[k];
      lead *= extent;
    }
  }
  box.spared_bytes = int(front / kLineBytes * kLineBytes);
  box.in_runs -= box.spared_runs;
  if (box.out_rank > 1) box.places = BoxPlaces::kTabled;
  else if (box.skewed) box.places = BoxPlaces::kSwizzled;
  else if (march == w) box.places = BoxPlaces::kStraight;
  // A chunk in front, the shift, chunks that reach over the end, and what their line holds: chunks may be permuted within it.
  const int64_t line = box.places == BoxPlaces::kSwizzled || box.places == BoxPlaces::kTabled ? kLineBytes : 0;
  const int64_t data = ceil_div(span - box.spared_bytes + 3 * kChunk, kLineBytes) * kLineBytes + kLineBytes + line;
  const int64_t entries = box.places == BoxPlaces::kTabled ? box_entries(int(box.lead), int(count)) : 0;
  const int64_t table = entries == 0 ? 0 : ((entries + entries / count) * count + entries + count) * 2 +
                                           (p.operands == 3 ? 8 * (entries + count) : 0);
  const int64_t beside = p.operands == 3 ? 8 * box.out_runs : 0;
  // Chunks that begin in a run may reach up to `count` - 1 elements beyond its end.
  int run_dims[kMaxRank];
  const int run_rank = list_run_dims(box, p.rank, run_dims);
  int64_t end = 0, beyond = line;  // places of the run's last element and of those after it
  for (int i = 0; i < run_rank; ++i) end += (box.extent[box.dims[run_dims[i]]] - 1) * box.weight[run_dims[i]];
  for (int64_t i = 0; i < count - 1; ++i)
    beyond = std::max(beyond, line + place_of(box, run_dims, run_rank, uint32_t(box.out_length + i)) - end);
  const int64_t runs = kChunk * (box.in_runs + box.out_runs) + table + beside;
  // With the chunk in front, a line.
  const int64_t tables = ceil_div((box.places == BoxPlaces::kTabled ? runs : std::max(runs, beyond)) + kChunk, kLineBytes) * kLineBytes - kChunk;
  box.stage_at = int(std::min(tables, kMaxBoxBytes));
  box.shared_bytes = int(std::min(tables + data + beyond, kMaxBoxBytes + 1));
}

// Of lanes that read a word each: the most that differ in one bank of shared memory. (`hash`: of BoxPlan.)
int conflicts_of(const uint32_t* runs, const uint32_t* chunks, const uint32_t* swizzle, int hash, int run_bits) {
  uint32_t words[32][32];
  int in_bank[32] = {}, most = 1;
  for (int lane = 0; lane < 32; ++lane) {
    const int chunk = lane & ((32 >> run_bits) - 1);
    uint32_t place = (runs[lane >> (5 - run_bits)] + chunks[chunk]) ^ swizzle[chunk];
    place ^= place >> hash & (kLineBytes - kChunk);
    const uint32_t word = place / 4, bank = word % 32;
    int& n = in_bank[bank];
    if (std::find(words[bank], words[bank] + n, word) == words[bank] + n) words[bank][n++] = word;
    most = std::max(most, n);
  }
  return most;
}

// How a warp's lanes are spread over output runs, and how many warps share runs: with few idle lanes, few bank conflicts and few requests
// to L2, which takes one a line and instruction. Where lanes would still meet few banks, places found by a table are hashed.
void spread_lanes(const Plan& plan, BoxPlan& box) {
  const Problem& p = plan.problem;
  const int64_t count = kChunk / p.element_bytes, chunks = ceil_div(box.window * box.lead, count);
  int run_dims[kMaxRank], out_dims[kMaxRank], out_rank = 0;  // indices of box.dims
  const int run_rank = list_run_dims(box, p.rank, run_dims);
  for (int k = 0; k < box.rank; ++k)
    if (std::find(run_dims, run_dims + run_rank, k) == run_dims + run_rank) out_dims[out_rank++] = k;
  uint32_t run_place[16], chunk_place[32], swizzle[32] = {};  // of first elements
  for (int r = 0; r < 16; ++r) run_place[r] = place_of(box, out_dims, out_rank, uint32_t(std::min<int64_t>(r, box.out_runs - 1)));
  for (int j = 0; j < 32; ++j) {
    chunk_place[j] = place_of(box, run_dims, run_rank, uint32_t(j * count));
    if (box.places == BoxPlaces::kSwizzled) swizzle[j] = uint32_t(j * kChunk % kLineBytes);
    else if (box.skewed) chunk_place[j] += uint32_t(j * count % box.extent[0] / count * kChunk);
  }
  int64_t least = INT64_MAX, conflicts = 1;  // of what was chosen
  const auto choose = [&](int hash) {
    for (int bits = 0; bits <= 4; ++bits) {
      const int64_t runs = int64_t(1) << bits, lanes = 32 >> bits;
      if (bits > 0 && runs / 2 >= box.out_runs) break;
      const int64_t most = conflicts_of(run_place, chunk_place, swizzle, hash, bits);
      const int64_t requests = runs * (4 * lanes * kChunk / kLineBytes + 3) / 4, groups = ceil_div(box.out_runs, runs);
      // In instructions, which a multiprocessor starts four of in the time of an access to shared memory and eight in that of a request.
      const int64_t chunk_cost = 24 + 2 * count + (most - 1) * count * 4 + requests * 8;
      for (int share_bits = 0; kBoxWarps >> share_bits > 0; ++share_bits) {
        const int64_t setups = ceil_div(groups, kBoxWarps >> share_bits);
        const int64_t rounds = setups * ceil_div(ceil_div(chunks, lanes), 1 << share_bits);
        const int64_t cost = setups * 24 + rounds * chunk_cost;
        if (cost >= least) continue;
        least = cost, conflicts = most;
        box.run_bits = bits, box.share_bits = share_bits, box.hash = hash;
      }
    }
  };
  choose(kNoHash);
  const bool hashes = box.places == BoxPlaces::kTabled && p.operands == 2 && p.strides[plan.staged][box.dims[0]] == 1;
  if (hashes && conflicts >= kManyConflicts)
    for (int hash = kFirstHash; hash <= kLastHash; ++hash) choose(hash);
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
  grow(p, out_order, kOut, std::max<int64_t>(out_run / w, 2), box.extent);
  grow(p, in_order, plan.staged, std::max<int64_t>(in_run / w, 2), box.extent);
  // Small boxes grow along their shorter runs, or the others, unless they would become much too large.
  for (bool grew = true; grew && volume(p, box.extent) * w < box_bytes;) {
    const int64_t out = run_length(p, out_order, box.extent), in = run_length(p, in_order, box.extent);
    grew = false;
    for (int turn = 0; turn < 2 && !grew; ++turn) {
      const bool along_out = (out <= in) == (turn == 0);
      int64_t extent[kMaxRank];
      std::copy_n(box.extent, p.rank, extent);
      grow(p, along_out ? out_order : in_order, along_out ? int(kOut) : plan.staged, 2 * (along_out ? out : in), extent);
      const int64_t before = volume(p, box.extent), after = volume(p, extent);
      grew = after > before && after * w <= box_bytes * 7 / 4;
      if (grew) std::copy_n(extent, p.rank, box.extent);
    }
  }
  for (int d = 0; d < p.rank; ++d) {  // or take in more runs
    const int64_t times = box_bytes / (volume(p, box.extent) * w);
    if (times >= 2) box.extent[d] = std::min(p.sizes[d], box.extent[d] * times);
  }
  const auto list_dims = [&] {
    box.rank = 0;
    for (int i = 0; i < p.rank; ++i)
      if (box.extent[in_order[i]] > 1) box.dims[box.rank++] = in_order[i];
    if (box.rank == 0) box.dims[box.rank++] = 0;
  };
  find_out_runs(plan, box);
  list_dims();
  spare_halo(plan, box);
  for (int d = 0; d < p.rank; ++d) box.count *= ceil_div(p.sizes[d], d == box.window_dim ? box.window : box.extent[d]);
  lay_out(plan, in_stride, box);
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
    case Route::kTiles: return tile_use(plan) < least_tile_use(plan) || rows_share_sectors(plan) ? CudaRoute::kBoxes : CudaRoute::kTiles;
    case Route::kRows: break;
  }
  for (int r = 0; r < p.operands; ++r)
    if (p.strides[r][0] != 1) return CudaRoute::kRows;
  return p.rank == 1 || rows_are_whole(p) ? CudaRoute::kRows : CudaRoute::kBoxes;
}

BoxPlan plan_box(const Plan& plan) {
  int64_t out_run = kOutRunBytes, in_run = kInRunBytes, bytes = kTileBytes;
  bytes = std::clamp(volume(plan.problem, plan.problem.sizes) * plan.problem.element_bytes / kManyBoxes, bytes / 4, bytes);
  BoxPlan box = box_of(plan, out_run, in_run, bytes);
  // Shorter runs let more blocks share a multiprocessor.
  if (box.shared_bytes > kGoodSharedBytes) box = box_of(plan, out_run, in_run / 2, bytes);
  if (box.shared_bytes > kGoodSharedBytes) box = box_of(plan, out_run / 2, in_run / 2, bytes);
  if (box.shared_bytes > kGoodSharedBytes && box.count < kManyBoxes) box = box_of(plan, out_run / 2, in_run / 4, bytes);
  while (!box_fits(box) && out_run > 16) {
    (in_run * 2 > out_run ? in_run : out_run) /= 2;
    bytes /= 2;
    box = box_of(plan, out_run, in_run, bytes);
  }
  spread_lanes(plan, box);
  return box;
}

bool box_fits(const BoxPlan& box) { return box.shared_bytes <= kMaxBoxBytes - 1024; }  // 1 KB: the kernel's static part

}  // namespace fusebackend::tile
