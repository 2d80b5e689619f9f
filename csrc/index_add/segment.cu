// kSorted: by a plan of the index, some lanes of a warp sum the entries of each row and write it once, rounded once, whatever out held before
// included. Rows with more than kChunk entries are cut into chunks of the sorted entries, whose sums a second kernel adds up. Which partial
// sums meet in which order depends on shapes and indices alone, so a repetition is bit-identical.
#include "dispatch.cuh"
#include "overlap.cuh"
#include "twosum.cuh"

namespace fusebackend::accumulate {
namespace {

constexpr int64_t kEntriesEach = 64;  // about, of the rows that a team takes
constexpr uint32_t kChunksEach = 1;  // that a team looks at
constexpr uint32_t kChunksPerJoin = 64, kJoinColumns = 32;
constexpr uint32_t kRing = 8;  // copies on their way, at most as many as a team has lanes

template <typename T>
struct SegmentArgs {
  Params p;
  PlanView<const uint32_t> plan;
  Sum<T>* cut;              // [chunk][of a run that began before it, of one that begins in it][columns * V]
  uint32_t columns;         // of V elements
  uint32_t lanes;           // that share a row: at least 8
  uint32_t column_lanes;    // of these, as many as take different columns,
  uint32_t splits;          // times as many as take different entries
  uint32_t chunks, chunk_blocks, row_blocks;  // the two last for one piece of the columns
  uint32_t rows_each;  // that a team takes one after the other
  uint32_t source_row_bytes;  // 0: too many for 32 bits
};

// out[row] = initial[row] + sum for one vector of columns.
template <typename T, int V>
__device__ __forceinline__ void store_row(const Params& p, int64_t offset, Sum<T> (&sum)[V]) {
  Vec<T, V> held{};
  if (p.initial) held = *reinterpret_cast<const Vec<T, V>*>(static_cast<const T*>(p.initial) + offset);
  write_sums<T, V>(static_cast<T*>(p.out) + offset, sum, p.initial, held);
}

// The lanes of a warp that share a row, and what each of them does.
struct Team {
  uint32_t lanes, lane, column_lanes, splits, split;  // lanes = column_lanes * splits
  uint32_t mask;
  template <typename T>
  __device__ explicit Team(const SegmentArgs<T>& a) : lanes(a.lanes), lane(threadIdx.x % a.lanes), column_lanes(a.column_lanes) {
    splits = a.splits;
    split = lane / column_lanes;
    mask = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (threadIdx.x % 32 - lane);
  }
  __device__ uint32_t column() const { return lane % column_lanes; }
};

// sum += the sorted entries [begin, end) of one row, for the lane's vector of columns, which begins at `source`. Afterwards every lane of a
// column has the whole sum.
template <typename T, int V>
__device__ __forceinline__ void add_entries(Sum<T> (&sum)[V], const SegmentArgs<T>& a, const Team& team, uint32_t begin, uint32_t end,
                                            const T* source) {
  using A = Acc<T>;
  constexpr uint32_t U = 4;  // loads in flight
  const Params& p = a.p;
  const bool scaled = p.weight.data || p.alpha != 1.0;
  for (uint32_t first = begin; first < end; first += team.lanes) {
    // Every lane looks one entry up; then they go through these together.
    const uint32_t k = min(first + team.lane, end - 1), from = a.plan.from ? a.plan.from[k] : a.plan.entries[k];
    A scale = A(p.alpha);
    if (p.weight.data) scale *= widen<A>(static_cast<const T*>(p.weight.data)[int64_t(a.plan.entries[k]) * p.weight.stride]);
    const uint32_t count = min(team.lanes, end - first);
    for (uint32_t k0 = team.split; k0 - team.split < count; k0 += U * team.splits) {
      Vec<T, V> v[U];
#pragma unroll
      for (uint32_t u = 0; u < U; ++u) {  // past the end the last again: no load waits for a branch
        const uint32_t n_from = __shfl_sync(team.mask, from, min(k0 + u * team.splits, count - 1), team.lanes);
        const T* const row = source + int64_t(n_from) * p.source_row_stride;
        v[u] = a.plan.from ? load_again<T, V>(row) : load_once<T, V>(row);
      }
#pragma unroll
      for (uint32_t u = 0; u < U; ++u) {
        const uint32_t k = k0 + u * team.splits;
        const A factor = scaled ? __shfl_sync(team.mask, scale, min(k, count - 1), team.lanes) : A(1);
        if (k < count)
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i].add(scaled ? widen<A>(v[u].v[i]) * factor : widen<A>(v[u].v[i]));
      }
    }
  }
  for (uint32_t step = team.column_lanes; step < team.lanes; step *= 2)
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i].add_other_lane(team.mask, step);
}

