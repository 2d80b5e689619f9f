// Each bin of a row is summed by one thread, in the order of its sources, and written once; long bins by a warp. So results are the same in
// every run, and nothing is added atomically.
//
// A block has a tile of the source in shared memory: some rows of the index, and of each some rows of the source that share it (a group). The
// elements of a group lie beside one another there: a thread reads a place of a bin once, and with it the elements of the whole group. Group
// after group is summed by the sorted rows of the index, which stand behind the tile.
#pragma once

#include "common/device_properties.h"
#include "common/programmatic_launch.cuh"
#include "row_scatter/row_scatter_sort.cuh"

namespace fusebackend::row_scatter {

constexpr int kLongBin = 32;       // sources from which on a warp sums a bin
constexpr int kStoreBytes = 4;     // of a row that a thread writes at once, where rows have no odd length
constexpr unsigned kWholeWarp = ~0u;

// Of a block. Across rows, where few blocks find room, each has more.
constexpr int threads_of(Load load) { return load == Load::kAcrossRows ? 384 : 256; }
constexpr int blocks_of(Load load) { return load == Load::kAcrossRows ? 2 : 4; }  // of a multiprocessor

struct SumParams {
  const void *source, *self;
  void* out;
  int sources, bins, pitch, tile_rows, block_groups, lists_at;
  int64_t source_step, run, tiles_of_run, tiles, copies;
  Dims own, shared;
  SortedRows sorted;
  FastDiv by_chunks, by_sources, by_rows, by_stores;  // of a tile, vectors of a row, sources, rows and stores of a row
  bool across;  // rows lie beside one another
};

// Where the rows of a tile lie, and their copies: the rows of the source that share one of the index.
struct Places {
  int64_t source_rows[kMostTileRows], out_rows[kMostTileRows], source_copies[kMostCopies], out_copies[kMostCopies];
};

// What is loaded: so many rows of the tile, and of each so many copies, from a first one on.
struct Part {
  int rows, copies, first_copy;
};

// Where the group of a source is in the tile.
__device__ __forceinline__ int group_at(int row, int place, int pitch) { return row * pitch + place; }

template <typename T, int kGroup>
__device__ __forceinline__ void load_elements(T* tile, const Places& at, const Part& part, const SumParams& p, int row, int source) {
  const T* const from = static_cast<const T*>(p.source) + at.source_rows[row] + source * p.source_step;
  Vec<T, kGroup> group{};
#pragma unroll
  for (int g = 0; g < kGroup; ++g)
    if (g < part.copies) group.v[g] = from[at.source_copies[part.first_copy + g]];
  reinterpret_cast<Vec<T, kGroup>*>(tile)[group_at(row, place_of(source), p.pitch)] = group;
}

// One vector of each copy: kN sources of a row, or kN rows of a source.
template <typename T, int kGroup>
struct Vectors {
  static constexpr int kN = 16 / int(sizeof(T));
  Vec<T, kN> x[kGroup];

  __device__ __forceinline__ void load(const T* from, const Places& at, const Part& part) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g)
      x[g] = g < part.copies ? index_add::load_source<T, kN>(from + at.source_copies[part.first_copy + g], false) : Vec<T, kN>{};
  }

  // Transposed in registers: the i-th elements of all vectors are a group.
  template <typename At>
  __device__ __forceinline__ void store(T* tile, At group_of) const {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      Vec<T, kGroup> group;
#pragma unroll
      for (int g = 0; g < kGroup; ++g) group.v[g] = x[g].v[i];
      reinterpret_cast<Vec<T, kGroup>*>(tile)[group_of(i)] = group;
    }
  }
};

