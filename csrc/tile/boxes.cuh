// Boxes: the folded tile, for problems with short or odd dimensions. A block carries boxes of several dimensions through shared memory.
// On the way in, a box is a set of runs, each contiguous in the input over as many dimensions as are covered whole; on the way out it is
// a set of other runs, contiguous in the output. Both are walked in aligned 16-byte chunks, whatever the alignment of the runs.
//
// An element's place in shared memory is an affine function of its index, with weights that equal the input's strides modulo a chunk: so
// chunks that are aligned in the input are aligned there too, and one table serves all boxes and all alignments. It holds, for each
// element of an output run, the places of the chunk's worth of elements that begin there, as 16-bit numbers: a chunk costs one look-up.
// Long runs repeat: base(run) + table[i % T] + (i / T) * march.
//
// All boxes have one shape: the last one along a cut dimension overlaps the one before it, and both write the same there. Blocks stay and
// take box after box: the tables are made once, and the next box is on its way while one is written.
#pragma once

#include "batch.cuh"
#include "chunks.cuh"
#include "cuda_plan.h"
#include "ops.cuh"

namespace fusebackend::tile {

constexpr int kBoxThreads = 256;
constexpr int kBoxBlocks = 5;  // a multiprocessor, at most

// A dimension of a run or across runs. `stride` is the input's (kA) or the output's, `beside` the direct input's, in bytes.
struct BoxDim {
  FastDiv extent;
  uint32_t weight;
  bool skewed;
  int64_t stride, beside;

  template <int kCount>
  __device__ uint32_t place(uint32_t i) const {
    return i * weight + (skewed ? i / kCount * kChunkBytes : 0);
  }
};

struct BoxDims {
  int rank = 0;
  BoxDim dim[kMaxRank];
};

// A run's first element: from the box's in global memory, and in shared memory.
struct alignas(16) BoxRun {
  int64_t offset;
  uint32_t place, unused;
};

// A box's first element in each operand.
struct BoxBase {
  char* out;
  const char* staged;
  const char* direct;
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
  FastDiv in_chunks, out_chunks;  // of a run, at the worst alignment
  FastDiv table;
  uint32_t march;               // between repetitions of the table
  int64_t march_beside;
  int64_t run_step;             // bytes between neighbours in an input run
  int64_t span;                 // bytes that a box spans in the staged input
  uint32_t stage_bytes;
  BoxDims in, out;              // across runs
  BoxDims run;                  // within output runs
  // The dimensions that have more than one box.
  uint32_t boxes;
  int grid_rank;
  FastDiv grid_count[kMaxRank];
  uint32_t grid_step[kMaxRank], grid_last[kMaxRank];  // elements from box to box, and to the last one
  int64_t grid_stride[3][kMaxRank];                   // by Role: kA is staged (and its partner), kB direct
};

// Bytes [first, last) of a chunk, in the widest pieces that lie within.
template <int kAt, int kWidth, int kSmallest>
__device__ __forceinline__ void store_part(char* to, const uint32_t (&words)[4], int first, int last) {
  if (first <= kAt && kAt + kWidth <= last) {
    if constexpr (kWidth == 16) *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (kWidth == 8) *reinterpret_cast<uint2*>(to + kAt) = make_uint2(words[kAt / 4], words[kAt / 4 + 1]);
    if constexpr (kWidth == 4) *reinterpret_cast<uint32_t*>(to + kAt) = words[kAt / 4];
    if constexpr (kWidth == 2) *reinterpret_cast<uint16_t*>(to + kAt) = uint16_t(words[kAt / 4] >> kAt % 4 * 8);
    if constexpr (kWidth == 1) *reinterpret_cast<uint8_t*>(to + kAt) = uint8_t(words[kAt / 4] >> kAt % 4 * 8);
  } else if constexpr (kWidth > kSmallest) {
    if (first < kAt + kWidth / 2 && kAt < last) store_part<kAt, kWidth / 2, kSmallest>(to, words, first, last);
    if (first < kAt + kWidth && kAt + kWidth / 2 < last) store_part<kAt + kWidth / 2, kWidth / 2, kSmallest>(to, words, first, last);
  }
}

// kRagged: output runs may begin or end within a chunk. kStraight: within output runs, elements are neighbours in shared memory too.
template <typename Op, bool kRagged, bool kStraight>
struct Box {
  using E = typename Op::Element;
  static constexpr int W = sizeof(E), kCount = Chunk<E>::kCount;
  struct alignas(2 * kCount) Places {  // of the elements of a chunk
    uint16_t v[kCount];
  };

  const BoxArgs& args;
  const Op& op;
  char* stages;
  BoxRun* in_runs;
  BoxRun* out_runs;
  int64_t* out_beside;      // of output runs
  int64_t* element_beside;  // of elements of a run, from -(kCount - 1) on
  Places* places;           // likewise
  uint16_t* place;          // likewise

