// How the kernels of kSegmentedSum (segmented_sum.cu) sum sorted entries: a warp's lanes form teams, and a team sums the entries of a row.
#pragma once

#include "index_add/compensated_sum.cuh"
#include "index_add/dispatch.cuh"

namespace fusebackend::index_add {

constexpr uint32_t kRing = 8;  // asynchronous copies in flight, at most as many as a team has lanes

template <typename T>
struct SegmentedSumArgs {
  Params p;
  SortedIndex<const uint32_t> index;
  Sum<T>* cut;     // [chunk][part of a row that began earlier, part of a row that begins in it][columns * V]
  uint32_t columns;       // of V elements
  uint32_t lanes;         // of a team: at least 8
  uint32_t column_lanes;  // of these, as many take different columns,
  uint32_t splits;        // times as many take different entries
  uint32_t chunks, chunk_blocks, row_blocks;  // the two last for one part of the columns
  uint32_t rows_each;         // that a team takes one after the other
  uint32_t source_row_bytes;  // 0 if that takes more than 32 bits
};

// out[row] = initial[row] + sum for one vector of columns.
template <typename T, int V>
__device__ __forceinline__ void store_row(const Params& p, int64_t offset, Sum<T> (&sum)[V]) {
  Vec<T, V> held{};
  if (p.initial) held = *reinterpret_cast<const Vec<T, V>*>(static_cast<const T*>(p.initial) + offset);
  write_sums<T, V>(static_cast<T*>(p.out) + offset, sum, p.initial, held);
}

// The weight of a sorted entry.
template <typename T>
__device__ __forceinline__ Acc<T> sorted_weight(const SegmentedSumArgs<T>& a, uint32_t k) {
  return widen<Acc<T>>(static_cast<const T*>(a.p.weight.data)[int64_t(a.index.entries[k]) * a.p.weight.stride]);
}

// The team of a lane, and what the lane does in it.
struct Team {
  uint32_t lanes, lane, column_lanes, splits, split;  // lanes = column_lanes * splits
  uint32_t mask;
  template <typename T>
  __device__ explicit Team(const SegmentedSumArgs<T>& a) : lanes(a.lanes), lane(threadIdx.x % a.lanes), column_lanes(a.column_lanes) {
    splits = a.splits;
    split = lane / column_lanes;
    mask = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (threadIdx.x % 32 - lane);
  }
  __device__ uint32_t column() const { return lane % column_lanes; }
};

// sum += the sorted entries [begin, end) of one row, for the lane's vector of columns, which begins at `source`. Afterwards every lane of a
// column has the whole sum.
template <typename T, int V>
__device__ __forceinline__ void add_entries(Sum<T> (&sum)[V], const SegmentedSumArgs<T>& a, const Team& team, uint32_t begin, uint32_t end,
                                            const T* source) {
  using A = Acc<T>;
  constexpr uint32_t kLoads = 4;  // in flight
  const Params& p = a.p;
  const bool scaled = p.scales();
  for (uint32_t first = begin; first < end; first += team.lanes) {
    // Every lane looks one entry up; then all lanes go through these entries together.
    const uint32_t k = min(first + team.lane, end - 1), from = a.index.source_rows ? a.index.source_rows[k] : a.index.entries[k];
    A scale = A(p.alpha);
    if (p.weight.data) scale *= sorted_weight(a, k);
    const uint32_t count = min(team.lanes, end - first);
    for (uint32_t k0 = team.split; k0 - team.split < count; k0 += kLoads * team.splits) {
      Vec<T, V> v[kLoads];
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u) {  // past the end the last entry again, so that no load waits for a branch
        const uint32_t n_from = __shfl_sync(team.mask, from, min(k0 + u * team.splits, count - 1), team.lanes);
        v[u] = load_source<T, V>(source + int64_t(n_from) * p.source_row_stride, a.index.source_rows);
      }
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u) {
        const uint32_t k = k0 + u * team.splits;
        const A factor = scaled ? __shfl_sync(team.mask, scale, min(k, count - 1), team.lanes) : A(1);
        if (k < count)
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i].add(scaled ? product(widen<A>(v[u].v[i]), factor) : widen<A>(v[u].v[i]));
      }
    }
  }
  for (uint32_t step = team.column_lanes; step < team.lanes; step *= 2)
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i].add_other_lane(team.mask, step);
}

// Asynchronous copy of 4, 8 or 16 bytes from global memory to an address in shared memory, if `wanted`. Before sm_80 an ordinary one.
template <typename W>
__device__ __forceinline__ void copy_async_if(bool wanted, uint32_t shared, const char* global) {
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

// sum += the sorted entries [first, end) of each team, whose lanes all take different columns; calls before(k) before it adds entry k. Each
// lane's vectors come through a ring of its own in shared memory, so that kRing copies are always in flight; loads into registers would be
// waited for all at once. The whole warp must call it, and its teams advance together: shuffles within less than a warp are slow.
template <typename T, int V, typename Before>
__device__ __forceinline__ void stream_entries(Sum<T> (&sum)[V], const SegmentedSumArgs<T>& a, const Team& team, uint32_t first,
                                               uint32_t end, const T* source, Vec<T, V>* ring, Before before) {
  using A = Acc<T>;
  constexpr uint32_t kUnroll = 4, kSlot = kThreads * sizeof(Vec<T, V>);
  const Params& p = a.p;
  const bool scaled = p.scales();
  const uint32_t* const list = a.index.source_rows ? a.index.source_rows : a.index.entries;
  // Every lane looks one entry up, a round of them ahead of the copies, which are kRing entries ahead of the sums.
  auto look_up = [&](uint32_t k) { return end > first ? list[min(k, end - 1)] : 0; };
  uint32_t now = look_up(first + team.lane), soon = look_up(first + team.lanes + team.lane);
  uint32_t place = uint32_t(__cvta_generic_to_shared(ring));
  uint64_t from_base = reinterpret_cast<uint64_t>(source);
  asm volatile("" : "+r"(place), "+l"(from_base));  // keeps the compiler from recomputing them at each use
  auto copy = [&](uint32_t k, uint32_t slot, uint32_t from) {
    copy_async_if<Vec<T, V>>(k < end, slot, reinterpret_cast<const char*>(from_base + uint64_t(from) * a.source_row_bytes));
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
    if (p.weight.data && end > first) scale *= sorted_weight(a, min(k0 + team.lane, end - 1));
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
          for (int i = 0; i < V; ++i) sum[i].add(scaled ? product(widen<A>(v.v[i]), factor) : widen<A>(v.v[i]));
        }
        copy(k + kRing, slot + u * kSlot, from);
      }
    }
    now = soon, soon = later;
  }
}

