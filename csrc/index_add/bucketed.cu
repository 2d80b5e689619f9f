// kBucketed: much to read and several entries a row. Reductions go through the L2 cache at less than half of memory's speed; so one kernel puts
// the entries into buckets of neighbouring rows, and in the next each block sorts a bucket in shared memory, sums the source rows in registers
// and writes each row once. If a bucket holds more than a block can, as with an uneven index, blocks that come last sort its entries tile by tile and
// reduce the sums of equal rows; so they do, without sorting, where neighbouring entries are mostly of one row. Nobody waits for the index to
// be looked at: blocks that have nothing to do end at once.
#include "finish.cuh"
#include "last_blocks.cuh"
#include "overlap.cuh"

namespace fusebackend::accumulate {
namespace {

constexpr int kBlocksPerSm = 2;
constexpr int kFillEach = 8;  // entries of a thread of the first kernel
constexpr uint32_t kMaxBuckets = 4096, kMaxRowsEach = 4096;
constexpr uint32_t kFewerEntries = kMostEntries * 3 / 4;  // of a bucket, where that makes no more rounds: a large one is waited for
constexpr int64_t kMaxPieces = 128;  // of a row that a group of threads takes at once
constexpr int kStaticBytes = 24 * 1024;  // more than the second kernel has of static shared memory

// Whether neighbouring entries are mostly of one row, as far as a sample shows: the same one in every block.
__device__ __forceinline__ bool is_in_order(const Params& p, uint32_t n) {
  constexpr uint32_t kSamples = 128;
  const uint32_t i = uint32_t(uint64_t(n - 1) * threadIdx.x / kSamples);
  return __syncthreads_count(threadIdx.x < kSamples && load_index(p.index, i) == load_index(p.index, i + 1)) > kSamples * 5 / 8;
}

// A tile's entries, sorted by bucket, go to the ends of the buckets' lists.
__global__ void __launch_bounds__(kSortThreads, 3) fill_kernel(const __grid_constant__ BucketedArgs a) {
  constexpr uint32_t kFilled = kSortThreads * kFillEach;
  extern __shared__ uint32_t places[];           // [bucket]: how many entries the tile has of it; then how many are before these
  uint32_t* const goes_to = places + a.buckets;  // [bucket]: where the tile's first one goes in the list, less its place in the tile
  __shared__ uint2 staged[kFilled];
  __shared__ uint32_t warp_sums[kWarps];
  const Params& p = a.p;
  const uint32_t first = blockIdx.x * kFilled, count = min(kFilled, a.n - first);
  int64_t index[kFillEach];
#pragma unroll
  for (int e = 0; e < kFillEach; ++e) index[e] = load_index(p.index, first + min(threadIdx.x + e * kSortThreads, count - 1));
  for (uint32_t i = threadIdx.x; i < a.buckets; i += kSortThreads) places[i] = 0;
  const bool in_order = is_in_order(p, a.n);
  let_next_kernel_set_up();
  if (in_order) {
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.left = kInOrder;
    return;
  }
  uint32_t row[kFillEach], rank[kFillEach];
#pragma unroll
  for (int e = 0; e < kFillEach; ++e) {
    const int64_t target = threadIdx.x + e * kSortThreads < count ? target_row(p, index[e]) : -1;
    row[e] = uint32_t(target);
    if (target >= 0) rank[e] = atomicAdd(&places[a.rows_each.div(row[e])], 1u);
  }
  const uint32_t kept = scan_counts(places, a.buckets, warp_sums);
  wait_for_previous_kernel();  // which cleared the counts
  for (uint32_t b = threadIdx.x; b < a.buckets; b += kSortThreads) {
    const uint32_t here = (b + 1 < a.buckets ? places[b + 1] : kept) - places[b];
    if (here == 0) continue;
    const uint32_t before = atomicAdd(a.filled + b, here);
    goes_to[b] = before - places[b];
    if (before <= a.most && before + here > a.most) atomicAdd(a.left, 1u);
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kFillEach; ++e)
    if (row[e] != kNoRow) {
      uint32_t bucket, local;
      a.rows_each.divmod(row[e], bucket, local);
      staged[places[bucket] + rank[e]] = {first + threadIdx.x + e * kSortThreads, row[e]};
    }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kFillEach; ++e)
    if (const uint32_t i = threadIdx.x + e * kSortThreads; i < kept) {
      const uint2 entry = staged[i];
      uint32_t bucket, local;
      a.rows_each.divmod(entry.y, bucket, local);
      if (const uint32_t to = goes_to[bucket] + i; to < a.most) a.lists[size_t(bucket) * a.most + to] = {entry.x, local};
    }
}

template <typename T, int V>
__global__ void __launch_bounds__(kSortThreads, kBlocksPerSm) bucketed_kernel(const __grid_constant__ BucketedArgs a) {
  using A = Acc<T>;
  extern __shared__ uint4 shared[];
  __shared__ Heads<T, V> heads;
  __shared__ uint32_t warp_sums[kWarps];
  const Params& p = a.p;
  if (blockIdx.x >= a.buckets) {
    wait_for_previous_kernel();
    let_next_kernel_set_up();
    return sum_left_over<T, V>(a, reinterpret_cast<uint32_t*>(shared), heads, warp_sums);
  }
  const uint32_t bucket = blockIdx.x, rows_each = a.rows_each.d, first_row = bucket * rows_each, rows = min(rows_each, uint32_t(p.rows) - first_row);
  auto* const from = reinterpret_cast<uint32_t*>(shared);                 // [most], by row
  auto* const row_of = reinterpret_cast<uint16_t*>(from + a.most);  // the same
  A* const scales = p.weight.data || p.alpha != 1.0 ? reinterpret_cast<A*>(row_of + a.most) : nullptr;  // the same
  auto* const begins = reinterpret_cast<uint32_t*>(row_of + a.most) + (scales ? a.most : 0);      // [row]
  for (uint32_t i = threadIdx.x; i < rows_each; i += kSortThreads) begins[i] = 0;
  const uint32_t group = threadIdx.x / a.block_columns, lane_column = threadIdx.x % a.block_columns;
  wait_for_previous_kernel();
  let_next_kernel_set_up();
  const uint32_t count = a.filled[bucket];
  if (*a.left == kInOrder || count > a.most) {  // left to reductions, for which out or scratch is initialised
    if (!a.initialises()) return;
    for (uint32_t c = lane_column; c < a.columns; c += a.block_columns) {
      int64_t out_offset, unused;
      column_offsets<V>(p, c, out_offset, unused);
      for (uint32_t row = first_row + group; group < a.groups && row < first_row + rows; row += a.groups) {
        const int64_t at = row * p.out_row_stride + out_offset;
        if (a.scratch) {
          *reinterpret_cast<Vec<float, V>*>(a.scratch + (int64_t(row) * a.columns + c) * V) = Vec<float, V>{};
        } else {
          *reinterpret_cast<Vec<T, V>*>(static_cast<T*>(p.out) + at) =
              p.initial ? *reinterpret_cast<const Vec<T, V>*>(static_cast<const T*>(p.initial) + at) : Vec<T, V>{};
        }
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(a.ready, 1u);
    }
    return;
  }
  if (count == 0 && p.in_place()) return;

  for (uint32_t i = threadIdx.x; i < rows * a.prefetched; i += kSortThreads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p.initial) +
                                                  (first_row + i / a.prefetched) * p.out_row_stride * int64_t(sizeof(T)) + i % a.prefetched * 128));

