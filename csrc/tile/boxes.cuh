// Boxes: the folded tile, for problems with short or odd dimensions. A block carries boxes of several dimensions through shared memory.
// On the way in, a box is a set of runs, each contiguous in the input over as many dimensions as are covered whole; on the way out it is
// a set of other runs, contiguous in the output. Both are walked in aligned 16-byte chunks, whatever the alignment of the runs.
//
// An element's place in shared memory is an affine function of its index, with weights that equal the input's strides modulo a chunk, or
// modulo a line where runs are long: so chunks that are aligned in the input are aligned there too, for all boxes and all alignments.
// Along an output run of one dimension, places march by that dimension's weight. Along one of several, they repeat: base(run) +
// table[i % T] + (i / T) * march, where T is the length of the dimensions before the last. The table holds, for each i, the places of the
// chunk's worth of elements that begin there.
//
// Where lanes, a chunk's worth of elements apart, would meet few banks: if the output runs are of one dimension, chunks are permuted within
// their lines, in the same way for a chunk's worth of input runs (such groups are a line further apart, so that they share none); else
// input runs are a chunk further apart after each chunk's worth.
//
// All boxes have one shape: the last one along a cut dimension overlaps the one before it, and both write the same there. Only output runs
// are cut in windows that begin and end at aligned sectors (a sector that two boxes write in part costs several times its bytes); for
// that, a box has a few more elements in front. They are whole rows of the last dimension; of these, input runs that hold only elements
// that no store needs are spared: neither read nor given a place, and the last box reaches beyond the end in place of an overlap.
#pragma once

#include "batch.cuh"
#include "chunks.cuh"
#include "cuda_plan.h"
#include "ops.cuh"

namespace fusebackend::tile {

// A dimension of a run or across runs. `stride` is the input's (kA) or the output's, `beside` the direct input's, in bytes.
struct BoxDim {
  FastDiv extent;
  uint32_t weight;
  int64_t stride, beside;
};

// A dimension that has more than one box.
struct BoxGrid {
  FastDiv boxes;
  uint32_t step, last;  // elements from box to box, and to the last one
  int64_t stride[3];    // by Role: kA is staged (and its partner), kB direct
};

// Some of BoxArgs::dims.
struct BoxDims {
  int at = 0, rank = 0;
};

// A run's first element: from the box's in global memory, and in shared memory; there its chunks' places are xored with `swizzle`.
struct alignas(16) BoxRun {
  int64_t offset;
  uint32_t place, swizzle;
};

// A box's first element in each operand.
struct BoxBase {
  char* out;  // of a whole output run
  const char* staged;
  const char* direct;
  int start, window;  // elements of the output run before the box, and before its window
};

struct BoxArgs {
  BoxBase base;
  int64_t partner;      // bytes from the staged input to the second one of a staged pair, or 0
  bool has_direct;
  Extent staged_extent, direct_extent;
  bool staged_is_b;
  bool chunked;         // input runs are read in chunks: their elements are neighbours, and there is no partner
  bool direct_follows;  // the direct input lies as the output does within output runs
  uint32_t in_length, in_runs, out_length, out_runs;
  FastDiv in_chunks;     // of a run, at the worst alignment
  uint32_t align;        // lanes read runs from multiples of it
  uint32_t run_bits;     // a warp takes 2^run_bits output runs and 2^(5 - run_bits) chunks of each at once
  uint32_t share_bits;   // 2^share_bits warps share a group of runs
  FastDiv table;
  int march;                    // between neighbours of a run of one dimension, else between repetitions of the table
  int64_t march_beside;
  bool skewed;
  FastDiv skew_before, skew_extent;  // input runs from one element of the output's first dimension to the next, and its elements
  int64_t run_step;             // bytes between neighbours in an input run
  int64_t span;                 // bytes that a box spans in the staged input
  uint32_t stage_at;            // in shared memory, after the tables
  int run_length;               // elements of an output run from its first box to its last
  int window;                   // of which a box writes so many
  uint32_t hash;                // of BoxPlan
  BoxDims in, out;              // across runs
  BoxDims run;                  // within output runs
  uint32_t boxes;
  int grid_rank;
  int window_grid;      // the dimension of `grid` that cuts output runs, or -1
  uint32_t halo, lead;  // its elements in front of a window; elements of the run that each of them has
  bool spares;          // some input runs of the halo:
  uint32_t spared_runs, spared_bytes, row_runs;  // so many, the shared memory that they would take, and input runs of a row
  BoxGrid grid[kMaxRank];
  BoxDim dims[2 * kMaxRank];  // last, so that what is used of the arguments is together
};

// What lies at an address in shared memory. (Of a pointer to it the compiler would find the address anew at every use.)
template <typename T>
__device__ __forceinline__ T load_shared(uint32_t address) {
  return *static_cast<const T*>(__cvta_shared_to_generic(address));
}

template <typename Op, BoxPlaces kPlaces>
struct Box {
  using E = typename Op::Element;
  static constexpr int W = sizeof(E), kCount = Chunk<E>::kCount;
  static constexpr int kCountBits = W == 1 ? 4 : W == 2 ? 3 : W == 4 ? 2 : W == 8 ? 1 : 0;
  struct alignas(2 * kCount < 16 ? 2 * kCount : 16) Places {  // of the elements of a chunk
    uint16_t v[kCount];
  };

