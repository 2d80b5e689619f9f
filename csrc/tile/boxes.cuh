// Boxes: the folded tile, for problems with short dimensions. A block carries a box of several dimensions through shared memory. On the
// way in, the box is a set of runs, each contiguous in the input over as many dimensions as are covered whole; on the way out it is a
// set of other runs, contiguous in the output. Both are walked in 16-byte chunks at any alignment: a run is read from the aligned
// chunk that holds its first element and keeps that shift in shared memory; the ends of an output run are written by elements.
//
// Along an output run, elements lie in shared memory as base(run) + table[i % T] + (i / T) * step: the run's leading short dimensions
// are in the table (T < 64 elements), the next one is marched along. So a chunk costs one division, an element one look-up, or none
// where T is 1. That it is a sum needs input runs at equal distances; where their alignments differ, each one's place is looked up.
// So it is where the march is from input run to input run, which lets their distances avoid bank conflicts.
#pragma once

#include "batch.cuh"
#include "chunks.cuh"
#include "cuda_plan.h"
#include "ops.cuh"

namespace fusebackend::tile {

constexpr int kBoxThreads = 256;

// How the place of element i of an output run is found.
enum class Places {
  kMarched,      // T is 1: base + i * step
  kMarchedRuns,  // T is 1 and element i lies in input run i: base + the place of that run
  kTabled,       // base + table[i % T] + i / T * step
  kSwizzled,     // the same, with chunks exchanged, where a warp would meet few banks
  kPerRun,       // the same sum gives the input run and the place in it; the run's own place is looked up
};

// A box's extents and what follows from them. Boxes at the end of a cut dimension are smaller.
struct BoxShape {
  uint32_t in_length, in_runs, out_length, out_runs, pitch, march_weight;
  FastDiv in_chunks, out_chunks;  // of a run, at the worst alignment
  FastDiv table;
  uint32_t weight[kMaxRank];  // of a step along a dimension in shared memory: bytes, and for kPerRun 65536 times runs
  FastDiv extent[kMaxRank];
};

struct BoxDim {
  uint32_t extent, size;
  bool in_out_run;
  int64_t stride[3];  // by Role, bytes; kA is staged (and its partner), kB direct
};

struct BoxArgs {
  char* out;
  const char* staged;
  const char* partner;  // the second input of a staged pair, or null
  const char* direct;   // read in output order, or null
  Extent staged_extent, direct_extent;
  bool staged_is_b;
  bool chunked;         // input runs are read in chunks: their elements are neighbours, and there is no partner
  bool ragged;          // output runs may begin or end within a chunk
  bool direct_follows;  // the direct input lies as the output does within output runs
  Places places;
  int rank, in_rank, out_rank;  // dimensions of the box, of an input run, of an output run
  int64_t run_step;             // bytes between neighbours in an input run
  BoxDim dim[kMaxRank];         // in the input's order, fastest first
  int out_order[kMaxRank];      // indices of `dim` in the output's order
  BoxShape whole;               // of a box that is not at an end
  // The dimensions outside the box, and those in it that are cut.
  int grid_rank;
  FastDiv grid_count[kMaxRank];
  int64_t grid_stride[3][kMaxRank];
  int grid_dim[kMaxRank];  // index of `dim`, or -1
  int64_t span;            // bytes that a whole box spans in the staged input
  int tables_at;           // in shared memory, after the elements
};

__host__ __device__ inline void shape_box(const BoxArgs& args, const uint32_t* extent, int element_bytes, BoxShape& s) {
  const uint32_t count = kChunkBytes / element_bytes;
  s.in_length = s.in_runs = s.out_length = s.out_runs = 1;
  for (int k = 0; k < args.in_rank; ++k) {
    s.weight[k] = s.in_length * element_bytes;
    s.in_length *= extent[k];
  }
  // Room for any shift.
  s.pitch = ((s.in_length * element_bytes + 2 * kChunkBytes - 2) / kChunkBytes | 1) * kChunkBytes;
  for (int k = args.in_rank; k < args.rank; ++k) {
    s.weight[k] = s.in_runs * (args.places == Places::kPerRun ? 65536 : s.pitch);
    s.in_runs *= extent[k];
  }
  uint32_t table = 1;
  for (int k = 0; k < args.rank; ++k) {
    const int d = args.out_order[k];
    if (k + 1 < args.out_rank) table *= extent[d];
    if (k + 1 == args.out_rank) s.march_weight = s.weight[d];
    (k < args.out_rank ? s.out_length : s.out_runs) *= extent[d];
    s.extent[d] = FastDiv(extent[d]);
  }
  s.table = FastDiv(table);
  s.in_chunks = FastDiv((s.in_length + 2 * count - 2) / count);
  s.out_chunks = FastDiv((s.out_length + 2 * count - 2) / count);
}

template <typename Op>
struct Box {
  using E = typename Op::Element;
  static constexpr int W = sizeof(E), kCount = Chunk<E>::kCount;
  static constexpr int kTableCapacity = kMaxBoxTable + kCount;