  __device__ Box(const BoxArgs& args, const Op& op, char* shared) : args(args), op(op), stages(shared) {
    in_runs = reinterpret_cast<BoxRun*>(shared + kBoxStages * args.stage_bytes);
    out_runs = in_runs + args.in_runs;
    places = reinterpret_cast<Places*>(out_runs + args.out_runs);
    const uint32_t entries = args.table.d + 2 * kCount;
    element_beside = reinterpret_cast<int64_t*>(places + entries);
    out_beside = element_beside + (Op::kBinary ? entries : 0);
    place = reinterpret_cast<uint16_t*>(out_beside + (Op::kBinary ? args.out_runs : 0));
  }

  static __device__ BoxRun find_run(const BoxDims& dims, uint32_t index, int64_t* beside) {
    BoxRun run = {0, kChunkBytes, 0};
    int64_t direct = 0;
    for (int d = 0; d < dims.rank; ++d) {
      uint32_t i;
      dims.dim[d].extent.divmod(index, index, i);
      run.offset += i * dims.dim[d].stride;
      run.place += dims.dim[d].template place<kCount>(i);
      direct += i * dims.dim[d].beside;
    }
    if (beside) *beside = direct;
    return run;
  }

  // Tables that hold for every box.
  __device__ void make_tables() const {
    for (uint32_t r = threadIdx.x; r < args.in_runs; r += kBoxThreads) in_runs[r] = find_run(args.in, r, nullptr);
    for (uint32_t c = threadIdx.x; c < args.out_runs; c += kBoxThreads) {
      out_runs[c] = find_run(args.out, c, Op::kBinary ? out_beside + c : nullptr);
      out_runs[c].place -= kChunkBytes;  // counted in the table
    }
    const int entries = int(args.table.d) + 2 * kCount;
    for (int e = threadIdx.x; e < entries; e += kBoxThreads) {
      uint32_t rest = min(max(e - (kCount - 1), 0), int(args.out_length) - 1), at = kChunkBytes;
      int64_t beside = 0;
      for (int d = 0; d < args.run.rank; ++d) {
        uint32_t i = rest;
        if (d + 1 < args.run.rank) args.run.dim[d].extent.divmod(rest, rest, i);
        at += args.run.dim[d].template place<kCount>(i);
        beside += i * args.run.dim[d].beside;
      }
      place[e] = uint16_t(at);
      if (Op::kBinary) element_beside[e] = beside;
    }
    __syncthreads();
    if (!kStraight)
      for (int e = threadIdx.x; e < entries - kCount + 1; e += kBoxThreads)
        for (int k = 0; k < kCount; ++k) places[e].v[k] = place[e + k];
  }

  __device__ BoxBase find_base(uint32_t index) const {
    BoxBase base = args.base;
    for (int g = 0; g < args.grid_rank; ++g) {
      uint32_t i;
      args.grid_count[g].divmod(index, index, i);
      i = min(i * args.grid_step[g], args.grid_last[g]);
      base.out += i * args.grid_stride[kOut][g];
      base.staged += i * args.grid_stride[kA][g];
      base.direct += i * args.grid_stride[kB][g];
    }
    return base;
  }

  __device__ void load(const BoxBase& base, char* stage) const {
    if (!args.chunked) return load_elements(base, stage);
    const bool inside = args.staged_extent.holds(base.staged - kChunkBytes, args.span + 2 * kChunkBytes);
    const uint32_t shift = phase_bytes(base.staged);
    const int length = int(args.in_length) * W;
    for (uint32_t i = threadIdx.x; i < args.in_runs * args.in_chunks.d; i += kBoxThreads) {
      uint32_t r, j;
      args.in_chunks.divmod(i, r, j);
      const BoxRun run = in_runs[r];
      const uint32_t at = run.place + shift;
      const int first = int(j * kChunkBytes) - int(at % kChunkBytes);  // byte of the run
      if (first >= length) continue;
      const char* from = base.staged + run.offset + first;
      char* to = stage + at + first;
      if (inside || args.staged_extent.holds(from, kChunkBytes)) {
        cp_async_16(to, from);
      } else {
#pragma unroll 1
        for (int e = max(0, -first); e < min(kChunkBytes, length - first); e += W)
          *reinterpret_cast<E*>(to + e) = *reinterpret_cast<const E*>(from + e);
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

  // Elements of a run from `begin` on, which lie at `from` + the table's places.
  __device__ Chunk<E> gather(const char* from, uint32_t in_period, int begin, uint32_t limit) const {
    Chunk<E> chunk;
    if constexpr (kStraight && W < 4) {
      const uint32_t at = uint32_t(reinterpret_cast<uintptr_t>(from + begin * W));
      const uint32_t* words = reinterpret_cast<const uint32_t*>(from + begin * W - at % 4);
      uint32_t w[5];
#pragma unroll
      for (int k = 0; k < 5; ++k) w[k] = words[k];
      uint32_t out[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) out[k] = __funnelshift_r(w[k], w[k + 1], at % 4 * 8);
      chunk = reinterpret_cast<const Chunk<E>&>(out);
    } else if constexpr (kStraight) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) chunk.v[k] = reinterpret_cast<const E*>(from + begin * W)[k];
    } else {
      const Places at = places[in_period];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t place = kRagged ? min(uint32_t(at.v[k]), limit) : at.v[k];
        chunk.v[k] = *reinterpret_cast<const E*>(from + place);
      }
    }
    return chunk;
  }

