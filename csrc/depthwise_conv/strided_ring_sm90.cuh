// Depthwise convolution of 16-bit planes with strides of 2, and both gradients, from a ring of stages in shared memory that bulk copies fill.
//
// A stage has the same rows of some images of a channel, and room for what is computed of them. One warp has stages filled and results taken away, by bulk
// copies of whole sectors of memory; nobody else waits for memory while one stage is ahead. The other threads have two columns of results each, and walk down
// them: rows are read as they lie.
//
// Rows and columns of x are counted in pairs, from the first of the padding on. Then pair m of rows has a part in rows m, m - 1, ... of results, and in no
// others: its first row with taps 0, 2, ..., its second with taps 1, 3, ...; so have columns. Of a forward a thread keeps the sums that a pair adds to.
// Of the gradients, which read and write pairs of x, it keeps the rows of the incoming one that the pair had a part in.
#pragma once
#include "common/bulk_copy_sm90.cuh"
#include "common/channel_epilogue.cuh"
#include "common/cuda_common.cuh"
#include "common/mbarrier_sm90.cuh"
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/mma.cuh"
#include "depthwise_conv/strided_ring_plan.h"
#include "depthwise_conv/tap_by_tap.cuh"

namespace fusebackend::depthwise_conv {

// A tensor of planes whose rows are dense.
struct StridedRingTensor {
  char* data;
  int64_t image_bytes, channel_bytes;
  int height, row_bytes;
};

struct StridedRingParams {
  StridedRingPlan plan;
  StridedRingTensor x, grad, result;  // result: y, or x's gradient
  ForwardParams forward;              // of a forward
  InputGradParams input;              // of the gradients
  const void* w;
  float* partial;
  FastDiv row_tiles, columns, images;
  int batch, channels, pad_h, pad_w, in_w, out_w, tap_row, tap_column;
  int64_t tap_channel;
  bool need_bias;
};

// Rows of a plane that a stage has: from `first` on, if there are any.
struct StridedRows {
  int first, count;

  __device__ __forceinline__ StridedRows(int from, int rows, int height) : first(max(from, 0)), count(max(min(from + rows, height) - max(from, 0), 0)) {}
};

__device__ __forceinline__ int place_in_16(const void* at) { return int(reinterpret_cast<uintptr_t>(at) & 15); }

template <int kTaps, bool kSums>
struct StridedStage {
  static constexpr int kLive = strided_ring_live(kTaps);
  int line, lines, first_image, images;

  __device__ __forceinline__ StridedStage(const StridedRingParams& p, int index) {
    uint32_t group, tile;
    p.row_tiles.divmod(uint32_t(index), group, tile);
    line = int(tile) * p.plan.rows, lines = min(p.plan.rows, p.plan.lines - line);
    first_image = int(group) * p.plan.images, images = min(p.plan.images, p.batch - first_image);
  }
  __device__ __forceinline__ StridedRows source(const StridedRingParams& p) const {
    return StridedRows(2 * line - p.pad_h, 2 * lines + (kSums ? 0 : kTaps - 2), p.x.height);
  }
  __device__ __forceinline__ StridedRows grad(const StridedRingParams& p) const { return StridedRows(line - kLive + 1, lines + kLive - 1, p.grad.height); }
  __device__ __forceinline__ StridedRows result(const StridedRingParams& p) const { return kSums ? source(p) : StridedRows(line, lines, p.result.height); }
  __device__ __forceinline__ char* at(const StridedRingTensor& t, int channel, int image, const StridedRows& rows) const {
    return t.data + (first_image + image) * t.image_bytes + channel * t.channel_bytes + int64_t{rows.first} * t.row_bytes;
  }
  // The same in shared memory, of images `slot_bytes` apart.
  __device__ __forceinline__ uint32_t in_slot(uint32_t slot, int slot_bytes, const StridedRingTensor& t, int channel, int image,
                                              const StridedRows& rows) const {
    return slot + image * slot_bytes + uint32_t(place_in_16(at(t, channel, image, rows)));
  }
};

// Two neighbouring 16-bit numbers of shared memory, and one.
__device__ __forceinline__ uint32_t load_word(uint32_t at) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at));
  return word;
}
__device__ __forceinline__ uint32_t load_half(uint32_t at) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(at));
  return half;
}
template <bool kWords>
__device__ __forceinline__ uint32_t load_two(uint32_t at) {
  if constexpr (kWords) return load_word(at);
  else return load_half(at) | load_half(at + 2) << 16;
}
__device__ __forceinline__ void store_half(uint32_t at, uint32_t half) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(uint16_t(half)) : "memory"); }
// Those of two neighbouring numbers that a mask has.
template <bool kWords>
__device__ __forceinline__ void store_two(uint32_t at, uint32_t both, uint32_t mask) {
  if constexpr (kWords) {
    if (mask) asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(both) : "memory");
  } else {
    if (mask & 0xffff) store_half(at, both);
    if (mask >> 16) store_half(at + 2, both >> 16);
  }
}
// Of two neighbouring columns those that a row has.
__device__ __forceinline__ uint32_t columns_mask(int column, int width) {
  return (unsigned(column) < unsigned(width) ? 0xffffu : 0) | (unsigned(column + 1) < unsigned(width) ? 0xffff0000u : 0);
}