template <typename T, int kGroup, Load kLoad>
__device__ __forceinline__ void load_tile(T* tile, const Places& at, const Part& part, const SumParams& p) {
  constexpr int kN = Vectors<T, kGroup>::kN, kThreads = threads_of(kLoad);
  const T* const source_of = static_cast<const T*>(p.source);
  if constexpr (kLoad == Load::kAlongRows) {
    const int chunks = p.sources / kN, rest = p.sources - chunks * kN;
    for (uint32_t task = threadIdx.x; task < uint32_t(part.rows * chunks); task += kThreads) {
      uint32_t row, chunk;
      p.by_chunks.divmod(task, row, chunk);
      Vectors<T, kGroup> x;
      x.load(source_of + at.source_rows[row] + int64_t(chunk) * kN, at, part);
      x.store(tile, [&](int i) { return group_at(row, place_of(chunk * kN + i), p.pitch); });
    }
    for (int task = threadIdx.x; task < part.rows * rest; task += kThreads)
      load_elements<T, kGroup>(tile, at, part, p, task / rest, chunks * kN + task % rest);
  } else if constexpr (kLoad == Load::kAcrossRows) {
    // Neighbouring threads read whole sectors: the chunks of a source's rows. The loads of several tasks are under way together.
    constexpr int kChunks = 2, kTasks = 2;  // the tile has kChunks * kN rows
    for (int first = threadIdx.x; first < kChunks * p.sources; first += kThreads * kTasks) {
      Vectors<T, kGroup> x[kTasks];
      const auto source = [&](int k) { return (first + k * kThreads) / kChunks; };
      const auto row = [&](int k) { return (first + k * kThreads) % kChunks * kN; };
      const auto is_whole = [&](int k) { return source(k) < p.sources && row(k) + kN <= part.rows; };
#pragma unroll
      for (int k = 0; k < kTasks; ++k)
        if (is_whole(k)) x[k].load(source_of + at.source_rows[row(k)] + source(k) * p.source_step, at, part);
#pragma unroll
      for (int k = 0; k < kTasks; ++k) {
        if (is_whole(k)) {
          x[k].store(tile, [&](int i) { return group_at(row(k) + i, place_of(source(k)), p.pitch); });
        } else if (source(k) < p.sources) {
          for (int i = row(k); i < part.rows; ++i) load_elements<T, kGroup>(tile, at, part, p, i, source(k));
        }
      }
    }
  } else {
    for (uint32_t task = threadIdx.x; task < uint32_t(part.rows) * p.sources; task += kThreads) {
      uint32_t row, source;
      if (!p.across) p.by_sources.divmod(task, row, source);
      else if (part.rows == p.tile_rows) p.by_rows.divmod(task, source, row);
      else source = task / part.rows, row = task - source * part.rows;
      load_elements<T, kGroup>(tile, at, part, p, row, source);
    }
  }
}

template <typename T, int kGroup>
__device__ __forceinline__ void add_group(float (&sum)[kGroup], const Vec<T, kGroup>& group) {
#pragma unroll
  for (int g = 0; g < kGroup; ++g) sum[g] += index_add::widen<float>(group.v[g]);
}