  __device__ void store(const BoxBase& base, const char* stage) const {
    const uint32_t shift = args.chunked ? phase_bytes(base.staged) : 0;
    for (uint32_t i = threadIdx.x; i < args.out_runs * args.out_chunks.d; i += kBoxThreads) {
      uint32_t c, j;
      args.out_chunks.divmod(i, c, j);
      const BoxRun run = out_runs[c];
      char* to = base.out + run.offset;
      int begin = int(j * kCount);  // of the chunk's first element in the run
      if (kRagged) {
        begin -= int(phase_bytes(to)) / W;
        if (begin >= int(args.out_length)) continue;
      }
      const uint32_t start = kRagged ? max(begin, 0) : begin;
      uint32_t period = 0, in_period = 0;
      if (!kStraight) args.table.divmod(start, period, in_period);
      const uint32_t from = run.place + shift + period * args.march;
      in_period += begin - int(start) + kCount - 1;
      // Elements beyond the run's end have a place too, but it may lie beyond the stage.
      const uint32_t limit = args.stage_bytes - W - from;
      Chunk<E> chunk = gather(stage + from + (kStraight ? kChunkBytes : 0), in_period, begin, limit);
      const int first = kRagged ? int(start) - begin : 0, last = kRagged ? min(kCount, int(args.out_length) - begin) : kCount;
      if constexpr (Op::kBinary) {
        if (args.has_direct) {
          const char* run_beside = base.direct + out_beside[c];
          Chunk<E> beside;
          if (args.direct_follows) {
            beside = load_chunk<E>(run_beside + begin * W, W, first, last, args.direct_extent);
          } else {
            uint32_t beside_period = start, at = 0;
            args.table.divmod(start, beside_period, at);
            at += begin - int(start) + kCount - 1;
#pragma unroll
            for (int k = 0; k < kCount; ++k)
              if (k >= first && k < last)
                beside.v[k] = *reinterpret_cast<const E*>(run_beside + beside_period * args.march_beside + element_beside[at + k]);
          }
          op.apply(chunk.v, beside.v, args.staged_is_b);
        }
      }
      const uint32_t(&words)[4] = reinterpret_cast<const uint32_t(&)[4]>(chunk);
      to += begin * W;
      if (kRagged) store_part<0, kChunkBytes, W>(to, words, first * W, last * W);
      else store_aligned(to, chunk);
    }
  }