// Asynchronous copy of 4, 8 or 16 bytes from global memory to an address in shared memory, if `wanted`. Before sm_80 an ordinary one.
template <typename W>
__device__ __forceinline__ void copy_async(uint32_t shared, const char* global, bool wanted) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(W) == 16)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(shared), "l"(global),
                 "r"(int(wanted))
                 : "memory");
  else
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], %3; }" ::"r"(shared), "l"(global),
                 "r"(int(wanted)), "n"(sizeof(W))
                 : "memory");
#else
  if (wanted) *static_cast<W*>(__cvta_shared_to_generic(shared)) = *reinterpret_cast<const W*>(global);
#endif
}

// sum += the sorted entries [first, end) of each team, whose lanes all take different columns; before(k) comes before entry k. Each lane's
// vectors come through a ring of its own in shared memory: kRing copies are always on their way, which registers would not do (their loads
// are waited for together). The whole warp must call it, and its teams go in step: shuffles among less than a warp are slow.
template <typename T, int V, typename Before>
__device__ __forceinline__ void stream_entries(Sum<T> (&sum)[V], const SegmentArgs<T>& a, const Team& team, uint32_t first, uint32_t end,
                                               const T* source, Vec<T, V>* ring, Before before) {
  using A = Acc<T>;
  constexpr uint32_t kUnroll = 4, kSlot = kThreads * sizeof(Vec<T, V>);
  const Params& p = a.p;
  const bool scaled = p.weight.data || p.alpha != 1.0;
  const uint32_t* const list = a.plan.from ? a.plan.from : a.plan.entries;
  // Every lane looks one entry up, a round of them ahead of the copies, which are kRing entries ahead of the sums.
  auto look_up = [&](uint32_t k) { return end > first ? list[min(k, end - 1)] : 0; };
  uint32_t now = look_up(first + team.lane), soon = look_up(first + team.lanes + team.lane);
  uint32_t place = uint32_t(__cvta_generic_to_shared(ring));
  uint64_t from_base = reinterpret_cast<uint64_t>(source);
  asm volatile("" : "+r"(place), "+l"(from_base));  // else they would be worked out anew at each use
  auto copy = [&](uint32_t k, uint32_t slot, uint32_t from) {
    copy_async<Vec<T, V>>(slot, reinterpret_cast<const char*>(from_base + uint64_t(from) * a.source_row_bytes), k < end);
    cp_async_commit();
  };
#pragma unroll
  for (uint32_t u = 0; u < kRing; ++u) copy(first + u, place + u * kSlot, __shfl_sync(~0u, now, u, team.lanes));
  uint32_t longest = end - first;
#pragma unroll
  for (int step = 8; step < 32; step *= 2) longest = max(longest, __shfl_xor_sync(~0u, longest, step));  // teams have at least 8 lanes
  for (uint32_t done = 0; done < longest; done += team.lanes) {
    const uint32_t k0 = first + done, later = look_up(k0 + 2 * team.lanes + team.lane);
    A scale = A(p.alpha);
    if (p.weight.data && end > first)
      scale *= widen<A>(static_cast<const T*>(p.weight.data)[int64_t(a.plan.entries[min(k0 + team.lane, end - 1)]) * p.weight.stride]);
    const uint32_t count = min(team.lanes, longest - done);
#pragma unroll 1
    for (uint32_t j0 = 0; j0 < count; j0 += kUnroll) {
      const uint32_t slot = place + j0 % kRing * kSlot, ahead = j0 + kRing < team.lanes ? now : soon;
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u) {
        const uint32_t k = k0 + j0 + u;
        const A factor = scaled ? __shfl_sync(~0u, scale, j0 + u, team.lanes) : A(1);
        const uint32_t from = __shfl_sync(~0u, ahead, j0 + kRing + u, team.lanes);
        cp_async_wait<kRing - 1>();
        if (k < end) {
          before(k);
          const Vec<T, V> v = *static_cast<const Vec<T, V>*>(__cvta_shared_to_generic(slot + u * kSlot));
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i].add(scaled ? widen<A>(v.v[i]) * factor : widen<A>(v.v[i]));
        }
        copy(k + kRing, slot + u * kSlot, from);
      }
    }
    now = soon, soon = later;
  }
}