  const BoxArgs& args;
  const Op& op;
  const BoxShape& shape;  // in shared memory
  char* out;
  const char* staged;
  const char* direct;
  char* elements;
  uint32_t* element_place;  // tables
  uint32_t* run_place;
  uint32_t* out_place;
  int64_t* element_beside;
  int64_t* in_offset;
  int64_t* out_offset;
  int64_t* direct_offset;

  __device__ void lay_out_tables(char* tables) {
    element_beside = reinterpret_cast<int64_t*>(tables);
    in_offset = element_beside + kTableCapacity;
    out_offset = in_offset + shape.in_runs;
    direct_offset = out_offset + shape.out_runs;
    element_place = reinterpret_cast<uint32_t*>(direct_offset + shape.out_runs);
    run_place = element_place + kTableCapacity;
    out_place = run_place + shape.in_runs;
  }

  // Chunks keep their elements but change places within 128 bytes: strides that would meet few banks spread over all.
  static __device__ uint32_t swizzle(uint32_t place) { return place ^ (((place >> 7 ^ place >> 10) & 7) << 4); }
  __device__ uint32_t place_chunk(uint32_t place) const { return args.places == Places::kSwizzled ? swizzle(place) : place; }

  __device__ void find_runs() const {
    for (uint32_t r = threadIdx.x; r < shape.in_runs; r += kBoxThreads) {
      uint32_t rest = r;
      int64_t offset = 0;
      for (int k = args.in_rank; k < args.rank; ++k) {
        uint32_t i;
        shape.extent[k].divmod(rest, rest, i);
        offset += i * args.dim[k].stride[kA];
      }
      in_offset[r] = offset;
      // Where runs are looked up, a chunk more every kCount runs spreads a warp's chunks over the banks.
      const bool looked_up = args.places == Places::kPerRun || args.places == Places::kMarchedRuns;
      const uint32_t skew = looked_up ? r / kCount * kChunkBytes : 0;
      run_place[r] = r * shape.pitch + skew + (args.chunked ? phase_bytes(staged + offset) : 0);
    }
  }

  __device__ void load() const {
    const bool inside = args.staged_extent.holds(staged - kChunkBytes, args.span + 2 * kChunkBytes);
    for (uint32_t i = threadIdx.x; i < shape.in_runs * shape.in_chunks.d; i += kBoxThreads) {
      uint32_t r, j;
      shape.in_chunks.divmod(i, r, j);
      const uint32_t start = run_place[r], shift = start % kChunkBytes;
      const int first = int(j * kCount) - int(shift / W);  // of the chunk's first element in the run
      if (first >= int(shape.in_length)) continue;
      const char* from = staged + in_offset[r] + first * W;
      char* to = elements + place_chunk(start - shift + j * kChunkBytes);
      if (inside || args.staged_extent.holds(from, kChunkBytes)) {
        cp_async_16(to, from);
      } else {
#pragma unroll 1
        for (int e = max(0, -first); e < min(kCount, int(shape.in_length) - first); ++e)
          reinterpret_cast<E*>(to)[e] = reinterpret_cast<const E*>(from)[e];
      }
    }
    cp_async_commit();
  }