// The columns of x that two of results depend on, two in a word, from `kShift` before the first.
template <typename T, int kTaps, bool kWords, int kShift>
struct StridedColumns {
  static constexpr int kCount = (kShift + kTaps + 3) / 2;
  uint32_t masks[kCount];

  __device__ __forceinline__ StridedColumns(int first, int width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) masks[i] = columns_mask(first - kShift + 2 * i, width);
  }
  // `at`: of the first that is needed. What is beside the row is zero.
  __device__ __forceinline__ void load(uint32_t (&words)[kCount], uint32_t at) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = load_two<kWords>(at + 4 * i - 2 * kShift) & masks[i];
  }
  static __device__ __forceinline__ void widen(float (&x)[kTaps + 2], const uint32_t (&words)[kCount]) {
#pragma unroll
    for (int i = 0; i < kTaps + 2; ++i) x[i] = (i + kShift) % 2 ? high_half<T>(words[(i + kShift) / 2]) : low_half<T>(words[(i + kShift) / 2]);
  }
};

template <typename T, int kTaps>
__device__ __forceinline__ void load_taps(float (&taps)[kTaps][kTaps], const StridedRingParams& p, int channel) {
  const T* const w = static_cast<const T*>(p.w) + channel * p.tap_channel;
#pragma unroll
  for (int a = 0; a < kTaps; ++a)
#pragma unroll
    for (int b = 0; b < kTaps; ++b) taps[a][b] = to_float(w[a * p.tap_row + b * p.tap_column]);
}

// The warp that has stages filled and results taken away.
template <int kTaps, bool kSums>
struct StridedMover {
  using Stage = StridedStage<kTaps, kSums>;
  const StridedRingParams& p;
  const int channel;

  // A lane copies an image's rows of one tensor, and what lies beside them in 16 bytes.
  __device__ __forceinline__ void fill(const Stage& stage, char* slot, uint32_t barrier) const {
    const int lane = int(threadIdx.x) % 32, copies = stage.images * (kSums ? 2 : 1);
    uint32_t bytes = 0;
    const auto for_each = [&](auto&& use) {
      for (int i = lane; i < copies; i += 32) {
        const bool is_grad = i >= stage.images;
        const int image = is_grad ? i - stage.images : i;
        const StridedRingTensor& t = is_grad ? p.grad : p.x;
        const StridedRows rows = is_grad ? stage.grad(p) : stage.source(p);
        if (rows.count == 0) continue;
        const char* const from = stage.at(t, channel, image, rows);
        const int place = place_in_16(from);
        use(slot + (is_grad ? p.plan.images * p.plan.source_bytes + image * p.plan.grad_bytes : image * p.plan.source_bytes), from - place,
            uint32_t(round_up(place + rows.count * t.row_bytes, 16)));
      }
    };
    for_each([&](char*, const char*, uint32_t n) { bytes += n; });
    const uint32_t all = __reduce_add_sync(0xffffffffu, bytes);
    if (lane == 0) mbarrier::expect_bytes(barrier, all);
    __syncwarp();
    for_each([&](char* to, const char* from, uint32_t n) { copy_bytes(shared_address(to), from, n, barrier); });
  }