// The sums of a tile's bins. `lists`: the sorted rows of the index, in shared memory.
template <typename T, int kGroup, int kThreads>
__device__ __forceinline__ void sum_tile(const T* tile, const uint16_t* lists, const Places& at, const Part& part, const SumParams& p) {
  constexpr int kBins = kStoreBytes / int(sizeof(T));  // of a thread, beside one another
  using Group = Vec<T, kGroup>;
  const Group* const groups = reinterpret_cast<const Group*>(tile);
  const int row_words = int(p.sorted.row_words), begin_words = int(p.sorted.begin_words);
  const int stores = (p.bins + kBins - 1) / kBins;
  const bool whole = p.bins % kBins == 0;
  const uint32_t total = uint32_t(part.rows) * stores, lane = threadIdx.x % 32;
  for (uint32_t base = threadIdx.x - lane; base < total; base += kThreads) {
    const uint32_t task = base + lane;
    const bool valid = task < total;
    uint32_t row = 0, store = 0;
    if (valid) p.by_stores.divmod(task, row, store);
    const int bin = int(store) * kBins;
    const uint16_t* const begins = lists + row * row_words;
    const uint16_t* const places = begins + begin_words;
    const Group* const groups_of_row = groups + group_at(row, 0, p.pitch);
    float sum[kBins][kGroup] = {};
    int first[kBins], next[kBins], end[kBins], stop[kBins];
    bool is_long[kBins];
    int before = valid ? begins[bin] : 0;
#pragma unroll
    for (int u = 0; u < kBins; ++u) {
      first[u] = next[u] = before;
      end[u] = before = valid ? begins[min(bin + u + 1, p.bins)] : 0;
      is_long[u] = end[u] - next[u] >= kLongBin;
      stop[u] = is_long[u] ? next[u] : end[u];
    }
    // Of all bins of the thread at once: their loads are under way together.
    for (;;) {
      bool any = false;
#pragma unroll
      for (int u = 0; u < kBins; ++u) any |= next[u] < stop[u];
      if (!any) break;
      int place[kBins];
#pragma unroll
      for (int u = 0; u < kBins; ++u) place[u] = next[u] < stop[u] ? places[next[u]] : 0;
      Group x[kBins] = {};
#pragma unroll
      for (int u = 0; u < kBins; ++u)
        if (next[u] < stop[u]) x[u] = groups_of_row[place[u]];
#pragma unroll
      for (int u = 0; u < kBins; ++u) {
        ++next[u];
        add_group<T, kGroup>(sum[u], x[u]);
      }
    }
    // Lanes take turns: the whole warp sums a lane's long bin, in an order that depends on the bin's length alone.
#pragma unroll
    for (int u = 0; u < kBins; ++u) {
      for (unsigned lanes = __ballot_sync(kWholeWarp, is_long[u]); lanes != 0; lanes &= lanes - 1) {
        const int owner = __ffs(int(lanes)) - 1;
        const int from = __shfl_sync(kWholeWarp, first[u], owner), to = __shfl_sync(kWholeWarp, end[u], owner);
        const uint32_t of_row = __shfl_sync(kWholeWarp, row, owner);
        const uint16_t* const its_places = lists + of_row * row_words + begin_words;
        float some[kGroup] = {};
        for (int i = from + int(lane); i < to; i += 32) add_group<T, kGroup>(some, groups[group_at(of_row, its_places[i], p.pitch)]);
#pragma unroll
        for (int half = 16; half > 0; half /= 2) {
#pragma unroll
          for (int g = 0; g < kGroup; ++g) some[g] += __shfl_xor_sync(kWholeWarp, some[g], half);
        }
        if (int(lane) == owner) {
#pragma unroll
          for (int g = 0; g < kGroup; ++g) sum[u][g] = some[g];
        }
      }
    }
    if (!valid) continue;
    const int64_t to = at.out_rows[row] + bin;
    if (p.self != nullptr) {
      const T* const self = static_cast<const T*>(p.self) + to;
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
#pragma unroll
        for (int u = 0; u < kBins; ++u)
          if (g < part.copies && bin + u < p.bins) sum[u][g] += index_add::widen<float>(self[at.out_copies[part.first_copy + g] + u]);
      }
    }
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (g >= part.copies) break;
      T* const out = static_cast<T*>(p.out) + to + at.out_copies[part.first_copy + g];
      Vec<T, kBins> result;
#pragma unroll
      for (int u = 0; u < kBins; ++u) result.v[u] = index_add::narrow<T>(sum[u][g]);
      if (whole) {
        *reinterpret_cast<Vec<T, kBins>*>(out) = result;
      } else {
#pragma unroll
        for (int u = 0; u < kBins; ++u)
          if (bin + u < p.bins) out[u] = result.v[u];
      }
    }
  }
}