  __device__ void run() const {
    make_tables();
    uint32_t box = blockIdx.x;
    BoxBase base = find_base(box);
    __syncthreads();
    load(base, stages);
    cp_async_commit();
    for (int stage = 0;; stage ^= 1) {
      const uint32_t next = box + gridDim.x;
      const BoxBase next_base = next < args.boxes ? find_base(next) : base;
      if (next < args.boxes) load(next_base, stages + (stage ^ 1) * args.stage_bytes);
      cp_async_commit();
      cp_async_wait<1>();
      __syncthreads();
      store(base, stages + stage * args.stage_bytes);
      if (next >= args.boxes) break;
      __syncthreads();
      box = next;
      base = next_base;
    }
  }
};

template <typename Op, bool kRagged, bool kStraight>
__global__ void __launch_bounds__(kBoxThreads, kBoxBlocks) boxes_kernel(const __grid_constant__ BoxArgs args, const Op op) {
  extern __shared__ __align__(16) char shared[];
  Box<Op, kRagged, kStraight>(args, op, shared).run();
}

template <typename Op>
cudaError_t launch_boxes(const Plan& plan, const BoxPlan& box, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes, count = kChunkBytes / w;
  const int staged = plan.staged, direct = staged == kA ? kB : kA;
  const bool has_direct = p.operands == 3 && !plan.staged_pair;
  BoxArgs args;
  args.base = {p.data[kOut], p.data[staged], has_direct ? p.data[direct] : nullptr};
  args.partner = plan.staged_pair ? p.data[direct] - p.data[staged] : 0;
  args.has_direct = has_direct;
  args.staged_extent = {p.data[staged], p.data[staged] + extent_bytes(p, Role(staged))};
  args.direct_extent = {args.base.direct, args.base.direct + (has_direct ? extent_bytes(p, Role(direct)) : 0)};
  args.staged_is_b = staged == kB;
  args.direct_follows = has_direct && box.direct_follows;
  args.in_length = uint32_t(box.in_length);
  args.in_runs = uint32_t(box.in_runs);
  args.out_length = uint32_t(box.out_length);
  args.out_runs = uint32_t(box.out_runs);
  args.table = FastDiv(uint32_t(box.table));
  args.stage_bytes = uint32_t(box.stage_bytes);
  const auto stride = [&](int role, int d) {
    const int source = role == kOut ? int(kOut) : role == kA ? staged : direct;
    return source < p.operands ? p.strides[source][d] * w : 0;
  };
  args.run_step = stride(kA, box.dims[0]);
  args.chunked = args.run_step == w && !plan.staged_pair;

  int index_in_box[kMaxRank];
  std::fill_n(index_in_box, kMaxRank, -1);
  uintptr_t in_ends = reinterpret_cast<uintptr_t>(p.data[staged]);  // low bits that all input runs' begins and ends have in common
  uintptr_t out_ends = reinterpret_cast<uintptr_t>(p.data[kOut]);
  args.span = w;
  const auto describe = [&](int k, int role) {
    const int d = box.dims[k];
    return BoxDim{FastDiv(uint32_t(box.extent[d])), uint32_t(box.weight[k]), box.skewed && d == 0, stride(role, d), stride(kB, d)};
  };
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k];
    index_in_box[d] = k;
    args.span += (box.extent[d] - 1) * stride(kA, d);
    if (k >= box.in_rank && stride(kA, d)) {
      args.in.dim[args.in.rank++] = describe(k, kA);
      in_ends |= stride(kA, d);
    }
  }
  for (int d = 0; d < p.rank; ++d) {
    const int k = index_in_box[d];
    if (k < 0) continue;
    if (args.run.rank < box.out_rank) {
      args.run.dim[args.run.rank++] = describe(k, kOut);
    } else {
      args.out.dim[args.out.rank++] = describe(k, kOut);
      out_ends |= stride(kOut, d);
    }
  }
  const BoxDim& marched = args.run.dim[args.run.rank - 1];
  const uint32_t steps = args.run.rank == 1 ? uint32_t(box.table) : 1;
  args.march = steps * marched.weight + (marched.skewed ? steps / count * kChunkBytes : 0);
  args.march_beside = steps * marched.beside;

  args.boxes = uint32_t(box.count);
  args.grid_rank = 0;
  for (int d = 0; d < p.rank; ++d) {
    const int64_t boxes = (p.sizes[d] + box.extent[d] - 1) / box.extent[d], last = p.sizes[d] - box.extent[d];
    if (boxes == 1) continue;
    const int g = args.grid_rank++;
    args.grid_count[g] = FastDiv(uint32_t(boxes));
    args.grid_step[g] = uint32_t(box.extent[d]);
    args.grid_last[g] = uint32_t(last);
    for (int r = 0; r < 3; ++r) args.grid_stride[r][g] = stride(r, d);
    in_ends |= stride(kA, d) * box.extent[d] | stride(kA, d) * last;
    out_ends |= stride(kOut, d) * box.extent[d] | stride(kOut, d) * last;
  }
  in_ends |= args.in_length * w;
  out_ends |= args.out_length * w;
  const bool ragged = out_ends % kChunkBytes, shifted = in_ends % kChunkBytes;
  args.in_chunks = FastDiv(uint32_t((box.in_length + (shifted ? 2 * count - 2 : count - 1)) / count));
  args.out_chunks = FastDiv(uint32_t((box.out_length + (ragged ? 2 * count - 2 : count - 1)) / count));
  const bool straight = args.run.rank == 1 && marched.weight == w && !marched.skewed;

  int device, shared_a_multiprocessor, multiprocessors;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&shared_a_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return error;
  const int64_t resident = int64_t(std::clamp(shared_a_multiprocessor / (box.shared_bytes + 1024), 1, kBoxBlocks)) * multiprocessors;
  const int64_t rounds = (box.count + resident - 1) / resident;
  const unsigned blocks = unsigned((box.count + rounds - 1) / rounds);  // each takes as many boxes
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, kBoxThreads, box.shared_bytes, stream>>>(args, op);
    return cudaGetLastError();
  };
  if (ragged) return straight ? launch(boxes_kernel<Op, true, true>) : launch(boxes_kernel<Op, true, false>);
  return straight ? launch(boxes_kernel<Op, false, true>) : launch(boxes_kernel<Op, false, false>);
}

}  // namespace fusebackend::tile