  // A lane has an image's rows copied; what is left of 16 bytes at both ends it copies itself.
  __device__ __forceinline__ void store(const Stage& stage, const char* results) const {
    const StridedRows rows = stage.result(p);
    for (int image = int(threadIdx.x) % 32; image < stage.images; image += 32) {
      char* const to = stage.at(p.result, channel, image, rows);
      const char* const from = results + image * p.plan.result_bytes + place_in_16(to);
      const int bytes = rows.count * p.result.row_bytes, front = min(-place_in_16(to) & 15, bytes), middle = (bytes - front) & ~15;
      if (middle > 0) store_bytes(to + front, shared_address(from + front), middle);
#pragma unroll 1
      for (int i = front > 0 ? 0 : middle; i < bytes; i += i + 2 == front ? 2 + middle : 2)
        *reinterpret_cast<uint16_t*>(to + i) = *reinterpret_cast<const uint16_t*>(from + i);
    }
    commit_stores();
  }
};

// A thread's place in a stage.
struct StridedPlace {
  int column, image, segment;
  bool is_one;

  __device__ __forceinline__ explicit StridedPlace(const StridedRingParams& p) {
    uint32_t line, of_line, of_image, part;
    p.columns.divmod(threadIdx.x, line, of_line);
    p.images.divmod(line, part, of_image);
    column = int(of_line), image = int(of_image), segment = int(part);
    is_one = segment < p.plan.segments;
  }
};

// What a thread needs to convolve at two columns of results.
template <typename T, int kTaps, bool kFinishes, bool kWords, int kShift>
struct StridedConvolution {
  using Stage = StridedStage<kTaps, false>;
  using Columns = StridedColumns<T, kTaps, kWords, kShift>;
  static constexpr int kLive = strided_ring_live(kTaps);
  const StridedRingParams& p;
  const int channel;
  const StridedPlace& place;
  const Columns columns;
  const uint32_t result_mask;
  float taps[kTaps][kTaps], start;

  __device__ __forceinline__ StridedConvolution(const StridedRingParams& p, int channel, const StridedPlace& place)
      : p(p), channel(channel), place(place), columns(4 * place.column - p.pad_w, p.in_w), result_mask(columns_mask(2 * place.column, p.out_w)) {
    const ForwardParams& f = p.forward;
    load_taps<T>(taps, p, channel);
    start = f.bias ? to_float(static_cast<const T*>(f.bias)[channel * f.bias_stride]) : 0.f;
  }

