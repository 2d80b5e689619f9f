// Makes a sorted index, for up to some millions of entries and rows: two kernels, each of which sorts in shared memory what a block can
// hold. The first sorts tiles of neighbouring entries by bucket, a bucket being some neighbouring rows. The second collects a bucket's
// entries from all tiles and sorts them by row. Both sorts are stable and nothing in global memory is atomic, so a repetition is
// bit-identical. A bucket that overflows, as with a very uneven index, sets a flag; the radix sort, launched next, then starts afresh.
#include "common/programmatic_launch.cuh"
#include "index_add/block_sort.cuh"
#include "index_add/dispatch.cuh"
#include "index_add/routes.h"

namespace fusebackend::index_add {
namespace {

constexpr int kTileEach = BucketSortShape::kTileEach, kBucketEach = BucketSortShape::kBucketEach;
constexpr uint32_t kTile = BucketSortShape::kTile, kCapacity = BucketSortShape::kCapacity, kMaxBuckets = BucketSortShape::kMaxBuckets;
constexpr int kTileBits = 12, kMaxLocalBits = BucketSortShape::kMaxLocalBits;  // of a place in a tile; of a row within its bucket
constexpr int kRowBits = 24;
static_assert(kTile == 1u << kTileBits && kMaxBuckets << kMaxLocalBits == 1u << kRowBits && 32 * kTileEach <= 1 << (32 - kRowBits));

struct BucketSortArgs {
  Params p;
  SortedIndex<uint32_t> sorted_index;
  uint32_t* sorted;       // [tile][kTile], by bucket: (row within the bucket, place in the tile)
  uint32_t* sorted_from;  // the source row of each; nullptr without a source_index
  uint16_t* starts;       // [tile][buckets + 1]: where each bucket begins in `sorted`
  uint32_t* overflow;     // set if a bucket overflows
  uint32_t n, tiles;
  uint32_t buckets;  // if `leaves_out`, the last one is of the entries that add nothing
  int bucket_bits, row_bits;  // of a bucket's number; of a row within its bucket
  bool leaves_out;
};

__global__ void __launch_bounds__(kSortThreads, 3) sort_tiles_kernel(const __grid_constant__ BucketSortArgs a) {
  extern __shared__ uint32_t words[];
  __shared__ uint32_t warp_sums[kSortWarps];
  uint32_t* const staged = words;                                    // [kTile]
  uint32_t* const from = a.sorted_from ? words + kTile : nullptr;    // the same
  uint32_t* const rest = words + (from ? 2 : 1) * kTile;
  uint16_t* const digit_counts = reinterpret_cast<uint16_t*>(rest);  // [warp][bucket]
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
  launch_dependents();
  if (tile == 0 && threadIdx.x == 0) *a.overflow = 0;

  const uint32_t first = warp * (32 * kTileEach) + lane, count = min(kTile, a.n - tile * kTile);
  uint32_t row[kTileEach];  // in the lower kRowBits; the rank comes above
  int64_t index[kTileEach];
#pragma unroll
  for (int e = 0; e < kTileEach; ++e)  // all loads before the first check, which none may be moved across
    index[e] = load_index(a.p.index, tile * kTile + min(first + e * 32, count - 1));
#pragma unroll
  for (int e = 0; e < kTileEach; ++e) {
    const int64_t target = target_row(a.p, index[e]);
    row[e] = target < 0 ? (a.buckets - 1) << a.row_bits : uint32_t(target);
  }
  for (uint32_t b = threadIdx.x; b < a.buckets * (kSortWarps / 2); b += kSortThreads) rest[b] = 0;
  if (from) {
#pragma unroll
    for (int e = 0; e < kTileEach; ++e) index[e] = load_index(a.p.source_index, tile * kTile + min(first + e * 32, count - 1));
#pragma unroll
    for (int e = 0; e < kTileEach; ++e)
      if (const uint32_t i = first + e * 32; i < count) from[i] = uint32_t(checked_row(index[e], a.p.source_rows, a.p.source_wraps));
  }
  __syncthreads();
  uint16_t* const my_counts = digit_counts + warp * a.buckets;
#pragma unroll
  for (int e = 0; e < kTileEach; ++e)
    row[e] |= rank_in_warp(my_counts, row[e] >> a.row_bits, a.bucket_bits, first + e * 32 < count) << kRowBits;
  uint16_t* const starts = a.starts + size_t(tile) * (a.buckets + 1);
  digit_counts_to_places(digit_counts, a.buckets, warp_sums, [&](uint32_t bucket, uint32_t place) { starts[bucket] = uint16_t(place); });
  if (threadIdx.x == 0) starts[a.buckets] = uint16_t(count);
  const uint32_t local = (1u << a.row_bits) - 1;
#pragma unroll
  for (int e = 0; e < kTileEach; ++e)
    if (const uint32_t i = first + e * 32; i < count) {
      const uint32_t bucket = (row[e] & ((1u << kRowBits) - 1)) >> a.row_bits;
      staged[my_counts[bucket] + (row[e] >> kRowBits)] = (row[e] & local) << kTileBits | i;
    }
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count; i += kSortThreads) {
    const uint32_t word = staged[i];
    a.sorted[size_t(tile) * kTile + i] = word;
    if (from) a.sorted_from[size_t(tile) * kTile + i] = from[word & (kTile - 1)];
  }
}

__global__ void __launch_bounds__(kSortThreads, 3) sort_buckets_kernel(const __grid_constant__ BucketSortArgs a) {
  extern __shared__ uint32_t words[];
  __shared__ uint32_t warp_sums[kSortWarps], offset_of[kSortThreads + 1];
  __shared__ uint16_t start_of[kSortThreads];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, bucket = blockIdx.x, local_rows = 1u << a.row_bits;
  uint32_t* const entries = words;                                                // [kCapacity]
  uint32_t* const from = a.sorted_from ? words + kCapacity : nullptr;                 // the same
  uint32_t* const rest = words + (from ? 2 : 1) * kCapacity;
  uint16_t* const digit_counts = reinterpret_cast<uint16_t*>(rest);               // [warp][row within the bucket]
  uint16_t* const keys = digit_counts + kSortWarps * local_rows;                  // [kCapacity]: rows; then the entry at each place
  for (uint32_t i = threadIdx.x; i < local_rows * (kSortWarps / 2); i += kSortThreads) rest[i] = 0;
  wait_for_previous_kernel();
  launch_dependents();

  // The bucket's entries are a run in each tile. `before` counts what is before these runs in their tiles: that many precede the bucket.
  uint32_t before = 0, count = 0;
  for (uint32_t t0 = 0; t0 < a.tiles; t0 += kSortThreads) {
    const uint32_t t = t0 + threadIdx.x;
    uint32_t begin = 0, end = 0, total;
    if (t < a.tiles) {
      const uint16_t* const starts = a.starts + size_t(t) * (a.buckets + 1) + bucket;
      begin = starts[0], end = starts[1];
    }
    before += begin;
    const uint32_t offset = count + exclusive_scan_block(end - begin, warp_sums, total);
    offset_of[threadIdx.x] = offset;
    start_of[threadIdx.x] = uint16_t(begin);
    count += total;
    if (count > kCapacity) {
      if (threadIdx.x == 0) *a.overflow = 1;
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
  exclusive_scan_block(before, warp_sums, base);

  const uint32_t per_warp = (count + 32 * kSortWarps - 1) / (32 * kSortWarps) * 32, first = warp * per_warp + lane;
  uint16_t* const my_counts = digit_counts + warp * local_rows;
  uint32_t key_rank[kBucketEach];  // both below 2^16
#pragma unroll
  for (int e = 0; e < kBucketEach; ++e) {
    if (e * 32 >= per_warp) break;
    const uint32_t i = first + e * 32;
    const bool valid = i < count;
    const uint32_t key = valid ? keys[i] : 0;
    key_rank[e] = key << 16 | rank_in_warp(my_counts, key, a.row_bits, valid);
  }
  const bool dropped = a.leaves_out && bucket == a.buckets - 1;
  const uint32_t rows = uint32_t(a.p.rows), first_row = dropped ? rows : bucket << a.row_bits;
  digit_counts_to_places(digit_counts, local_rows, warp_sums, [&](uint32_t row, uint32_t place) {
    if (first_row + row < rows) a.sorted_index.row_begins[first_row + row] = base + place;
  });
  if (threadIdx.x == 0 && bucket == a.buckets - 1) a.sorted_index.row_begins[rows] = dropped ? base : base + count;
#pragma unroll
  for (int e = 0; e < kBucketEach; ++e) {
    if (e * 32 >= per_warp) break;
    if (first + e * 32 >= count) continue;
    const uint32_t key = key_rank[e] >> 16, place = my_counts[key] + (key_rank[e] & 0xffff);
    keys[place] = uint16_t(first + e * 32);
    if ((base + place) % kChunkEntries == 0) a.sorted_index.chunk_rows[(base + place) / kChunkEntries] = first_row + key;
  }
  __syncthreads();
#pragma unroll 4
  for (uint32_t k = threadIdx.x; k < count; k += kSortThreads) {
    const uint32_t i = keys[k];
    a.sorted_index.entries[base + k] = entries[i];
    if (from) a.sorted_index.source_rows[base + k] = from[i];
  }
}

}  // namespace

cudaError_t launch_bucket_sort(const Params& p, uint32_t* words, void* workspace, uint32_t* overflow, const Device& device,
                               cudaStream_t stream) {
  const BucketSortShape s = bucket_sort_shape(p);
  char* const base = static_cast<char*>(workspace);
  const BucketSortArgs a{p, SortedIndex(p, words), reinterpret_cast<uint32_t*>(base),
                         p.source_index.data ? reinterpret_cast<uint32_t*>(base + s.sorted_from) : nullptr,
                         reinterpret_cast<uint16_t*>(base + s.starts), overflow, uint32_t(p.n), s.tiles, s.buckets, s.bucket_bits,
                         s.row_bits, p.leaves_out()};
  static SharedMemoryOptIn tiles_opt_in, buckets_opt_in;
  const int most = max_sort_shared_bytes(device);
  if (cudaError_t error = tiles_opt_in.ensure(sort_tiles_kernel, most); error != cudaSuccess) return error;
  if (cudaError_t error = buckets_opt_in.ensure(sort_buckets_kernel, most); error != cudaSuccess) return error;
  sort_tiles_kernel<<<s.tiles, kSortThreads, s.tile_shared_bytes, stream>>>(a);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return launch_dependent(sort_buckets_kernel, s.buckets, kSortThreads, s.bucket_shared_bytes, device.has_dependent_launch(), stream,
                          a);
}

}  // namespace fusebackend::index_add