  const BoxArgs& args;
  const Op& op;
  char* shared;
  BoxRun* in_runs;
  BoxRun* out_runs;
  int64_t* out_beside;      // of output runs
  int64_t* element_beside;  // of elements of a tabled run, from -(kCount - 1) on
  Places* places;           // likewise
  uint16_t* place;          // likewise, of single elements

  __device__ Box(const BoxArgs& args, const Op& op, char* shared)
      : args(args), op(op), shared(shared) {
    in_runs = reinterpret_cast<BoxRun*>(shared);
    out_runs = in_runs + args.in_runs;
    places = reinterpret_cast<Places*>(out_runs + args.out_runs);
    const int entries = kPlaces == BoxPlaces::kTabled ? box_entries(int(args.table.d), kCount) : 0;
    element_beside = reinterpret_cast<int64_t*>(places + entries + entries / kCount);
    out_beside = element_beside + (Op::kBinary && entries > 0 ? entries + kCount : 0);
    place = reinterpret_cast<uint16_t*>(out_beside + (Op::kBinary ? args.out_runs : 0));
  }

  // Neighbouring lanes look up entries kCount apart: one more after each kCount lets them meet different banks.
  static __device__ uint32_t spread(uint32_t entry) { return entry + entry / kCount; }

  // Sums have other work for these instructions.
  static constexpr bool kHashes = kPlaces == BoxPlaces::kTabled && !Op::kBinary;
  __device__ uint32_t hashed(uint32_t address) const {
    return kHashes ? address ^ (address >> args.hash & (kLineBytes - kChunkBytes)) : address;
  }

  // Not unrolled: a kernel's code and arguments are read from memory at every call, which takes longer than these few steps.
  __device__ BoxRun find_run(const BoxDims& dims, uint32_t index, int64_t* beside) const {
    BoxRun run = {0, kChunkBytes - args.spared_bytes, 0};
    int64_t direct = 0;
#pragma unroll 1
    for (int d = dims.at; d < dims.at + dims.rank; ++d) {
      const BoxDim& dim = args.dims[d];
      uint32_t i;
      dim.extent.divmod(index, index, i);
      run.offset += i * dim.stride;
      run.place += i * dim.weight;
      direct += i * dim.beside;
    }
    if (beside) *beside = direct;
    return run;
  }

  // Tables that hold for every box.
  __device__ void make_in_table() const {
    for (uint32_t r = threadIdx.x; r < args.in_runs; r += kBoxThreads) {
      BoxRun run = find_run(args.in, r + args.spared_runs, nullptr);
      if (kPlaces == BoxPlaces::kSwizzled || (kPlaces == BoxPlaces::kTabled && args.skewed)) {
        uint32_t before, i;
        args.skew_before.divmod(r + args.spared_runs, i, before);
        args.skew_extent.divmod(i, before, i);
        if (kPlaces == BoxPlaces::kSwizzled) run.swizzle = i / kCount * kChunkBytes % kLineBytes, run.place += i / kCount * kLineBytes;
        else run.place += i / kCount * kChunkBytes;
      }
      in_runs[r] = run;
    }
  }

  __device__ void make_out_tables() const {
    for (uint32_t c = threadIdx.x; c < args.out_runs; c += kBoxThreads)
      out_runs[c] = find_run(args.out, c, Op::kBinary ? out_beside + c : nullptr);
    if constexpr (kPlaces == BoxPlaces::kTabled) {
      const int entries = box_entries(int(args.table.d), kCount);
      for (int e = threadIdx.x; e < entries + kCount - 1; e += kBoxThreads) {
        const uint32_t element = min(max(e - (kCount - 1), 0), int(args.out_length) - 1);
        uint32_t at = find_run(args.run, element, Op::kBinary ? element_beside + e : nullptr).place - (kChunkBytes - args.spared_bytes);
        if (args.skewed) at += (element - args.skew_extent.div(element) * args.skew_extent.d) / kCount * kChunkBytes;
        place[e] = uint16_t(at);
      }
      __syncthreads();
#pragma unroll 1
      for (int e = threadIdx.x; e < entries; e += kBoxThreads) {
        Places at;
#pragma unroll
        for (int k = 0; k < kCount; ++k) at.v[k] = place[e + k];
        places[spread(e)] = at;
      }
    }
  }