  __device__ __forceinline__ void operator()(const Stage& stage, uint32_t slot, uint32_t zeros) const {
    const int first = place.segment * p.plan.segment_rows, rows = min(p.plan.segment_rows, stage.lines - first);
    if (place.image >= stage.images || rows <= 0) return;
    const StridedRows source = stage.source(p), results = stage.result(p);
    const int row_bytes = p.x.row_bytes, result_row_bytes = p.result.row_bytes;
    int r = 2 * (stage.line + first) - p.pad_h - source.first;  // of the stage's, that is read next
    uint32_t from = stage.in_slot(slot, p.plan.source_bytes, p.x, channel, place.image, source) + r * row_bytes + 2 * (4 * place.column - p.pad_w);
    const uint32_t y = stage.in_slot(slot + p.plan.images * p.plan.source_bytes, p.plan.result_bytes, p.result, channel, place.image, results) +
                       (stage.line + first - results.first) * result_row_bytes + 4 * place.column;
    const bool pairs = (y | result_row_bytes) % 4 == 0 && result_mask == ~0u;
    uint32_t to = y - (kLive - 1) * result_row_bytes, not_finite = 0;
    uint32_t words[2][Columns::kCount];
    float sums[kLive][2];
#pragma unroll
    for (int u = 0; u < kLive; ++u) sums[u][0] = sums[u][1] = start;
    ChannelAffine affine;
    if constexpr (kFinishes) affine = affine_of<T>(p.forward.epilogue, channel);
    const auto load = [&] {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        columns.load(words[half], unsigned(r) < unsigned(source.count) ? from : zeros + 2 * kShift);
        ++r, from += row_bytes;
      }
    };
    load();
#pragma unroll 2
    for (int m = 0; m < rows + kLive - 1; ++m) {
      float x[2][kTaps + 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) Columns::widen(x[half], words[half]);
      load();  // the next pair's
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int b = 0; b < kTaps; ++b)
#pragma unroll
          for (int a = half; a < kTaps; a += 2)
#pragma unroll
            for (int c = 0; c < 2; ++c) sums[a / 2][c] = fmaf(taps[a][b], x[half][2 * c + b], sums[a / 2][c]);
        if (half == 0) {
          float(&done)[2] = sums[kLive - 1];
          if (m >= kLive - 1) {
            add_zero_times<T>(not_finite, pack<T>(done[0], done[1]));
            if constexpr (kFinishes) finish<T>(done, p.forward.epilogue, affine);
            const uint32_t both = pack<T>(done[0], done[1]);
            if (pairs) store_two<true>(to, both, ~0u);
            else store_two<false>(to, both, result_mask);
          }
          to += result_row_bytes;
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int u = kLive - 1; u > 0; --u) sums[u][c] = sums[u - 1][c];
        sums[0][c] = start;
      }
    }
    if ((not_finite & 0x7fff7fff) != 0)
      mend_column<T, 2>(p.forward, stage.first_image + place.image, channel, stage.line + first, rows, 2 * place.column,
                        static_cast<T*>(__cvta_shared_to_generic(y)), p.out_w);
  }
};

// Computes columns of x's gradient anew, tap by tap, into a stage: `dx` is where the plane would begin there.
template <typename T>
__device__ __noinline__ void mend_gradient(const StridedRingParams& p, int image, int channel, void* dx, int first_row, int rows, int column) {
  InputGradParams there = p.input;
  there.dx = dx, there.dx_stride = {0, 0, p.in_w, 1};
  roll_back_tap_by_tap<T>(there, image, channel, first_row, rows, column, 4);
}

// What a thread needs for both gradients: of x at four columns, from that on that results 2 * column begin at, or the next, where words begin.
template <typename T, int kTaps, bool kWords, int kShift>
struct StridedGradients {
  using Stage = StridedStage<kTaps, true>;
  using Columns = StridedColumns<T, kTaps, kWords, kShift>;
  static constexpr int kLive = strided_ring_live(kTaps);
  static constexpr int kGrads = kLive + 1, kBefore = kLive - 1 - kShift;  // columns of the incoming gradient; those before 2 * column
  const StridedRingParams& p;
  const int channel;
  const StridedPlace& place;
  const Columns columns;
  float taps[kTaps][kTaps], sums[kTaps][kTaps] = {}, bias_sum = 0;
  uint32_t grad_masks[kGrads], result_masks[2];

  __device__ __forceinline__ StridedGradients(const StridedRingParams& p, int channel, const StridedPlace& place)
      : p(p), channel(channel), place(place), columns(4 * place.column - p.pad_w, p.in_w) {
    load_taps<T>(taps, p, channel);
#pragma unroll
    for (int v = 0; v < kGrads; ++v) grad_masks[v] = columns_mask(2 * place.column - kBefore + v, p.out_w) & 0xffff;
#pragma unroll
    for (int i = 0; i < 2; ++i) result_masks[i] = columns_mask(4 * place.column - p.pad_w + kShift + 2 * i, p.in_w);
  }