// The rows [row_begin, row_end) of each team, none of them cut: their entries lie one after the other, so loads need not wait for a row to be
// finished. The whole warp must call it.
template <typename T, int V>
__device__ __forceinline__ void add_rows(const SegmentArgs<T>& a, const Team& team, uint32_t row_begin, uint32_t row_end, bool writes,
                                         const T* source, int64_t out_offset, Vec<T, V>* ring) {
  const Params& p = a.p;
  const T* const initial = p.initial ? static_cast<const T*>(p.initial) + out_offset : nullptr;
  T* const out = static_cast<T*>(p.out) + out_offset;
  const uint32_t* const offsets = a.plan.offsets;
  const uint32_t first = row_begin < row_end ? offsets[row_begin] : 0, end = row_begin < row_end ? offsets[row_end] : 0;
  uint32_t row = row_begin, began = first, next = row < row_end ? offsets[row + 1] : ~0u, after = row + 1 < row_end ? offsets[row + 2] : ~0u;
  Sum<T> sum[V]{};
  Vec<T, V> held;
  auto look = [&] { if (initial) held = *reinterpret_cast<const Vec<T, V>*>(initial + row * p.out_row_stride); };
  auto finish_row = [&] {
    if (writes && (next > began || !p.in_place())) write_sums<T, V>(out + row * p.out_row_stride, sum, initial, held);
    began = next, next = after;
    if (++row == row_end) return;
    after = row + 1 < row_end ? offsets[row + 2] : ~0u;
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = {};
    look();
  };
  if (row < row_end) look();
  stream_entries<T, V>(sum, a, team, first, end, source, ring, [&](uint32_t k) {
    while (k >= next) finish_row();
  });
  while (row < row_end) finish_row();
}

