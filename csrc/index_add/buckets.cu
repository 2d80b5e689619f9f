// The plan of an index, for up to some millions of entries and rows: two kernels, each of which sorts in shared memory what a block can hold.
// The first sorts tiles of neighbouring entries by bucket, a bucket being some neighbouring rows; the second collects a bucket's entries from
// all tiles and sorts them by row. Where an entry goes depends on how many are before it alone: both sorts are stable, nothing in global
// memory is atomic, and a repetition is bit-identical. A bucket that does not fit (an index that is very uneven) raises a flag instead: then
// the radix sort of sort.cu does it all again.
#include "dispatch.cuh"
#include "launch.h"
#include "overlap.cuh"
#include "rank.cuh"

namespace fusebackend::accumulate {
namespace {

constexpr int kTileEach = 8, kPartEach = 12;  // entries of a thread
constexpr uint32_t kTile = kSortThreads * kTileEach, kPart = kSortThreads * kPartEach;
constexpr int kTileBits = 12, kMaxLocalBits = 12;
constexpr uint32_t kMaxBuckets = 4096;
constexpr int kRowBits = 24;
static_assert(kTile == 1u << kTileBits && kMaxBuckets << kMaxLocalBits == 1u << kRowBits && 32 * kTileEach <= 1 << (32 - kRowBits));

struct BucketArgs {
  Params p;
  PlanView<uint32_t> plan;
  uint32_t* sorted;  // [tile][kTile], by bucket: row within the bucket, place in the tile
  uint32_t* sorted_from;  // the source row of each, if there is a source_index; else nullptr
  uint16_t* starts;  // [tile][buckets + 1]: where each bucket begins in `sorted`
  uint32_t* unfit;   // set if a bucket does not fit
  uint32_t n, tiles;
  uint32_t buckets;  // the last one is of the entries that are left out, if `leaves_out`
  int bucket_bits, row_bits;  // of a bucket's number; of a row within its bucket
  bool leaves_out;
};

__global__ void __launch_bounds__(kSortThreads, 3) partition_kernel(const __grid_constant__ BucketArgs a) {
  extern __shared__ uint32_t words[];
  __shared__ uint32_t warp_sums[kWarps];
  uint32_t* const staged = words;                                    // [kTile]
  uint32_t* const from = a.sorted_from ? words + kTile : nullptr;    // the same
  uint32_t* const rest = words + (from ? 2 : 1) * kTile;
  uint16_t* const seen = reinterpret_cast<uint16_t*>(rest);          // [warp][buckets]
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
  let_next_kernel_set_up();
  if (tile == 0 && threadIdx.x == 0) *a.unfit = 0;

  const uint32_t first = warp * (32 * kTileEach) + lane, count = min(kTile, a.n - tile * kTile);
  uint32_t row[kTileEach];  // below 2^24; then the rank above it
  int64_t index[kTileEach];
#pragma unroll
  for (int e = 0; e < kTileEach; ++e)  // all loads before the first check: none may be moved over it
    index[e] = load_index(a.p.index, tile * kTile + min(first + e * 32, count - 1));
#pragma unroll
  for (int e = 0; e < kTileEach; ++e) {
    const int64_t target = target_row(a.p, index[e]);
    row[e] = target < 0 ? (a.buckets - 1) << a.row_bits : uint32_t(target);
  }
  for (uint32_t b = threadIdx.x; b < a.buckets * (kWarps / 2); b += kSortThreads) rest[b] = 0;
  if (from) {
#pragma unroll
    for (int e = 0; e < kTileEach; ++e) index[e] = load_index(a.p.source_index, tile * kTile + min(first + e * 32, count - 1));
#pragma unroll
    for (int e = 0; e < kTileEach; ++e)
      if (const uint32_t i = first + e * 32; i < count) from[i] = uint32_t(checked_row(index[e], a.p.source_rows, a.p.source_wraps));
  }
  __syncthreads();
  uint16_t* const mine = seen + warp * a.buckets;
#pragma unroll
  for (int e = 0; e < kTileEach; ++e) row[e] |= rank_in_warp(mine, row[e] >> a.row_bits, a.bucket_bits, first + e * 32 < count) << kRowBits;
  uint16_t* const starts = a.starts + size_t(tile) * (a.buckets + 1);
  counts_to_places(seen, a.buckets, warp_sums, [&](uint32_t bucket, uint32_t place) { starts[bucket] = uint16_t(place); });
  if (threadIdx.x == 0) starts[a.buckets] = uint16_t(count);
  const uint32_t local = (1u << a.row_bits) - 1;
#pragma unroll
  for (int e = 0; e < kTileEach; ++e)
    if (const uint32_t i = first + e * 32; i < count) {
      const uint32_t bucket = (row[e] & ((1u << kRowBits) - 1)) >> a.row_bits;
      staged[mine[bucket] + (row[e] >> kRowBits)] = (row[e] & local) << kTileBits | i;
    }
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count; i += kSortThreads) {
    const uint32_t word = staged[i];
    a.sorted[size_t(tile) * kTile + i] = word;
    if (from) a.sorted_from[size_t(tile) * kTile + i] = from[word & (kTile - 1)];
  }
}

__global__ void __launch_bounds__(kSortThreads, 3) bucket_kernel(const __grid_constant__ BucketArgs a) {
  extern __shared__ uint32_t words[];
  __shared__ uint32_t warp_sums[kWarps], offset_of[kSortThreads + 1];
  __shared__ uint16_t start_of[kSortThreads];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, bucket = blockIdx.x, local_rows = 1u << a.row_bits;
  uint32_t* const entries = words;                                                // [kPart]
  uint32_t* const from = a.sorted_from ? words + kPart : nullptr;                 // the same
  uint32_t* const rest = words + (from ? 2 : 1) * kPart;
  uint16_t* const seen = reinterpret_cast<uint16_t*>(rest);                       // [warp][local_rows]
  uint16_t* const keys = seen + kWarps * local_rows;                              // [kPart]; then the entry at each place
  for (uint32_t i = threadIdx.x; i < local_rows * (kWarps / 2); i += kSortThreads) rest[i] = 0;
  wait_for_previous_kernel();
  let_next_kernel_set_up();

  // The bucket's entries are a run of each tile. As many as are before them in the tiles are before them in all.
  uint32_t before = 0, count = 0;
  for (uint32_t t0 = 0; t0 < a.tiles; t0 += kSortThreads) {
    const uint32_t t = t0 + threadIdx.x;
    uint32_t begin = 0, end = 0, total;
    if (t < a.tiles) {
      const uint16_t* const starts = a.starts + size_t(t) * (a.buckets + 1) + bucket;
      begin = starts[0], end = starts[1];
    }
    before += begin;
    const uint32_t offset = count + scan_block(end - begin, warp_sums, total);
    offset_of[threadIdx.x] = offset;
    start_of[threadIdx.x] = uint16_t(begin);
    count += total;
    if (count > kPart) {
      if (threadIdx.x == 0) *a.unfit = 1;
      return;
    }
    if (threadIdx.x == 0) offset_of[kSortThreads] = count;
    __syncthreads();
    constexpr uint32_t kLanes = 16, kGroups = kSortThreads / kLanes, U = 4;  // lanes that take a run; loads in flight
    const uint32_t group = threadIdx.x / kLanes, in_group = threadIdx.x % kLanes, here = min(a.tiles - t0, uint32_t(kSortThreads));
    for (uint32_t r0 = group; r0 < here; r0 += U * kGroups) {
      uint32_t found[U], found_from[U];
#pragma unroll
      for (uint32_t u = 0; u < U; ++u) {
        const uint32_t r = r0 + u * kGroups;
        const size_t at = size_t(t0 + r) * kTile + start_of[r % kSortThreads] + in_group;
        const bool there = r < here && in_group < offset_of[r + 1] - offset_of[r];
        found[u] = there ? a.sorted[at] : 0;
        found_from[u] = there && from ? a.sorted_from[at] : 0;
      }
#pragma unroll
      for (uint32_t u = 0; u < U; ++u) {
        const uint32_t r = r0 + u * kGroups;
        if (r >= here) break;
        const uint32_t to = offset_of[r], length = offset_of[r + 1] - to;
        for (uint32_t k = in_group; k < length; k += kLanes) {
          if (k >= kLanes) {
            const size_t at = size_t(t0 + r) * kTile + start_of[r] + k;
            found[u] = a.sorted[at];
            if (from) found_from[u] = a.sorted_from[at];
          }
          keys[to + k] = uint16_t(found[u] >> kTileBits);
          entries[to + k] = (t0 + r) * kTile + (found[u] & (kTile - 1));
          if (from) from[to + k] = found_from[u];
        }
      }
    }
    __syncthreads();
  }
  uint32_t base;
  scan_block(before, warp_sums, base);

  const uint32_t per_warp = (count + 32 * kWarps - 1) / (32 * kWarps) * 32, first = warp * per_warp + lane;
  uint16_t* const mine = seen + warp * local_rows;
  uint32_t key_rank[kPartEach];  // both below 2^16
#pragma unroll
  for (int e = 0; e < kPartEach; ++e) {
    if (e * 32 >= per_warp) break;
    const uint32_t i = first + e * 32;
    const bool valid = i < count;
    const uint32_t key = valid ? keys[i] : 0;
    key_rank[e] = key << 16 | rank_in_warp(mine, key, a.row_bits, valid);
  }
  const bool left_out = a.leaves_out && bucket == a.buckets - 1;
  const uint32_t rows = uint32_t(a.p.rows), first_row = left_out ? rows : bucket << a.row_bits;
  counts_to_places(seen, local_rows, warp_sums, [&](uint32_t row, uint32_t place) {
    if (first_row + row < rows) a.plan.offsets[first_row + row] = base + place;
  });
  if (threadIdx.x == 0 && bucket == a.buckets - 1) a.plan.offsets[rows] = left_out ? base : base + count;
#pragma unroll
  for (int e = 0; e < kPartEach; ++e) {
    if (e * 32 >= per_warp) break;
    if (first + e * 32 >= count) continue;
    const uint32_t key = key_rank[e] >> 16, place = mine[key] + (key_rank[e] & 0xffff);
    keys[place] = uint16_t(first + e * 32);
    if ((base + place) % kChunk == 0) a.plan.chunk_rows[(base + place) / kChunk] = first_row + key;
  }
  __syncthreads();
#pragma unroll 4
  for (uint32_t k = threadIdx.x; k < count; k += kSortThreads) {
    const uint32_t i = keys[k];
    a.plan.entries[base + k] = entries[i];
    if (from) a.plan.from[base + k] = from[i];
  }
}

struct Shape {
  uint32_t tiles, buckets;
  int bucket_bits, row_bits;
  bool leaves_out;
  size_t sorted_from, starts, bytes;  // where they lie in the workspace, behind the sorted tiles
};

int bits_for(uint64_t largest) {
  int bits = 0;
  while (largest >> bits) ++bits;
  return bits;
}

Shape shape_of(const Params& p) {
  constexpr int64_t kAverage = kPart * 3 / 4;  // entries of a bucket
  Shape s{};
  s.leaves_out = p.has_ignore || p.bounds == Bounds::kDrop;
  while (s.row_bits < kMaxLocalBits && p.rows >> s.row_bits > 1 && p.n / ceil_div(p.rows, int64_t(2) << s.row_bits) <= kAverage) ++s.row_bits;
  s.tiles = uint32_t(ceil_div(p.n, kTile));
  s.buckets = uint32_t(ceil_div(p.rows, int64_t(1) << s.row_bits)) + s.leaves_out;
  s.bucket_bits = bits_for(s.buckets - 1);
  s.sorted_from = size_t(s.tiles) * kTile * 4;
  s.starts = s.sorted_from * (p.source_index.data ? 2 : 1);
  s.bytes = s.starts + size_t(s.tiles) * (s.buckets + 1) * 2;
  return s;
}

// Shared memory, in bytes: of the two kernels, and what there is beside the static part.
int tile_bytes(const Params& p, const Shape& s) { return int(kTile * (p.source_index.data ? 8 : 4) + s.buckets * kWarps * 2); }
int part_bytes(const Params& p, const Shape& s) { return int(kPart * (p.source_index.data ? 10 : 6) + (kWarps * 2 << s.row_bits)); }
int most_shared(const Device& device) { return device.shared_bytes_per_block - 8 * 1024; }

}  // namespace