  __device__ __forceinline__ void operator()(const Stage& stage, uint32_t slot, uint32_t zeros) {
    const int first = place.segment * p.plan.segment_rows, lines = min(p.plan.segment_rows, stage.lines - first);
    if (place.image >= stage.images || lines <= 0) return;
    const StridedRows source = stage.source(p), gradient = stage.grad(p);
    const int row_bytes = p.x.row_bytes, grad_row_bytes = p.grad.row_bytes;
    const int column = 4 * place.column - p.pad_w, first_row = 2 * (stage.line + first) - p.pad_h;
    int r = first_row - source.first, i = stage.line + first - kLive + 1 - gradient.first;  // of the stage's, that are read next
    const int offset = r * row_bytes + 2 * column;
    const uint32_t grad_slot = slot + p.plan.images * p.plan.source_bytes, result_slot = grad_slot + p.plan.images * p.plan.grad_bytes;
    uint32_t x_at = stage.in_slot(slot, p.plan.source_bytes, p.x, channel, place.image, source) + offset;
    uint32_t grad_at = stage.in_slot(grad_slot, p.plan.grad_bytes, p.grad, channel, place.image, gradient) + i * grad_row_bytes +
                       2 * (2 * place.column - kBefore);
    const uint32_t results = stage.in_slot(result_slot, p.plan.result_bytes, p.result, channel, place.image, source);
    uint32_t to = results + offset + 2 * kShift, not_finite = 0;
    uint32_t words[2][Columns::kCount], halves[kGrads];
    float grad[kLive][kGrads] = {};  // rows from the pair's own back
    const auto load_grad = [&] {
      const uint32_t at = unsigned(i) < unsigned(gradient.count) ? grad_at : zeros;
#pragma unroll
      for (int v = 0; v < kGrads; ++v) halves[v] = load_half(at + 2 * v) & grad_masks[v];
      ++i, grad_at += grad_row_bytes;
    };
    const auto next_grad = [&] {
#pragma unroll
      for (int v = 0; v < kGrads; ++v) {
#pragma unroll
        for (int u = kLive - 1; u > 0; --u) grad[u][v] = grad[u - 1][v];
        grad[0][v] = low_half<T>(halves[v]);
      }
      load_grad();
    };
    const auto load_x = [&] {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        columns.load(words[half], unsigned(r) < unsigned(source.count) ? x_at : zeros + 2 * kShift);
        ++r, x_at += row_bytes;
      }
    };
    load_grad();
#pragma unroll
    for (int u = 1; u < kLive; ++u) next_grad();
    load_x();
    for (int m = 0; m < lines; ++m) {
      float x[2][kTaps + 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) Columns::widen(x[half], words[half]);
      next_grad();
      load_x();
      bias_sum += grad[0][kBefore] + grad[0][kBefore + 1];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int b = 0; b < kTaps; ++b)
#pragma unroll
          for (int a = half; a < kTaps; a += 2)
#pragma unroll
            for (int c = 0; c < 2; ++c) sums[a][b] = fmaf(grad[a / 2][kBefore + c], x[half][2 * c + b], sums[a][b]);
        float done[4] = {};
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
          for (int a = half; a < kTaps; a += 2)
#pragma unroll
            for (int b = (kShift + c) % 2; b < kTaps; b += 2) done[c] = fmaf(taps[a][b], grad[a / 2][(kShift + c) / 2 - b / 2 + kBefore], done[c]);
        const bool has_row = unsigned(r - 4 + half) < unsigned(source.count);  // two pairs were loaded
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t both = pack<T>(done[2 * i], done[2 * i + 1]);
          add_zero_times<T>(not_finite, both);
          if (has_row) store_two<kWords>(to + 4 * i, both, result_masks[i]);
        }
        to += row_bytes;
      }
    }
    if ((not_finite & 0x7fff7fff) != 0)
      mend_gradient<T>(p, stage.first_image + place.image, channel, __cvta_shared_to_generic(results - source.first * row_bytes), first_row, 2 * lines,
                       column + kShift);
  }

  // Sums up what all threads have.
  __device__ __forceinline__ void store(int split, float (&of_warps)[kStridedRingThreads / 32][kTaps * kTaps + 1]) const {
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
#pragma unroll
    for (int tap = 0; tap <= kTaps * kTaps; ++tap) {
      float sum = tap < kTaps * kTaps ? sums[tap / kTaps % kTaps][tap % kTaps] : bias_sum;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      if (lane == 0) of_warps[warp][tap] = sum;
    }
    asm volatile("bar.sync 1, %0;" ::"r"(p.plan.threads) : "memory");
    float* const to = p.partial + (int64_t{split} * p.channels + channel) * (kTaps * kTaps + 1);
    for (int tap = int(threadIdx.x); tap < kTaps * kTaps + int(p.need_bias); tap += p.plan.threads) {
      float sum = 0;
      for (int w = 0; w < p.plan.threads / 32; ++w) sum += of_warps[w][tap];
      to[tap] = sum;
    }
  }
};