  // Sort by row; the order within a row is chance.
  __syncthreads();
  {
    const uint2* const list = a.lists + size_t(bucket) * a.most;
    uint32_t entry[kPartEach], row_rank[kPartEach];  // both parts below 2^16
#pragma unroll
    for (int e = 0; e < kPartEach; ++e)
      if (const uint32_t i = threadIdx.x + e * kSortThreads; i < count) {
        const uint2 found = list[i];
        entry[e] = found.x, row_rank[e] = found.y;
      }
#pragma unroll
    for (int e = 0; e < kPartEach; ++e)
      if (threadIdx.x + e * kSortThreads < count) row_rank[e] |= atomicAdd(&begins[row_rank[e]], 1u) << 16;
    scan_counts(begins, rows_each, warp_sums);
    if (const uint32_t i = count + threadIdx.x; threadIdx.x < kBatch && i < a.most) from[i] = 0;
#pragma unroll
    for (int e = 0; e < kPartEach; ++e)
      if (threadIdx.x + e * kSortThreads < count) {
        const uint32_t row = row_rank[e] & 0xffff, place = begins[row] + (row_rank[e] >> 16);
        row_of[place] = uint16_t(row);
        from[place] = entry[e];
      }
    look_up<T>(p, from, scales, count);
  }

  Vec<T, V> held{};
  const int64_t base = first_row * p.out_row_stride;
  auto look = [&](uint32_t row, int64_t offset) {
    if (p.initial) held = *reinterpret_cast<const Vec<T, V>*>(static_cast<const T*>(p.initial) + base + row * p.out_row_stride + offset);
  };
  auto write = [&](uint32_t row, uint32_t, int64_t offset, PlainSum<T>(&sum)[V]) {
    write_sums<T, V>(static_cast<T*>(p.out) + base + row * p.out_row_stride + offset, sum, p.initial, held);
  };
  sum_rows<T, V>(a, row_of, from, scales, count, heads, look, write);
  if (p.in_place() || group >= a.groups) return;
  for (uint32_t c = lane_column; c < a.columns; c += a.block_columns) {
    int64_t offset, unused;
    column_offsets<V>(p, c, offset, unused);
    for (uint32_t row = group; row < rows; row += a.groups)
      if (begins[row] == (row + 1 < rows_each ? begins[row + 1] : count)) {
        PlainSum<T> none[V]{};
        look(row, offset);
        write(row, c, offset, none);
      }
  }
}