// The same for vectors that are too narrow to be copied asynchronously: several loads, then their sums.
template <typename T, int V>
__device__ __forceinline__ void add_narrow_rows(const SegmentArgs<T>& a, const Team& team, uint32_t row_begin, uint32_t row_end, uint32_t offsets,
                                         bool writes, const T* source, int64_t out_offset) {
  using A = Acc<T>;
  constexpr uint32_t U = 8;  // loads in flight
  const Params& p = a.p;
  const bool scaled = p.weight.data || p.alpha != 1.0;
  const T* const initial = p.initial ? static_cast<const T*>(p.initial) + out_offset : nullptr;
  uint32_t row = row_begin, next = __shfl_sync(team.mask, offsets, 1, team.lanes), began = __shfl_sync(team.mask, offsets, 0, team.lanes);
  Sum<T> sum[V]{};
  Vec<T, V> held;
  auto look = [&] { if (initial) held = *reinterpret_cast<const Vec<T, V>*>(initial + row * p.out_row_stride); };
  auto finish_row = [&] {
    if (writes && (next > began || !p.in_place()))
      write_sums<T, V>(static_cast<T*>(p.out) + out_offset + row * p.out_row_stride, sum, initial, held);
    began = next;
    if (++row == row_end) return;
    next = __shfl_sync(team.mask, offsets, row + 1 - row_begin, team.lanes);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = {};
    look();
  };
  look();
  const uint32_t end = __shfl_sync(team.mask, offsets, row_end - row_begin, team.lanes);
  for (uint32_t first = began; first < end; first += team.lanes) {
    const uint32_t k = min(first + team.lane, end - 1), from = a.plan.from ? a.plan.from[k] : a.plan.entries[k];
    A scale = A(p.alpha);
    if (p.weight.data) scale *= widen<A>(static_cast<const T*>(p.weight.data)[int64_t(a.plan.entries[k]) * p.weight.stride]);
    const uint32_t count = min(team.lanes, end - first);
    for (uint32_t k0 = 0; k0 < count; k0 += U) {
      Vec<T, V> v[U];
#pragma unroll
      for (uint32_t u = 0; u < U; ++u) {  // past the end the last again: no load waits for a branch
        const T* const at = source + int64_t(__shfl_sync(team.mask, from, min(k0 + u, count - 1), team.lanes)) * p.source_row_stride;
        v[u] = a.plan.from ? load_again<T, V>(at) : load_once<T, V>(at);
      }
#pragma unroll
      for (uint32_t u = 0; u < U; ++u) {
        if (k0 + u >= count) break;
        const A factor = scaled ? __shfl_sync(team.mask, scale, k0 + u, team.lanes) : A(1);
        while (first + k0 + u >= next) finish_row();
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i].add(scaled ? widen<A>(v[u].v[i]) * factor : widen<A>(v[u].v[i]));
      }
    }
  }
  while (row < row_end) finish_row();
}

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 4) segment_kernel(const __grid_constant__ SegmentArgs<T> a) {
  constexpr bool kRings = sizeof(Vec<T, V>) >= 4;
  __shared__ Vec<T, V> rings[kRings ? kRing * kThreads : 1];
  const Params& p = a.p;
  const Team team(a);
  const uint32_t blocks = a.chunk_blocks + a.row_blocks, block = blockIdx.x % blocks;
  const uint32_t column = blockIdx.x / blocks * a.column_lanes + team.column();
  const bool writes = column < a.columns && team.split == 0;
  int64_t out_offset, source_offset;
  column_offsets<V>(p, min(column, a.columns - 1), out_offset, source_offset);  // lanes beyond read what another reads
  const T* const source = static_cast<const T*>(p.source) + source_offset;
  wait_for_previous_kernel();
  let_next_kernel_set_up();

  if (block >= a.chunk_blocks) {
    const uint32_t team_row = ((block - a.chunk_blocks) * kThreads + threadIdx.x) / team.lanes * a.rows_each;
    const uint32_t row_begin = min(team_row, uint32_t(p.rows)), row_end = min(row_begin + a.rows_each, uint32_t(p.rows));
    const uint32_t offsets = a.plan.offsets[min(row_begin + team.lane, row_end)];  // of the row that the lane stands for
    const uint32_t lane_end = __shfl_down_sync(~0u, offsets, 1, team.lanes);
    const bool cut = team.lane < a.rows_each && lane_end - offsets > kChunk;
    if constexpr (kRings)
      if (team.splits == 1 && a.source_row_bytes && !__any_sync(~0u, cut))
        return add_rows<T, V>(a, team, row_begin, row_end, writes, source, out_offset, rings + threadIdx.x);
    if (row_begin == row_end) return;
    if (!kRings && team.splits == 1 && !__any_sync(team.mask, cut))
      return add_narrow_rows<T, V>(a, team, row_begin, row_end, offsets, writes, source, out_offset);
    for (uint32_t row = row_begin; row < row_end; ++row) {
      const uint32_t begin = __shfl_sync(team.mask, offsets, row - row_begin, team.lanes);
      const uint32_t end = __shfl_sync(team.mask, offsets, row + 1 - row_begin, team.lanes);
      if (end - begin > kChunk || (begin == end && p.in_place())) continue;
      Sum<T> sum[V]{};
      add_entries<T, V>(sum, a, team, begin, end, source);
      if (writes) store_row<T, V>(p, row * p.out_row_stride + out_offset, sum);
    }
    return;
  }

  // Few chunks are of rows that are cut: a lane looks each of some up.
  const uint32_t team_chunk = (block * kThreads + threadIdx.x) / team.lanes * kChunksEach, chunk_begin = min(team_chunk, a.chunks);
  const uint32_t kept = a.plan.offsets[p.rows], mine = min(chunk_begin + min(team.lane, kChunksEach - 1), a.chunks - 1);
  uint32_t end_of_first = 0, begin_of_next = 0;  // where the chunk's part of a cut row ends that began before it; where one begins in it
  {
    const uint32_t first = mine * kChunk, last = min(first + kChunk, kept), row = a.plan.chunk_rows[mine];
    if (first < last && chunk_begin < a.chunks) {
      const uint32_t row_end = a.plan.offsets[row + 1], next_row = mine + 1 < a.chunks ? a.plan.chunk_rows[mine + 1] : uint32_t(p.rows);
      if (row_end - a.plan.offsets[row] > kChunk) end_of_first = min(row_end, last);
      if (row_end < last && next_row < p.rows)
        if (const uint32_t begin = a.plan.offsets[next_row]; begin > first && begin < last && a.plan.offsets[next_row + 1] - begin > kChunk)
          begin_of_next = begin;
    }
  }
  for (uint32_t i = 0; i < kChunksEach; ++i) {
    const uint32_t chunk = chunk_begin + i, first = chunk * kChunk;
    const bool there = chunk < a.chunks;
    const uint32_t end = __shfl_sync(~0u, end_of_first, i, team.lanes), begin = __shfl_sync(~0u, begin_of_next, i, team.lanes);
#pragma unroll 1
    for (int slot = 0; slot < 2; ++slot) {
      uint32_t from = 0, to = 0;
      if (there && slot == 0 && end > 0) from = first, to = end;
      if (there && slot == 1 && begin > 0) from = begin, to = min(first + kChunk, kept);
      if (!__any_sync(~0u, from < to)) continue;
      Sum<T> sum[V]{};
      bool streamed = false;
      if constexpr (kRings)
        if (team.splits == 1 && a.source_row_bytes) {
          stream_entries<T, V>(sum, a, team, from, to, source, rings + threadIdx.x, [](uint32_t) {});
          streamed = true;
        }
      if (!streamed && from < to) add_entries<T, V>(sum, a, team, from, to, source);
      Sum<T>* const cut = a.cut + ((int64_t(chunk) * 2 + slot) * a.columns + column) * V;
      if (writes && from < to)
#pragma unroll
        for (int i = 0; i < V; ++i) cut[i] = sum[i];
    }
  }
}