// A block goes through some stages of a channel.
template <typename T, int kTaps, bool kSums, bool kFinishes, bool kWords, int kShift>
__global__ void __launch_bounds__(kStridedRingThreads + 32, strided_ring_blocks(kSums, kTaps))
depthwise_strided_ring(const __grid_constant__ StridedRingParams params) {
  extern __shared__ __align__(128) char shared[];
  char* const ring = shared + kStridedRingFront;
  __shared__ __align__(16) uint32_t zeros[8];  // words before and behind the third are read, too
  __shared__ float of_warps[kSums ? kStridedRingThreads / 32 : 1][kTaps * kTaps + 1];
  __shared__ uint64_t full[kStridedRingStages], done[kStridedRingStages];  // barriers: of copies, and of the threads that compute
  const StridedRingPlan& plan = params.plan;
  const int channel = int(blockIdx.x) % params.channels, split = int(blockIdx.x) / params.channels;
  const int first = int(int64_t{plan.stages} * split / plan.splits), last = int(int64_t{plan.stages} * (split + 1) / plan.splits);
  using Stage = StridedStage<kTaps, kSums>;
  if (threadIdx.x < kStridedRingStages) {
    mbarrier::init(shared_address(full + threadIdx.x), 1);
    mbarrier::init(shared_address(done + threadIdx.x), plan.threads);
    mbarrier::init_fence();
  }
  if (threadIdx.x < 8) zeros[threadIdx.x] = 0;
  __syncthreads();

  if (int(threadIdx.x) >= plan.threads) {
    const StridedMover<kTaps, kSums> mover = {params, channel};
    for (int index = first, slot = 0, parity = 1; index < last + kStridedRingStages; ++index) {
      char* const at = ring + slot * plan.stage_bytes();
      const int before = index - kStridedRingStages;
      if (before >= first) {
        mbarrier::wait(shared_address(done + slot), parity);
        mover.store(Stage(params, before), at + plan.images * (plan.source_bytes + plan.grad_bytes));
        wait_until_read<0>();
        __syncwarp();
      }
      if (index < last) mover.fill(Stage(params, index), at, shared_address(full + slot));
      if (++slot == kStridedRingStages) slot = 0, parity ^= 1;
    }
    return;
  }

  const uint32_t zero = shared_address(zeros + 2);
  const StridedPlace place(params);
  const auto for_each_stage = [&](auto&& use) {
    for (int index = first, slot = 0, parity = 0; index < last; ++index) {
      mbarrier::wait(shared_address(full + slot), parity);
      if (place.is_one) use(Stage(params, index), shared_address(ring + slot * plan.stage_bytes()));
      fence_async_proxy();
      mbarrier::arrive(shared_address(done + slot));
      if (++slot == kStridedRingStages) slot = 0, parity ^= 1;
    }
  };
  if constexpr (kSums) {
    StridedGradients<T, kTaps, kWords, kShift> gradients(params, channel, place);
    for_each_stage([&](const Stage& stage, uint32_t slot) { gradients(stage, slot, zero); });
    gradients.store(split, of_warps);
  } else {
    const StridedConvolution<T, kTaps, kFinishes, kWords, kShift> convolve(params, channel, place);
    for_each_stage([&](const Stage& stage, uint32_t slot) { convolve(stage, slot, zero); });
  }
}

}  // namespace fusebackend::depthwise_conv