  __device__ void load_elements() const {
    for (uint32_t i = threadIdx.x; i < shape.in_runs * shape.in_length; i += kBoxThreads) {
      const uint32_t r = i / shape.in_length, j = i % shape.in_length;
      const char* from = staged + in_offset[r] + j * args.run_step;
      E value = *reinterpret_cast<const E*>(from);
      if constexpr (Op::kBinary) {
        if (args.partner) value = op(value, *reinterpret_cast<const E*>(from + (args.partner - args.staged)));
      }
      *reinterpret_cast<E*>(elements + place_chunk(run_place[r] + j * W)) = value;
    }
  }

  __device__ void find_places() const {
    const int march = args.out_order[args.out_rank - 1];
    for (uint32_t j = threadIdx.x; j < shape.table.d + kCount - 1; j += kBoxThreads) {
      uint32_t rest = j, place = 0;
      int64_t beside = 0;
      for (int k = 0; k < args.out_rank; ++k) {
        const int d = args.out_order[k];
        uint32_t i = rest;
        if (d != march) shape.extent[d].divmod(rest, rest, i);
        place += i * shape.weight[d];
        beside += i * args.dim[d].stride[kB];
      }
      element_place[j] = place;
      element_beside[j] = beside;
    }
    const bool looked_up = args.places == Places::kPerRun || args.places == Places::kMarchedRuns;
    const uint32_t shift = !looked_up && args.chunked ? phase_bytes(staged) : 0;
    for (uint32_t c = threadIdx.x; c < shape.out_runs; c += kBoxThreads) {
      uint32_t rest = c, place = shift;
      int64_t offset = 0, beside = 0;
      for (int k = args.out_rank; k < args.rank; ++k) {
        const int d = args.out_order[k];
        uint32_t i;
        shape.extent[d].divmod(rest, rest, i);
        place += i * shape.weight[d];
        offset += i * args.dim[d].stride[kOut];
        beside += i * args.dim[d].stride[kB];
      }
      out_place[c] = place;
      out_offset[c] = offset;
      direct_offset[c] = beside;
    }
  }

  template <Places kPlaces>
  __device__ E element_at(uint32_t place) const {
    if (kPlaces == Places::kPerRun) place = run_place[place >> 16] + (place & 0xffff);
    if (kPlaces == Places::kSwizzled) place = swizzle(place);
    return *reinterpret_cast<const E*>(elements + place);
  }

  template <Places kPlaces, bool kRagged>
  __device__ void store() const {
    constexpr bool kMarched = kPlaces == Places::kMarched || kPlaces == Places::kMarchedRuns;
    const int64_t march_beside = args.dim[args.out_order[args.out_rank - 1]].stride[kB];
    const uint32_t count = shape.out_runs * shape.out_chunks.d, march = shape.march_weight;
    for (uint32_t i = threadIdx.x; i < count; i += kBoxThreads) {
      uint32_t c, j;
      shape.out_chunks.divmod(i, c, j);
      char* to = out + out_offset[c];
      const int begin = int(j * kCount) - int(phase_bytes(to)) / W;  // of the chunk's first element in the run
      const int first = max(0, -begin), last = min(kCount, int(shape.out_length) - begin);
      if (first >= last) continue;
      // A chunk that begins before its run is taken from the run's first element on; the end is repeated past the run's last.
      const int start = max(begin, 0), valid = kRagged ? last - first : kCount;
      to += start * W;
      const char* beside_run = direct + direct_offset[c];
      Chunk<E> chunk, beside;
      uint32_t period = start, in_period = 0;
      if (!kMarched) shape.table.divmod(start, period, in_period);
      if constexpr (Op::kBinary) {
        if (args.direct_follows) {
          beside = load_chunk<E>(beside_run + start * W, W, 0, valid, args.direct_extent);
        } else if (args.direct) {
#pragma unroll
          for (int k = 0; k < kCount; ++k) {
            const int e = kRagged ? min(k, valid - 1) : k;
            beside.v[k] = *reinterpret_cast<const E*>(beside_run + period * march_beside + element_beside[in_period + e]);
          }
        }
      }
      const uint32_t place = out_place[c] + (kPlaces == Places::kMarchedRuns ? 0 : period * march);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const int e = kRagged ? min(k, valid - 1) : k;
        chunk.v[k] = element_at<kPlaces>(place + (kPlaces == Places::kMarchedRuns ? run_place[start + e]
                                                  : kMarched                      ? e * march
                                                                                  : element_place[in_period + e]));
      }
      if constexpr (Op::kBinary) {
        if (args.direct) op.apply(chunk.v, beside.v, args.staged_is_b);
      }
      store_chunk(to, W, 0, valid, true, chunk);
    }
  }

