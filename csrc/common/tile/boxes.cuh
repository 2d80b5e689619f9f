// Boxes: blocks of several dimensions, for problems with short or odd dimensions. A block reads a box from the staged input into shared
// memory and writes it to the output. On the way in, a box is a set of input runs, each contiguous in the input over all dimensions that the
// box covers whole; on the way out it is a set of other runs, contiguous in the output. Both are walked in aligned 16-byte chunks, whatever
// the alignment of the runs.
//
// An element's offset in shared memory is an affine function of its index. Its coefficients equal the input's strides modulo a chunk, or
// modulo a line where runs are long: so chunks that are aligned in the input are aligned there too, for all boxes and all alignments.
// Neighbours of an output run of one dimension are at equal distances there. In a run of several dimensions, the distances repeat: element i
// is at base(run) + table[i % T] + (i / T) * shared_step, where T is the length of the dimensions before the last. The table holds, for
// each i, the offsets of the chunk's worth of elements that begin there.
//
// Lanes of a warp, a chunk's worth of elements apart, could meet few banks. Then, if output runs are of one dimension, chunks are permuted
// within their lines, in the same way for each group of a chunk's worth of input runs (such groups are a line further apart, so that they
// share no line); else input runs are a chunk further apart after each chunk's worth.
//
// All boxes have one shape: the last one along a cut dimension overlaps the one before it, and both write the same values there. Only
// output runs are cut without overlap, into windows that begin and end at aligned sectors: a sector that two blocks write in part costs
// several times its bytes. For that, a box has a few more elements in front of its window (BoxPlan::halo). These are whole indices of the
// last dimension; input runs of them that hold no element to be stored are neither read nor given a place in shared memory. Then the last
// box reaches beyond the end, and does not overlap the one before it.
#pragma once

#include "common/tile/box_args.cuh"
#include "common/tile/elements.cuh"

namespace fusebackend::tile {

// Loads from an address in shared memory. (Through a pointer, the compiler would compute the address anew at every use.)
template <typename T>
__device__ __forceinline__ T load_shared(uint32_t address) {
  return *static_cast<const T*>(__cvta_shared_to_generic(address));
}

template <typename Op, RunLayout kLayout>
struct Box {
  using E = typename Op::Element;
  static constexpr int W = sizeof(E), kCount = Chunk<E>::kCount;
  static constexpr int kCountLog2 = W == 1 ? 4 : W == 2 ? 3 : W == 4 ? 2 : W == 8 ? 1 : 0;
  struct alignas(2 * kCount < 16 ? 2 * kCount : 16) Offsets {  // in shared memory, of the elements of a chunk
    uint16_t v[kCount];
  };

  const BoxArgs& args;
  const Op& op;
  char* shared;
  // The lookup tables, in shared memory. Those of elements begin with element -(kCount - 1) of a run.
  BoxRun* in_runs;
  BoxRun* out_runs;
  int64_t* run_direct;       // by output run: its offset in the direct input
  int64_t* element_direct;   // by element: its offset there, from the run's
  Offsets* chunk_offsets;    // by first element of a chunk
  uint16_t* element_offset;  // by element

  __device__ Box(const BoxArgs& args, const Op& op, char* shared) : args(args), op(op), shared(shared) {
    in_runs = reinterpret_cast<BoxRun*>(shared);
    out_runs = in_runs + args.in_runs;
    chunk_offsets = reinterpret_cast<Offsets*>(out_runs + args.out_runs);
    const int entries = kLayout == RunLayout::kTabulated ? box_table_entries(int(args.period.d), kCount) : 0;
    element_direct = reinterpret_cast<int64_t*>(chunk_offsets + entries + entries / kCount);
    run_direct = element_direct + (Op::kIsSum && entries > 0 ? entries + kCount : 0);
    element_offset = reinterpret_cast<uint16_t*>(run_direct + (Op::kIsSum ? args.out_runs : 0));
  }

  // Neighbouring lanes look up entries of `chunk_offsets` that are kCount apart: a gap after each kCount lets them meet different banks.
  static __device__ uint32_t spread(uint32_t entry) { return entry + entry / kCount; }

  // Sums do not hash: they have no instructions to spare.
  static constexpr bool kHashes = kLayout == RunLayout::kTabulated && !Op::kIsSum;
  __device__ uint32_t hashed(uint32_t address) const {
    return kHashes ? address ^ (address >> args.hash_shift & (kLineBytes - kChunkBytes)) : address;
  }

  // The offsets of element `index` of `dims`, in shared memory after the chunk in front of a box; and, unless `direct_offset` is null, in the
  // direct input. Not unrolled, for the reason that Batch::advance gives.
  __device__ BoxRun find_run(const BoxDims& dims, uint32_t index, int64_t* direct_offset) const {
    BoxRun run = {0, kChunkBytes - args.unread_bytes, 0};
    int64_t direct = 0;
#pragma unroll 1
    for (int d = dims.at; d < dims.at + dims.rank; ++d) {
      const BoxDim& dim = args.dims[d];
      uint32_t i;
      dim.extent.divmod(index, index, i);
      run.offset += i * dim.stride;
      run.shared_offset += i * dim.shared_stride;
      direct += i * dim.direct_stride;
    }
    if (direct_offset) *direct_offset = direct;
    return run;
  }