  __device__ BoxBase find_base(uint32_t index) const {
    BoxBase base = args.base;
#pragma unroll 1
    for (int g = 0; g < args.grid_rank; ++g) {
      const BoxGrid& grid = args.grid[g];
      uint32_t i;
      grid.boxes.divmod(index, index, i);
      i *= grid.step;
      int at = int(min(i, grid.last));
      if (g == args.window_grid) {
        base.window = int(i * args.lead);
        at = int(i) - int(args.halo);
        if (!args.spares) at = min(max(at, 0), int(grid.last));
        base.start = at * int(args.lead);
      }
      base.out += at * grid.stride[kOut];
      base.staged += at * grid.stride[kA];
      base.direct += at * grid.stride[kB];
    }
    return base;
  }

  __device__ void load(const BoxBase base) const {
    char* const stage = shared + args.stage_at;
    if (!args.chunked) {
      load_elements(base, stage);
    } else if (!args.staged_extent.holds(base.staged - kChunkBytes, args.span + 2 * kChunkBytes)) {
      load_chunks<false>(base, stage);
    } else {
      load_chunks<true>(base, stage);
    }
  }

  // Threads take chunks. kInside: all those that hold elements of the box lie within the operand.
  template <bool kInside>
  __device__ void load_chunks(const BoxBase& base, char* stage) const {
    const char* const staged = base.staged;
    const uint32_t align = args.align - 1;
    uint32_t first_run = 0, runs = args.in_runs;
    if (args.spares) {  // what lies in front of the output run or after it
      if (base.window == 0) first_run = args.halo * args.row_runs - args.spared_runs;
      const uint32_t rows = args.table.div(args.run_length - base.start);
      runs = min(runs, rows * args.row_runs - args.spared_runs);
    }
    const uint32_t chunks = runs * args.in_chunks.d;
    const uint32_t to = shared_address(stage) + phase_bytes<kLineBytes>(staged);
    const int length = int(args.in_length) * W;
#pragma unroll 4
    for (uint32_t i = first_run * args.in_chunks.d + threadIdx.x; i < chunks; i += kBoxThreads) {
      uint32_t r, j;
      args.in_chunks.divmod(i, r, j);
      const BoxRun run = in_runs[r];
      const char* const begin = staged + run.offset;
      const int first = int(j * kChunkBytes) - int(uint32_t(reinterpret_cast<uintptr_t>(begin)) & align);  // byte of the run
      if (first >= length || first <= -kChunkBytes) continue;
      if (kInside || args.staged_extent.holds(begin + first, kChunkBytes)) {
        cp_async_16(hashed((to + (run.place + first)) ^ run.swizzle), begin + first);
      } else {
        char* const at = stage + (hashed((to + (run.place + first)) ^ run.swizzle) - shared_address(stage));
#pragma unroll 1
        for (int e = max(0, -first); e < min(kChunkBytes, length - first); e += W)
          *reinterpret_cast<E*>(at + e) = *reinterpret_cast<const E*>(begin + first + e);
      }
    }
  }

  __device__ void load_elements(const BoxBase& base, char* stage) const {
    for (uint32_t i = threadIdx.x; i < args.in_runs * args.in_length; i += kBoxThreads) {
      const uint32_t r = i / args.in_length, j = i % args.in_length;
      const BoxRun run = in_runs[r];
      const char* from = base.staged + run.offset + j * args.run_step;
      E value = *reinterpret_cast<const E*>(from);
      if constexpr (Op::kBinary) {
        if (args.partner) value = op(value, *reinterpret_cast<const E*>(from + args.partner));
      }
      *reinterpret_cast<E*>(stage + run.place + j * W) = value;
    }
  }

  // Elements `at`, `at` + 1 ... of the run that begins at `run`. There are places, though no values, a chunk beyond its ends.
  __device__ Chunk<E> gather(uint32_t run, int at) const {
    Chunk<E> chunk;
    if constexpr (kPlaces == BoxPlaces::kStraight && W < 4) {
      const uint32_t from = run + at * W, words = from & ~3u, bits = from % 4 * 8;
      uint32_t w[5], out[4];
#pragma unroll
      for (int k = 0; k < 5; ++k) w[k] = load_shared<uint32_t>(words + 4 * k);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[k] = __funnelshift_r(w[k], w[k + 1], bits);
      chunk = reinterpret_cast<const Chunk<E>&>(out);
    } else if constexpr (kPlaces == BoxPlaces::kTabled) {
      uint32_t period, in_period;
      args.table.divmod(max(at, 0), period, in_period);
      const Places place = places[spread(in_period + min(at, 0) + kCount - 1)];
      const uint32_t from = run + period * args.march;
#pragma unroll
      for (int k = 0; k < kCount; ++k) chunk.v[k] = load_shared<E>(hashed(from + place.v[k]));
    } else {
      // kSwizzled: elements [0, split) belong to a group of `kCount` whose lines are alike, the others to the next one.
      const int group = at >> kCountBits, split = kCount - (at & (kCount - 1));
      const uint32_t from = run + at * args.march + (kPlaces == BoxPlaces::kSwizzled ? group * kLineBytes : 0);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t place = from + k * args.march;
        if (kPlaces != BoxPlaces::kSwizzled) chunk.v[k] = load_shared<E>(place);
        else chunk.v[k] = load_shared<E>(k < split ? place ^ (group * kChunkBytes) % uint32_t(kLineBytes)
                                                   : (place + kLineBytes) ^ ((group + 1) * kChunkBytes) % uint32_t(kLineBytes));
      }
    }
    return chunk;
  }