// Rows that were cut: the chunk in which one begins adds up its part and those of the chunks that the row goes on in.
template <typename T>
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ SegmentArgs<T> a, uint32_t columns, uint32_t width,
                                                        uint32_t column_blocks) {
  __shared__ uint32_t last_of[kChunksPerJoin], row_of[kChunksPerJoin], slot_of[kChunksPerJoin];
  __shared__ Sum<T> sums[kThreads];
  const Params& p = a.p;
  const uint32_t first_chunk = blockIdx.x / column_blocks * kChunksPerJoin;
  // The plan is read before the wait: the kernel before let this one set up only when it had the plan itself.
  if (threadIdx.x < kChunksPerJoin) {
    const uint32_t chunk = first_chunk + threadIdx.x;
    const uint32_t row = chunk + 1 < a.chunks ? a.plan.chunk_rows[chunk + 1] : p.rows;  // which may begin in this chunk
    last_of[threadIdx.x] = 0;
    if (row < p.rows) {
      const uint32_t from = a.plan.offsets[row], to = a.plan.offsets[row + 1];
      if (to - from > kChunk && from / kChunk == chunk) {
        last_of[threadIdx.x] = (to - 1) / kChunk;
        row_of[threadIdx.x] = row;
        slot_of[threadIdx.x] = from % kChunk != 0;
      }
    }
  }
  const bool any = __syncthreads_or(threadIdx.x < kChunksPerJoin && last_of[threadIdx.x] > 0);
  wait_for_previous_kernel();  // every block: what follows this kernel relies on the sums too
  let_next_kernel_set_up();
  if (!any) return;
  // Columns across threads. Of short rows each group of threads takes some; long ones all groups share.
  const uint32_t group = threadIdx.x / width, groups = kThreads / width, c = blockIdx.x % column_blocks * width + threadIdx.x % width;
  const bool busy = group < groups && c < columns;
  constexpr uint32_t kShort = 8;  // chunks
  auto parts = [&](uint32_t i, uint32_t from, uint32_t step) {
    Sum<T> sum{};
    if (from == 0) sum.add(a.cut[(int64_t(first_chunk + i) * 2 + slot_of[i]) * columns + c]);
#pragma unroll 8
    for (uint32_t k = first_chunk + i + 1 + from; k <= last_of[i]; k += step) sum.add(a.cut[int64_t(k) * 2 * columns + c]);
    return sum;
  };
  auto store = [&](uint32_t i, Sum<T> sum) {
    int64_t out, source;
    column_offsets<1>(p, c, out, source);
    Sum<T> one[1]{sum};
    store_row<T, 1>(p, row_of[i] * p.out_row_stride + out, one);
  };
  for (uint32_t i = group; i < kChunksPerJoin; i += groups)
    if (busy && last_of[i] > first_chunk + i && last_of[i] - (first_chunk + i) < kShort) store(i, parts(i, 0, 1));
  for (uint32_t i = 0; i < kChunksPerJoin; ++i) {
    if (last_of[i] < first_chunk + i + kShort) continue;
    Sum<T> sum{};
    if (busy) sum = parts(i, group, groups);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (busy && group == 0) {
      for (uint32_t other = 1; other < groups; ++other) sum.add(sums[other * width + threadIdx.x]);
      store(i, sum);
    }
    __syncthreads();
  }
}