// Sums and writes the rows [row_begin, row_end) of each team, none of them cut: their entries are neighbours, so no load waits for the end
// of a row. The whole warp must call it.
template <typename T, int V>
__device__ __forceinline__ void sum_rows(const SegmentedSumArgs<T>& a, const Team& team, uint32_t row_begin, uint32_t row_end, bool writes,
                                         const T* source, int64_t out_offset, Vec<T, V>* ring) {
  const Params& p = a.p;
  const T* const initial = p.initial ? static_cast<const T*>(p.initial) + out_offset : nullptr;
  T* const out = static_cast<T*>(p.out) + out_offset;
  const uint32_t* const begins = a.index.row_begins;
  const uint32_t first = row_begin < row_end ? begins[row_begin] : 0, end = row_begin < row_end ? begins[row_end] : 0;
  uint32_t row = row_begin, began = first, next = row < row_end ? begins[row + 1] : ~0u, after = row + 1 < row_end ? begins[row + 2] : ~0u;
  Sum<T> sum[V]{};
  Vec<T, V> held;
  auto load_initial = [&] { if (initial) held = *reinterpret_cast<const Vec<T, V>*>(initial + row * p.out_row_stride); };
  auto finish_row = [&] {
    if (writes && (next > began || !p.in_place())) write_sums<T, V>(out + row * p.out_row_stride, sum, initial, held);
    began = next, next = after;
    if (++row == row_end) return;
    after = row + 1 < row_end ? begins[row + 2] : ~0u;
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = {};
    load_initial();
  };
  if (row < row_end) load_initial();
  stream_entries<T, V>(sum, a, team, first, end, source, ring, [&](uint32_t k) {
    while (k >= next) finish_row();
  });
  while (row < row_end) finish_row();
}

// The same for vectors of less than 4 bytes, which can't be copied asynchronously. `begins`: row_begins of row_begin + the lane's number.
template <typename T, int V>
__device__ __forceinline__ void sum_rows_of_narrow_vectors(const SegmentedSumArgs<T>& a, const Team& team, uint32_t row_begin,
                                                           uint32_t row_end, uint32_t begins, bool writes, const T* source,
                                                           int64_t out_offset) {
  using A = Acc<T>;
  constexpr uint32_t kLoads = 8;  // in flight
  const Params& p = a.p;
  const bool scaled = p.scales();
  const T* const initial = p.initial ? static_cast<const T*>(p.initial) + out_offset : nullptr;
  uint32_t row = row_begin, next = __shfl_sync(team.mask, begins, 1, team.lanes), began = __shfl_sync(team.mask, begins, 0, team.lanes);
  Sum<T> sum[V]{};
  Vec<T, V> held;
  auto load_initial = [&] { if (initial) held = *reinterpret_cast<const Vec<T, V>*>(initial + row * p.out_row_stride); };
  auto finish_row = [&] {
    if (writes && (next > began || !p.in_place()))
      write_sums<T, V>(static_cast<T*>(p.out) + out_offset + row * p.out_row_stride, sum, initial, held);
    began = next;
    if (++row == row_end) return;
    next = __shfl_sync(team.mask, begins, row + 1 - row_begin, team.lanes);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = {};
    load_initial();
  };
  load_initial();
  const uint32_t end = __shfl_sync(team.mask, begins, row_end - row_begin, team.lanes);
  for (uint32_t first = began; first < end; first += team.lanes) {
    const uint32_t k = min(first + team.lane, end - 1), from = a.index.source_rows ? a.index.source_rows[k] : a.index.entries[k];
    A scale = A(p.alpha);
    if (p.weight.data) scale *= sorted_weight(a, k);
    const uint32_t count = min(team.lanes, end - first);
    for (uint32_t k0 = 0; k0 < count; k0 += kLoads) {
      Vec<T, V> v[kLoads];
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u) {  // past the end the last entry again, so that no load waits for a branch
        const uint32_t n_from = __shfl_sync(team.mask, from, min(k0 + u, count - 1), team.lanes);
        v[u] = load_source<T, V>(source + int64_t(n_from) * p.source_row_stride, a.index.source_rows);
      }
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u) {
        if (k0 + u >= count) break;
        const A factor = scaled ? __shfl_sync(team.mask, scale, k0 + u, team.lanes) : A(1);
        while (first + k0 + u >= next) finish_row();
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i].add(scaled ? product(widen<A>(v[u].v[i]), factor) : widen<A>(v[u].v[i]));
      }
    }
  }
  while (row < row_end) finish_row();
}

}  // namespace fusebackend::index_add