  __device__ void make_in_table() const {
    for (uint32_t r = threadIdx.x; r < args.in_runs; r += kBoxThreads) {
      BoxRun run = find_run(args.in, r + args.unread_runs, nullptr);
      if (kLayout == RunLayout::kSwizzled || (kLayout == RunLayout::kTabulated && args.skewed)) {
        uint32_t before, i;
        args.skew_before.divmod(r + args.unread_runs, i, before);
        args.skew_extent.divmod(i, before, i);
        if (kLayout == RunLayout::kSwizzled) run.swizzle = i / kCount * kChunkBytes % kLineBytes, run.shared_offset += i / kCount * kLineBytes;
        else run.shared_offset += i / kCount * kChunkBytes;
      }
      in_runs[r] = run;
    }
  }

  __device__ void make_out_tables() const {
    for (uint32_t c = threadIdx.x; c < args.out_runs; c += kBoxThreads)
      out_runs[c] = find_run(args.out, c, Op::kIsSum ? run_direct + c : nullptr);
    if constexpr (kLayout == RunLayout::kTabulated) {
      const int entries = box_table_entries(int(args.period.d), kCount);
      for (int e = threadIdx.x; e < entries + kCount - 1; e += kBoxThreads) {
        const uint32_t element = min(max(e - (kCount - 1), 0), int(args.out_length) - 1);
        const BoxRun found = find_run(args.run, element, Op::kIsSum ? element_direct + e : nullptr);
        uint32_t offset = found.shared_offset - (kChunkBytes - args.unread_bytes);
        if (args.skewed) offset += (element - args.skew_extent.div(element) * args.skew_extent.d) / kCount * kChunkBytes;
        element_offset[e] = uint16_t(offset);
      }
      __syncthreads();
#pragma unroll 1
      for (int e = threadIdx.x; e < entries; e += kBoxThreads) {
        Offsets offsets;
#pragma unroll
        for (int k = 0; k < kCount; ++k) offsets.v[k] = element_offset[e + k];
        chunk_offsets[spread(e)] = offsets;
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
        base.window = int(i * args.inner_length);
        at = int(i) - int(args.halo);
        if (!args.has_unread) at = min(max(at, 0), int(grid.last));
        base.start = at * int(args.inner_length);
      }
      base.out += at * grid.out_stride;
      base.staged += at * grid.staged_stride;
      base.direct += at * grid.direct_stride;
    }
    return base;
  }

  __device__ void load(const BoxBase base) const {
    char* const stage = shared + args.stage_offset;
    if (!args.chunked) {
      load_elements(base, stage);
    } else if (!args.staged_extent.holds(base.staged - kChunkBytes, args.span + 2 * kChunkBytes)) {
      load_chunks<false>(base, stage);
    } else {
      load_chunks<true>(base, stage);
    }
  }

  // Each thread copies aligned chunks. kInside: all chunks that hold elements of the box lie within the operand.
  template <bool kInside>
  __device__ void load_chunks(const BoxBase& base, char* stage) const {
    const char* const staged = base.staged;
    const uint32_t align = args.align - 1;
    uint32_t first_run = 0, runs = args.in_runs;
    if (args.has_unread) {  // skip what lies in front of the output run, and beyond its end
      if (base.window == 0) first_run = args.halo * args.runs_per_index - args.unread_runs;
      const uint32_t indices = args.period.div(args.run_length - base.start);
      runs = min(runs, indices * args.runs_per_index - args.unread_runs);
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
        cp_async_16(hashed((to + (run.shared_offset + first)) ^ run.swizzle), begin + first);
      } else {
        char* const at = stage + (hashed((to + (run.shared_offset + first)) ^ run.swizzle) - shared_address(stage));
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
      if constexpr (Op::kIsSum) {
        if (args.partner) value = op(value, *reinterpret_cast<const E*>(from + args.partner));
      }
      *reinterpret_cast<E*>(stage + run.shared_offset + j * W) = value;
    }
  }