bool buckets_fit(const Params& p, const Device& device) {
  if (p.n == 0 || p.rows == 0 || p.rows > int64_t(kMaxBuckets - 1) << kMaxLocalBits) return false;
  const Shape s = shape_of(p);
  return s.buckets <= kMaxBuckets && p.n / s.buckets <= kPart * 3 / 4 && std::max(tile_bytes(p, s), part_bytes(p, s)) <= most_shared(device);
}

size_t bucket_bytes(const Params& p) { return shape_of(p).bytes; }

cudaError_t launch_buckets(const Params& p, void* plan, void* workspace, uint32_t* unfit, const Device& device, cudaStream_t stream) {
  const Shape s = shape_of(p);
  char* const base = static_cast<char*>(workspace);
  const BucketArgs a{p, view_plan(p, static_cast<uint32_t*>(plan)), reinterpret_cast<uint32_t*>(base),
                     p.source_index.data ? reinterpret_cast<uint32_t*>(base + s.sorted_from) : nullptr,
                     reinterpret_cast<uint16_t*>(base + s.starts), unfit, uint32_t(p.n), s.tiles, s.buckets, s.bucket_bits, s.row_bits, s.leaves_out};
  static SharedMemoryOptIn partition_opt_in, bucket_opt_in;
  const int most = most_shared(device);
  if (cudaError_t error = partition_opt_in.ensure(partition_kernel, most); error != cudaSuccess) return error;
  if (cudaError_t error = bucket_opt_in.ensure(bucket_kernel, most); error != cudaSuccess) return error;
  partition_kernel<<<s.tiles, kSortThreads, tile_bytes(p, s), stream>>>(a);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return launch_overlapped(bucket_kernel, s.buckets, kSortThreads, part_bytes(p, s), device.major, stream, a);
}

}  // namespace fusebackend::accumulate