  template <Places kPlaces>
  __device__ void store_any() const {
    if (args.ragged) store<kPlaces, true>();
    else store<kPlaces, false>();
  }

  __device__ void run() const {
    find_runs();
    __syncthreads();
    if (args.chunked) load();
    else load_elements();
    find_places();  // while the input is under way
    cp_async_wait<0>();
    __syncthreads();
    switch (args.places) {
      case Places::kMarched: return store_any<Places::kMarched>();
      case Places::kMarchedRuns: return store_any<Places::kMarchedRuns>();
      case Places::kTabled: return store_any<Places::kTabled>();
      case Places::kSwizzled: return store_any<Places::kSwizzled>();
      case Places::kPerRun: return store_any<Places::kPerRun>();
    }
  }
};

template <typename Op>
__global__ void __launch_bounds__(kBoxThreads) boxes_kernel(const __grid_constant__ BoxArgs args, const Op op) {
  extern __shared__ __align__(16) char shared[];
  __shared__ __align__(8) char shape_bytes[sizeof(BoxShape)];
  BoxShape& shape = reinterpret_cast<BoxShape&>(shape_bytes);
  __shared__ uint32_t extent[kMaxRank];  // of a box at an end
  Box<Op> box{args, op, shape, args.out, args.staged, args.direct, shared};
  bool at_end = false;
  const auto for_grid = [&](auto body) {
    uint32_t index = blockIdx.x;
    for (int g = 0; g < args.grid_rank; ++g) {
      uint32_t i;
      args.grid_count[g].divmod(index, index, i);
      body(g, i);
    }
  };
  for_grid([&](int g, uint32_t i) {
    box.out += i * args.grid_stride[kOut][g];
    box.staged += i * args.grid_stride[kA][g];
    box.direct += i * args.grid_stride[kB][g];
    const int k = args.grid_dim[g];
    at_end |= k >= 0 && (i + 1) * args.dim[k].extent > args.dim[k].size;
  });
  if (!at_end) {
    for (int w = threadIdx.x; w < int(sizeof(BoxShape) / 4); w += kBoxThreads)
      reinterpret_cast<uint32_t*>(&shape)[w] = reinterpret_cast<const uint32_t*>(&args.whole)[w];
  } else if (threadIdx.x == 0) {
    for (int k = 0; k < args.rank; ++k) extent[k] = args.dim[k].extent;
    for_grid([&](int g, uint32_t i) {
      const int k = args.grid_dim[g];
      if (k >= 0) extent[k] = min(extent[k], args.dim[k].size - i * extent[k]);
    });
    shape_box(args, extent, sizeof(typename Op::Element), shape);
  }
  __syncthreads();
  box.lay_out_tables(shared + args.tables_at);
  box.run();
}