  // Elements `at`, `at` + 1 ... of the output run that begins at shared-memory address `run`. Up to a chunk beyond the run's ends may be
  // read; its values are not used.
  __device__ Chunk<E> gather(uint32_t run, int at) const {
    Chunk<E> chunk;
    if constexpr (kLayout == RunLayout::kContiguous && W < 4) {
      const uint32_t from = run + at * W, words = from & ~3u, bits = from % 4 * 8;
      uint32_t w[5], out[4];
#pragma unroll
      for (int k = 0; k < 5; ++k) w[k] = load_shared<uint32_t>(words + 4 * k);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[k] = __funnelshift_r(w[k], w[k + 1], bits);
      chunk = reinterpret_cast<const Chunk<E>&>(out);
    } else if constexpr (kLayout == RunLayout::kTabulated) {
      uint32_t period, in_period;
      args.period.divmod(max(at, 0), period, in_period);
      const Offsets offsets = chunk_offsets[spread(in_period + min(at, 0) + kCount - 1)];
      const uint32_t from = run + period * args.shared_step;
#pragma unroll
      for (int k = 0; k < kCount; ++k) chunk.v[k] = load_shared<E>(hashed(from + offsets.v[k]));
    } else if constexpr (kLayout == RunLayout::kSwizzled) {
      // Elements [0, split) belong to a group of kCount whose lines are permuted alike, the others to the next one, a line further on.
      const int group = at >> kCountLog2, split = kCount - (at & (kCount - 1));
      const uint32_t from = run + at * args.shared_step + group * kLineBytes;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t address = from + k * args.shared_step;
        chunk.v[k] = load_shared<E>(k < split ? address ^ (group * kChunkBytes) % uint32_t(kLineBytes)
                                              : (address + kLineBytes) ^ ((group + 1) * kChunkBytes) % uint32_t(kLineBytes));
      }
    } else {
      const uint32_t from = run + at * args.shared_step;
#pragma unroll
      for (int k = 0; k < kCount; ++k) chunk.v[k] = load_shared<E>(from + k * args.shared_step);
    }
    return chunk;
  }

  // The direct input's elements for the same chunk of the output, of which [first, last) are needed.
  __device__ Chunk<E> load_direct(const char* run, int at, int first, int last) const {
    if (args.direct_is_contiguous) return load_chunk<E>(run + at * W, W, first, last, args.direct_extent);
    Chunk<E> chunk;
    uint32_t period, in_period;
    args.period.divmod(max(at, 0), period, in_period);
    const uint32_t entry = in_period + min(at, 0) + kCount - 1;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < first || k >= last) continue;
      const int64_t offset =
          kLayout == RunLayout::kTabulated ? period * args.direct_step + element_direct[entry + k] : (at + k) * args.direct_step;
      chunk.v[k] = *reinterpret_cast<const E*>(run + offset);
    }
    return chunk;
  }

  // Each warp stores a group of output runs at a time; where there are few, several warps share the chunks of each.
  __device__ void store(const BoxBase base) const {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_chunks_log2 = 5 - args.warp_runs_log2;
    const int first_chunk = int((warp & ((1 << args.warps_per_run_log2) - 1)) << warp_chunks_log2 | (lane & ((1 << warp_chunks_log2) - 1)));
    const int step = kCount << (warp_chunks_log2 + args.warps_per_run_log2);
    const uint32_t runs_at_once = kBoxWarps >> args.warps_per_run_log2 << args.warp_runs_log2;
    // Windows begin and end at sectors, so that both chunks of one are stored by one warp; except at the run's own ends.
    const int window_end = min(base.window + args.window, args.run_length);
    const uint32_t begin_low = uint32_t(reinterpret_cast<uintptr_t>(base.out)) + uint32_t(base.window) * W;
    const uint32_t end_low = uint32_t(reinterpret_cast<uintptr_t>(base.out)) + uint32_t(window_end) * W;
    const uint32_t end_mask = window_end < args.run_length ? kSectorBytes - 1 : 0;
    const uint32_t stage = shared_address(shared) + args.stage_offset + (args.chunked ? phase_bytes<kLineBytes>(base.staged) : 0);
    uint32_t c = (warp >> args.warps_per_run_log2 << args.warp_runs_log2) + (lane >> warp_chunks_log2);
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
        if constexpr (Op::kIsSum) {
          if (args.has_direct) op.apply(chunk.v, load_direct(base.direct + run_direct[c], at, first, last).v, args.staged_is_y);
        }
        store_part<0, kChunkBytes, W>(to + int64_t(i) * W, reinterpret_cast<const uint32_t(&)[4]>(chunk), first * W, last * W);
      }
    }
  }

  __device__ void run(BoxBase& base) const {
    if (threadIdx.x == kBoxThreads - 1) base = find_base(blockIdx.x);  // in the last warp, which has the fewest runs to look up
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

template <typename Op, RunLayout kLayout>
__global__ void __launch_bounds__(kBoxThreads, sizeof(typename Op::Element) > 1 && !Op::kIsSum ? 6 : 5)
    move_boxes_kernel(const __grid_constant__ BoxArgs args, const Op op) {
  extern __shared__ __align__(kLineBytes) char box_shared[];
  __shared__ __align__(8) char base[sizeof(BoxBase)];
  Box<Op, kLayout>(args, op, box_shared).run(reinterpret_cast<BoxBase&>(base));
}

}  // namespace fusebackend::tile