  // The direct input beside them.
  __device__ Chunk<E> gather_beside(const char* run, int at, int first, int last) const {
    if (args.direct_follows) return load_chunk<E>(run + at * W, W, first, last, args.direct_extent);
    Chunk<E> chunk;
    uint32_t period, in_period;
    args.table.divmod(max(at, 0), period, in_period);
    const uint32_t entry = in_period + min(at, 0) + kCount - 1;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < first || k >= last) continue;
      const int64_t offset = kPlaces == BoxPlaces::kTabled ? period * args.march_beside + element_beside[entry + k]
                                                           : (at + k) * args.march_beside;
      chunk.v[k] = *reinterpret_cast<const E*>(run + offset);
    }
    return chunk;
  }

  // Warps take groups of output runs; where there are few, they share the chunks of each.
  __device__ void store(const BoxBase base) const {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunk_bits = 5 - args.run_bits;
    const int first_chunk = int((warp & ((1 << args.share_bits) - 1)) << chunk_bits | (lane & ((1 << chunk_bits) - 1)));
    const int step = kCount << (chunk_bits + args.share_bits);
    const uint32_t runs_at_once = kBoxWarps >> args.share_bits << args.run_bits;
    // Windows begin and end at sectors, so that both chunks of one are stored at once; but for the run's own ends.
    const int window_end = min(base.window + args.window, args.run_length);
    const uint32_t begin_low = uint32_t(reinterpret_cast<uintptr_t>(base.out)) + base.window * W;
    const uint32_t end_low = uint32_t(reinterpret_cast<uintptr_t>(base.out)) + window_end * W;
    const uint32_t end_mask = window_end < args.run_length ? kSectorBytes - 1 : 0;
    const uint32_t stage = shared_address(shared) + args.stage_at + (args.chunked ? phase_bytes<kLineBytes>(base.staged) : 0);
    uint32_t c = (warp >> args.share_bits << args.run_bits) + (lane >> chunk_bits);
    uint32_t entry = shared_address(out_runs + c);
    for (; c < args.out_runs; c += runs_at_once, entry += runs_at_once * sizeof(BoxRun)) {
      const uint4 run = load_shared<uint4>(entry);
      const int begin = base.window - int((run.x + begin_low) % kSectorBytes / W);
      const int end = window_end - int(((run.x + end_low) & end_mask) / W);
      char* const to = base.out + int64_t(uint64_t(run.y) << 32 | run.x);
      const uint32_t from = stage + run.z;
      for (int i = begin + first_chunk * kCount; i < end; i += step) {
        const int at = i - base.start;  // in the box
        if (i <= -kCount) continue;
        Chunk<E> chunk = gather(from, at);
        const int first = max(0, -i), last = min(kCount, end - i);  // elements before the run's begin and after its end
        if constexpr (Op::kBinary) {
          if (args.has_direct) op.apply(chunk.v, gather_beside(base.direct + out_beside[c], at, first, last).v, args.staged_is_b);
        }
        store_part<0, kChunkBytes, W>(to + i * W, reinterpret_cast<const uint32_t(&)[4]>(chunk), first * W, last * W);
      }
    }
  }

  __device__ void run(BoxBase& base) const {
    if (threadIdx.x == kBoxThreads - 1) base = find_base(blockIdx.x);  // of the last warp: it has the fewest runs to look up
    make_in_table();
    __syncthreads();
    load(base);
    make_out_tables();
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    store(base);
  }
};

template <typename Op, BoxPlaces kPlaces>
__global__ void __launch_bounds__(kBoxThreads, sizeof(typename Op::Element) > 1 && !Op::kBinary ? 6 : 5)
    boxes_kernel(const __grid_constant__ BoxArgs args, const Op op) {
  extern __shared__ __align__(kLineBytes) char box_shared[];  // lines of it hold lines of the input
  __shared__ __align__(8) char base[sizeof(BoxBase)];
  Box<Op, kPlaces>(args, op, box_shared).run(reinterpret_cast<BoxBase&>(base));
}

}  // namespace fusebackend::tile