template <typename T, int kGroup, Load kLoad>
__global__ void __launch_bounds__(threads_of(kLoad), blocks_of(kLoad)) row_scatter_sum(const __grid_constant__ SumParams p) {
  constexpr int kThreads = threads_of(kLoad);
  static_assert(kMostTileRows + kMostCopies <= kThreads, "a thread for each");
  extern __shared__ __align__(16) char shared[];
  __shared__ Places at;
  static_assert(sizeof(at) <= kBesideTheTile);
  T* const tile = reinterpret_cast<T*>(shared);
  uint16_t* const lists = reinterpret_cast<uint16_t*>(shared + p.lists_at);

  // Tiles that lie beside one another run at the same time: those across rows share cache lines.
  const int64_t part_of_groups = blockIdx.x / uint32_t(p.tiles), tile_number = blockIdx.x - part_of_groups * p.tiles;
  const int64_t run = tile_number / p.tiles_of_run, in_run = (tile_number - run * p.tiles_of_run) * p.tile_rows;
  const int64_t first = run * p.run + in_run, first_copy = part_of_groups * p.block_groups * kGroup;
  const int rows = int(min(int64_t(p.tile_rows), p.run - in_run)), copies = int(min(int64_t(p.block_groups * kGroup), p.copies - first_copy));
  if (int(threadIdx.x) < rows) {
    const Offsets found = offsets_of(p.own, first + threadIdx.x);
    at.source_rows[threadIdx.x] = found.source, at.out_rows[threadIdx.x] = found.out;
  } else if (const int c = int(threadIdx.x) - kMostTileRows; c >= 0 && c < copies) {
    const Offsets found = offsets_of(p.shared, first_copy + c);
    at.source_copies[c] = found.source, at.out_copies[c] = found.out;
  }
  __syncthreads();
  for (int done = 0; done < copies; done += kGroup) {
    const Part part{rows, min(kGroup, copies - done), done};
    load_tile<T, kGroup, kLoad>(tile, at, part, p);
    if (done == 0) {
      wait_for_previous_kernel();  // the sort. What it wrote is not read by __ldg: this kernel was running then
      const uint4* const sorted = reinterpret_cast<const uint4*>(p.sorted.begins(first));
      for (int i = threadIdx.x; i < rows * int(p.sorted.row_words) / 8; i += kThreads) reinterpret_cast<uint4*>(lists)[i] = sorted[i];
    }
    __syncthreads();
    sum_tile<T, kGroup, kThreads>(tile, lists, at, part, p);
    __syncthreads();
  }
}

// Launches it behind the sort.
template <typename T, int kGroup, Load kLoad>
cudaError_t launch_sum(const SumParams& p, const Plan& plan, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;  // once, for all plans
  const cudaError_t error = opt_in.ensure(row_scatter_sum<T, kGroup, kLoad>, max_shared_bytes() - kBesideTheTile);
  if (error != cudaSuccess) return error;
  return launch_dependent(row_scatter_sum<T, kGroup, kLoad>, dim3(uint32_t(plan.blocks())), dim3(threads_of(kLoad)), size_t(plan.shared_bytes), true,
                          stream, p);
}

template <typename T>
cudaError_t launch_sum_of(const SumParams& p, const Plan& plan, cudaStream_t stream) {
  if (plan.load == Load::kAcrossRows)
    return plan.group == 4 ? launch_sum<T, 4, Load::kAcrossRows>(p, plan, stream) : launch_sum<T, 1, Load::kAcrossRows>(p, plan, stream);
  if constexpr (sizeof(T) == 2) {
    if (plan.group == 8)
      return plan.load == Load::kAlongRows ? launch_sum<T, 8, Load::kAlongRows>(p, plan, stream)
                                           : launch_sum<T, 8, Load::kElements>(p, plan, stream);
  }
  if (plan.load == Load::kAlongRows)
    return plan.group == 4 ? launch_sum<T, 4, Load::kAlongRows>(p, plan, stream) : launch_sum<T, 1, Load::kAlongRows>(p, plan, stream);
  return plan.group == 4 ? launch_sum<T, 4, Load::kElements>(p, plan, stream) : launch_sum<T, 1, Load::kElements>(p, plan, stream);
}

}  // namespace fusebackend::row_scatter