constexpr uint32_t power_of_2_from(int64_t x) {
  uint32_t power = 1;
  while (power < x) power *= 2;
  return power;
}

// How many lanes take different columns: those with which the fewest idle.
uint32_t column_lanes_for(int64_t columns) {
  if (columns <= 8) return power_of_2_from(columns);
  uint32_t best = 32;
  for (uint32_t lanes : {16, 8})
    if (ceil_div(columns, lanes) * lanes < ceil_div(columns, best) * best) best = lanes;
  return best;
}

size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }

size_t cut_bytes(const Params& p) {
  const size_t per_sum = p.dtype == DType::kFloat64 ? sizeof(Sum<double>) : sizeof(Sum<float>);  // and no other is larger
  return align(size_t(ceil_div(p.n, kChunk)) * 2 * p.columns() * per_sum);
}

}  // namespace

size_t sorted_bytes(const Params& p, const Device& device) {
  const size_t plan = align(plan_words(p.n, p.rows, p.source_index.data) * 4);
  return cut_bytes(p) + (p.plan ? 0 : plan + sort_bytes(p, device));
}

cudaError_t launch_sorted(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  char* const own_plan = static_cast<char*>(workspace) + cut_bytes(p);
  if (!p.plan) {
    char* const scratch = own_plan + align(plan_words(p.n, p.rows, p.source_index.data) * 4);
    if (cudaError_t error = launch_plan(p, own_plan, scratch, device, stream); error != cudaSuccess) return error;
  }
  const PlanView<const uint32_t> plan = view_plan(p, static_cast<const uint32_t*>(p.plan ? p.plan : own_plan));
  const int v = vector_width(p, true);
  const int64_t columns = p.columns() / v;
  const uint32_t column_lanes = column_lanes_for(columns), lanes = std::max(column_lanes, 8u), chunks = uint32_t(ceil_div(p.n, kChunk));
  // So many rows that their entries are some batches of loads, if that leaves each multiprocessor blocks for several rounds.
  const int64_t teams = std::max<int64_t>(int64_t(device.sm_count) * kThreads * 12 / lanes / ceil_div(columns, column_lanes), 1);
  const uint32_t rows_each = uint32_t(std::clamp<int64_t>(std::min(kEntriesEach * p.rows / p.n, p.rows / teams), 1, lanes - 1));
  const uint64_t row_bytes = uint64_t(p.source_row_stride) * element_size(p.dtype);  // of a negative stride: too many
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    const SegmentArgs<T> a{p, plan, static_cast<Sum<T>*>(workspace), uint32_t(columns), lanes, column_lanes, lanes / column_lanes, chunks,
                           uint32_t(ceil_div(ceil_div(chunks, kChunksEach) * lanes, kThreads)),
                           uint32_t(ceil_div(ceil_div(p.rows, rows_each) * lanes, kThreads)), rows_each,
                           row_bytes <= UINT32_MAX ? uint32_t(row_bytes) : 0};
    const int64_t blocks = (int64_t(a.chunk_blocks) + a.row_blocks) * ceil_div(columns, column_lanes);
    cudaError_t error = cudaErrorInvalidValue;
    auto walk = [&](auto kernel) { error = launch_overlapped(kernel, unsigned(blocks), kThreads, 0, device.major, stream, a); };
    if constexpr (kWide<T> > 1)
      if (v == kWide<T>) walk(segment_kernel<T, kWide<T>>);
    if constexpr (kHalf<T>)
      if (v == 2) walk(segment_kernel<T, 2>);
    if (v == 1) walk(segment_kernel<T, 1>);
    if (error != cudaSuccess) return error;
    const uint32_t elements = uint32_t(p.columns()), width = std::min(elements, kJoinColumns), column_blocks = uint32_t(ceil_div(elements, width));
    return launch_overlapped(join_kernel<T>, unsigned(ceil_div(chunks, kChunksPerJoin) * column_blocks), kThreads, 0, device.major, stream, a,
                             elements, width, column_blocks);
  });
}

}  // namespace fusebackend::accumulate