constexpr int kCounters = 2;  // `left` and `ready`, before those of buckets

struct Shape {
  uint32_t rows_each, buckets, most;
  size_t lists, scratch, bytes;  // where they lie in the workspace
};

size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Entries of a bucket, so that few hold more than `most`.
constexpr int64_t average(int64_t most) { return most * 3 / 4; }

// As many rows to a bucket as make a whole number of rounds of the blocks that run at once.
Shape shape_of(const Params& p, const Device& device) {
  const int64_t at_once = int64_t(device.sm_count) * kBlocksPerSm;
  auto rounds = [&](int64_t most) { return ceil_div(p.n, at_once * average(most)); };
  const int64_t round = rounds(kMostEntries);
  const bool rounded_once = is_half(p.dtype) && (p.precise || p.n >= 16 * p.rows);
  Shape s{};
  s.most = rounds(kFewerEntries) == round ? kFewerEntries : kMostEntries;
  s.rows_each = uint32_t(std::max<int64_t>(ceil_div(p.rows, at_once * round), 1));
  s.buckets = uint32_t(ceil_div(p.rows, int64_t(s.rows_each)));
  s.lists = align((s.buckets + kCounters) * sizeof(uint32_t));
  s.scratch = s.lists + align(size_t(s.buckets) * s.most * sizeof(uint2));
  s.bytes = s.scratch + (rounded_once ? wide_bytes(p) : 0);
  return s;
}

int digit_bits(const Shape& s) {
  int bits = 0;
  while (s.buckets > 1u << bits && bits < kMaxDigitBits) ++bits;
  return bits;
}

int shared_bytes(const Params& p, const Shape& s) {
  const bool scaled = p.weight.data || p.alpha != 1.0;
  const uint32_t bucket = s.most * (scaled ? 10 : 6) + s.rows_each * 4;
  const uint32_t left = kTile * (scaled ? 12 : 8) + std::max((1u << digit_bits(s)) * kWarps * 2, s.rows_each * 4);
  return int(std::max(bucket, left));
}

}  // namespace