template <typename Op>
cudaError_t launch_boxes(const Plan& plan, const BoxPlan& box, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes;
  const int staged = plan.staged, direct = staged == kA ? kB : kA;
  const bool has_direct = p.operands == 3 && !plan.staged_pair;
  BoxArgs args;
  args.out = p.data[kOut];
  args.staged = p.data[staged];
  args.partner = plan.staged_pair ? p.data[direct] : nullptr;
  args.direct = has_direct ? p.data[direct] : nullptr;
  args.staged_extent = {args.staged, args.staged + extent_bytes(p, Role(staged))};
  args.direct_extent = {args.direct, args.direct + (has_direct ? extent_bytes(p, Role(direct)) : 0)};
  args.staged_is_b = staged == kB;
  args.direct_follows = has_direct && box.direct_follows;
  args.rank = box.rank;
  args.in_rank = box.in_rank;
  args.out_rank = box.out_rank;
  args.run_step = p.strides[staged][box.dims[0]] * w;
  args.chunked = args.run_step == w && !args.partner;
  const auto stride = [&](int role, int d) {
    const int source = role == kOut ? int(kOut) : role == kA ? staged : direct;
    return source < p.operands ? p.strides[source][d] * w : 0;
  };
  int index_in_box[kMaxRank];
  std::fill_n(index_in_box, kMaxRank, -1);
  bool uniform = true;  // all input runs of a box have the same alignment
  uint32_t extent[kMaxRank];
  args.span = w;
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k];
    index_in_box[d] = k;
    extent[k] = uint32_t(box.extent[d]);
    args.dim[k] = {extent[k], uint32_t(p.sizes[d]), false, {stride(kOut, d), stride(kA, d), stride(kB, d)}};
    args.span += (box.extent[d] - 1) * stride(kA, d);
    if (k >= box.in_rank && args.chunked) uniform = uniform && stride(kA, d) % kChunkBytes == 0;
  }
  int n = 0;
  for (int d = 0; d < p.rank; ++d)
    if (index_in_box[d] >= 0) args.out_order[n++] = index_in_box[d];
  for (int k = 0; k < box.out_rank; ++k) args.dim[args.out_order[k]].in_out_run = true;
  args.places = uniform ? Places::kTabled : Places::kPerRun;
  shape_box(args, extent, int(w), args.whole);
  if (args.out_rank == 1 && box.rank == box.in_rank + 1 && args.out_order[0] == box.in_rank) {
    args.places = Places::kMarchedRuns;  // an output run takes an element from every input run
  } else if (uniform) {
    // Neighbouring lanes are kCount elements apart: an odd number of chunks of shared memory apart if they march by an odd one.
    const bool marched = args.whole.table.d == 1;
    const bool few_banks = marched ? args.whole.march_weight / w % 2 == 0 : args.whole.table.d % 4 == 0;
    args.places = few_banks ? Places::kSwizzled : marched ? Places::kMarched : Places::kTabled;
  }
  args.grid_rank = 0;
  int64_t boxes = 1;
  for (int d = 0; d < p.rank; ++d) {
    const int64_t count = (p.sizes[d] + box.extent[d] - 1) / box.extent[d];
    if (count == 1) continue;
    const int g = args.grid_rank++;
    args.grid_count[g] = FastDiv(uint32_t(count));
    for (int r = 0; r < 3; ++r) args.grid_stride[r][g] = stride(r, d) * box.extent[d];
    args.grid_dim[g] = index_in_box[d];
    boxes *= count;
  }
  args.tables_at = box.data_bytes;
  // Output runs are whole chunks if all begin and end at multiples of 16 bytes.
  uintptr_t ends = reinterpret_cast<uintptr_t>(args.out);
  for (int d = 0; d < p.rank; ++d) {
    const bool in_run = index_in_box[d] >= 0 && args.dim[index_in_box[d]].in_out_run;
    ends |= stride(kOut, d) * (in_run ? box.extent[d] : 1);
  }
  const BoxDim& last = args.dim[args.out_order[box.out_rank - 1]];
  ends |= last.stride[kOut] * (last.size % last.extent);
  args.ragged = ends % kChunkBytes != 0;
  boxes_kernel<Op><<<unsigned(boxes), kBoxThreads, box.shared_bytes, stream>>>(args, op);
  return cudaGetLastError();
}

}  // namespace fusebackend::tile