bool bucketed_fits(const Params& p, const Device& device) {
  const bool type = p.dtype == DType::kFloat32 || is_half(p.dtype);
  if (!type || p.n < 2 || p.n > INT32_MAX || p.rows == 0 || p.rows > INT32_MAX || p.source_rows > UINT32_MAX) return false;
  if (vector_width(p, true) * element_size(p.dtype) != 16 || p.source_row_stride * element_size(p.dtype) > int64_t(UINT32_MAX)) return false;
  const Shape s = shape_of(p, device);
  const int most = std::min(device.shared_bytes_per_block, device.shared_bytes / kBlocksPerSm) - kStaticBytes;
  return s.buckets <= kMaxBuckets && s.rows_each <= kMaxRowsEach && p.n / s.buckets <= average(s.most) && shared_bytes(p, s) <= most;
}

size_t bucketed_bytes(const Params& p, const Device& device) { return shape_of(p, device).bytes; }

cudaError_t launch_bucketed(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  const Shape s = shape_of(p, device);
  char* const base = static_cast<char*>(workspace);
  auto* const counters = reinterpret_cast<uint32_t*>(base);
  if (cudaError_t error = clear(counters, s.buckets + kCounters, stream); error != cudaSuccess) return error;
  auto run = [&](auto type) {
    using T = decltype(type);
    constexpr int V = kWide<T>;
    BucketedArgs a{p, FastDiv(s.rows_each), s.buckets, uint32_t(p.n)};
    a.digit_bits = digit_bits(s);
    while (s.buckets > 1u << (a.digit_bits + a.digit_shift)) ++a.digit_shift;
    a.left = counters;
    a.ready = counters + 1;
    a.filled = counters + kCounters;
    a.most = s.most;
    a.lists = reinterpret_cast<uint2*>(base + s.lists);
    a.scratch = s.bytes > s.scratch ? reinterpret_cast<float*>(base + s.scratch) : nullptr;
    a.columns = uint32_t(p.columns() / V);
    a.source_row_bytes = uint32_t(p.source_row_stride * int64_t(sizeof(T)));
    a.column_blocks = uint32_t(ceil_div(a.columns, kMaxPieces));
    a.block_columns = uint32_t(ceil_div(a.columns, a.column_blocks));
    a.groups = kSortThreads / a.block_columns;
    if (p.initial && p.n_dims == 1 && a.columns % 8 == 0) a.prefetched = a.columns / 8;
    static SharedMemoryOptIn fill_opt_in, opt_in;
    const auto kernel = bucketed_kernel<T, V>;
    if (cudaError_t error = fill_opt_in.ensure(fill_kernel, int(kMaxBuckets) * 8); error != cudaSuccess) return error;
    if (cudaError_t error = opt_in.ensure(kernel, device.shared_bytes_per_block - kStaticBytes); error != cudaSuccess) return error;
    const unsigned fill_blocks = unsigned(ceil_div(p.n, kSortThreads * kFillEach));
    cudaError_t error = launch_overlapped(fill_kernel, fill_blocks, kSortThreads, int(s.buckets) * 8, device.major, stream, a);
    const int64_t at_once = int64_t(device.sm_count) * kBlocksPerSm;
    a.even_tile = uint32_t(ceil_div(p.n, at_once * ceil_div(p.n, at_once * kTile)));
    const unsigned last_blocks = unsigned(std::min(ceil_div(p.n, a.even_tile), at_once));
    if (error == cudaSuccess)
      error = launch_overlapped(kernel, s.buckets + last_blocks, kSortThreads, shared_bytes(p, s), device.major, stream, a);
    if (error == cudaSuccess && a.scratch) error = finish(p, a.scratch, 1, device, stream, a.left_over());
    return error;
  };
  if (p.dtype == DType::kFloat32) return run(float());
  return p.dtype == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace fusebackend::accumulate
