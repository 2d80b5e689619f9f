// Depthwise convolution of 16-bit planes on tensor cores, stride 1, and both gradients, from a ring of stages in shared memory that bulk copies fill.
//
// A stage has the same rows of some images of a channel. Their strips of eight columns are the rows of one warp's products, as in rolling_band.cuh. Where
// both gradients are wanted, a stage has the incoming one and x, and serves three warps: the first convolves the incoming gradient for that of x, the others
// have products of rows for the weight's, as in row_products.cuh. The first warp has a stage filled anew when all have left it. So what is on its way costs
// no registers, and nobody waits for memory while one stage is ahead. Results wait in shared memory, too, and leave by bulk copies of whole sectors of
// memory: rows of planes end in the middle of one.
#pragma once
#include "common/bulk_copy_sm90.cuh"
#include "common/cuda_common.cuh"
#include "common/mbarrier_sm90.cuh"
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/mma.cuh"
#include "depthwise_conv/plane_ring_plan.h"
#include "depthwise_conv/tap_by_tap.cuh"

namespace fusebackend::depthwise_conv {

// A tensor of which stages have rows: from `pad` rows before those of the results on.
struct PlaneRingTensor {
  const char* data;
  int64_t image_bytes, channel_bytes;
  int height, pad;
};

struct PlaneRingParams {
  ForwardParams p;  // of x, or of the incoming gradient with reversed taps
  PlaneRingPlan plan;
  PlaneRingTensor tensors[2];  // the source; x, where products of rows are summed
  float* partial;
  FastDiv row_tiles;
  int batch, channels, in_w, out_h, out_w, pad_w, taps_w, tap_row, tap_column;
  bool need_bias;
};

// Rows of results, and the images that they are of.
struct PlaneStage {
  int first_row, rows, first_image, images;

  __device__ __forceinline__ PlaneStage(const PlaneRingParams& p, int index) {
    uint32_t group, tile;
    p.row_tiles.divmod(uint32_t(index), group, tile);
    first_row = int(tile) * p.plan.rows, rows = min(p.plan.rows, p.out_h - first_row);
    first_image = int(group) * p.plan.images, images = min(p.plan.images, p.batch - first_image);
  }
};

// Rows of a stage that the plane has, counted from its first on.
struct PlaneRows {
  int first, count;

  __device__ __forceinline__ PlaneRows(const PlaneRingTensor& t, const PlaneStage& stage, int taps)
      : first(max(t.pad - stage.first_row, 0)), count(max(min(stage.rows + taps - 1, t.height - stage.first_row + t.pad) - first, 0)) {}
  __device__ __forceinline__ bool has(int row) const { return unsigned(row - first) < unsigned(count); }
};

// Where an image's rows begin, in bytes of the tensor; where the plane does not reach so far, before it. They have the same place in 16 bytes in a stage.
__device__ __forceinline__ int64_t rows_offset(const PlaneRingParams& p, const PlaneRingTensor& t, int channel, int image, int first_row) {
  return image * t.image_bytes + channel * t.channel_bytes + int64_t{first_row - t.pad} * p.plan.row_bytes;
}

// Has a stage filled, by all lanes of a warp: each copies one image's rows, and what lies beside them in 16 bytes.
template <int kTensors, int kTaps>
__device__ __forceinline__ void fill_stage(const PlaneRingParams& p, int channel, const PlaneStage& stage, uint32_t to, uint32_t barrier) {
  const int lane = int(threadIdx.x) % 32;
  const bool second = lane >= p.plan.images;
  const int image = second ? lane - p.plan.images : lane;
  const PlaneRingTensor& t = p.tensors[kTensors > 1 && second ? 1 : 0];
  uint32_t bytes = 0;
  const char* from = nullptr;
  const PlaneRows rows(t, stage, kTaps);
  if (image < stage.images && rows.count > 0 && (kTensors > 1 || !second)) {
    const int64_t first = rows_offset(p, t, channel, stage.first_image + image, stage.first_row), begin = first + rows.first * p.plan.row_bytes;
    const int64_t begin_16 = begin & ~int64_t{15};
    from = t.data + begin_16;
    bytes = uint32_t((begin + rows.count * p.plan.row_bytes - begin_16 + 15) & ~int64_t{15});
    to += lane * p.plan.slot_bytes + uint32_t(begin_16 - (first & ~int64_t{15}));
  }
  const uint32_t all = __reduce_add_sync(0xffffffffu, bytes);
  if (lane == 0) mbarrier::expect_bytes(barrier, all);
  __syncwarp();
  if (bytes > 0) copy_bytes(to, from, bytes, barrier);
}

// A word of shared memory.
__device__ __forceinline__ uint32_t load_shared(uint32_t at) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at));
  return word;
}
__device__ __forceinline__ void store_shared(uint32_t at, uint32_t word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory"); }

// The same value for four registers that the compiler does not know to be equal: a product reads four in a row, and they would be copied for each.
template <typename V>
__device__ __forceinline__ void set_apart(V (&to)[4], V value) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __shfl_sync(0xffffffffu, value, int(threadIdx.x) % 32);
}

// What a warp needs to convolve stages of a channel.
template <typename T, int kTaps>
struct PlaneConvolution {
  const PlaneRingParams& params;
  const int channel;
  uint32_t band[kTaps][2];
  int image[2], source[2], column[2];  // of this lane's strips; source: offset in a stage
  bool loads[4], stores[2];
  float start[4];

  __device__ __forceinline__ PlaneConvolution(const PlaneRingParams& params, int channel) : params(params), channel(channel) {
    const ForwardParams& p = params.p;
    const PlaneRingPlan& plan = params.plan;
    const int line = int(threadIdx.x) % 32 / 4, quarter = int(threadIdx.x) % 4;
    const uint16_t* const w = static_cast<const uint16_t*>(p.w) + channel * p.w_stride.n;
    // The bands: rows are the window's columns, columns the results'.
#pragma unroll
    for (int a = 0; a < kTaps; ++a) {
      uint32_t tap[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int b = 2 * quarter - line - plan.shift + i / 2 * 8 + i % 2;
        tap[i] = 0;
        if (unsigned(b) < unsigned(params.taps_w)) tap[i] = w[a * params.tap_row + b * params.tap_column];
      }
      band[a][0] = tap[0] | tap[1] << 16, band[a][1] = tap[2] | tap[3] << 16;
    }
    set_apart(start, p.bias ? to_float(static_cast<const T*>(p.bias)[channel * p.bias_stride]) : 0.f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int strip = line + 8 * half, of_image = strip / plan.column_blocks;
      const bool is_strip = of_image < plan.images;
      image[half] = is_strip ? of_image : 0;
      column[half] = strip % plan.column_blocks * 8 + 2 * quarter;
      const int source_column = column[half] - params.pad_w - plan.shift;
      source[half] = image[half] * plan.slot_bytes + 2 * source_column;
      loads[half] = is_strip && unsigned(source_column) < unsigned(params.in_w);
      loads[half + 2] = is_strip && unsigned(source_column + 8) < unsigned(params.in_w);
      stores[half] = is_strip && column[half] < params.out_w;
    }
  }

  __device__ __forceinline__ char* result(const PlaneStage& stage, int of_image) const {
    const ForwardParams& p = params.p;
    return static_cast<char*>(p.y) + 2 * ((stage.first_image + of_image) * p.y_stride.n + channel * p.y_stride.c + stage.first_row * p.y_stride.h);
  }
  static __device__ __forceinline__ int place_in_16(const void* at) { return int(reinterpret_cast<uintptr_t>(at) & 15); }

  // Results go to `results`, as many bytes an image as `pitch`, and from there on their way to memory; where that is the stage itself, they follow the rows
  // that were read. `results_left` waits for those of the stage before, and is called before the first.
  template <typename F>
  __device__ __forceinline__ void operator()(const PlaneStage& stage, uint32_t slots, uint32_t zeros, char* results, int pitch, F&& results_left) const {
    const ForwardParams& p = params.p;
    const int row_bytes = params.plan.row_bytes, result_row_bytes = 2 * params.out_w;
    const PlaneRows rows(params.tensors[0], stage, kTaps);
    uint32_t from[2], to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      from[half] = slots + source[half] + uint32_t(rows_offset(params, params.tensors[0], channel, stage.first_image + image[half], stage.first_row) & 15);
      to[half] = shared_address(results) + image[half] * pitch + 2 * column[half] + place_in_16(result(stage, image[half]));
    }
    uint32_t x[kTaps][4] = {};  // what is beside the plane stays zero
    const auto load = [&](int r, uint32_t (&row)[4]) {
      const bool has_row = rows.has(r);
      const uint32_t at[2] = {has_row ? from[0] : zeros, has_row ? from[1] : zeros};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (loads[i]) row[i] = load_shared(at[i % 2] + i / 2 * 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) from[half] += row_bytes;
    };
    float sums[kTaps][4];
    // Rows of taps from the last one on: the row of results that it completes comes first.
    const auto multiply = [&](int r, const uint32_t (&row)[4], int taps) {
#pragma unroll
      for (int a = kTaps - 1; a >= 0; --a) {
        if (a >= taps) continue;
        float(&sum)[4] = sums[(r - a + kTaps) % kTaps];
        if (a == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] = start[i];
        }
        mma_k16<T>(sum, row[0], row[1], row[2], row[3], band[a][0], band[a][1]);
      }
    };
    uint32_t finite = 0;
#pragma unroll
    for (int r = 0; r < kTaps; ++r) load(r, x[r]);
#pragma unroll
    for (int r = 0; r < kTaps - 1; ++r) multiply(r, x[r], r + 1), load(r + kTaps, x[r]);
    results_left();
    for (int first = 0; first < stage.rows; first += kTaps) {
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
        multiply(s + kTaps - 1, x[(s + kTaps - 1) % kTaps], kTaps);
        load(first + s + 2 * kTaps - 1, x[(s + kTaps - 1) % kTaps]);
        __syncwarp();  // results take the place of rows that were read
        float(&done)[4] = sums[s];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t both = pack<T>(done[2 * half], done[2 * half + 1]);
          add_zero_times<T>(finite, both);
          if (stores[half]) store_shared(to[half], both);
          to[half] += result_row_bytes;
        }
        if (first + s + 1 == stage.rows) break;
      }
    }
    if ((finite & 0x7fff7fff) != 0) {
      for (int half = 0; half < 2; ++half) {
        if (!stores[half] || image[half] >= stage.images) continue;  // whatever lies where there is no image need not be finite
        char* const y = results + image[half] * pitch + 2 * column[half] + place_in_16(result(stage, image[half]));
        mend_column<T>(p, stage.first_image + image[half], channel, stage.first_row, stage.rows, column[half], reinterpret_cast<T*>(y), params.out_w);
      }
    }
    fence_async_proxy();
    __syncwarp();
    store(stage, results, pitch);
  }

  // A lane has one image's rows copied; what is left of 16 bytes at both ends it copies itself.
  __device__ __forceinline__ void store(const PlaneStage& stage, const char* results, int pitch) const {
    const int lane = int(threadIdx.x) % 32;
    if (lane < stage.images) {
      char* const to = result(stage, lane);
      const char* const from = results + lane * pitch + place_in_16(to);
      const int bytes = stage.rows * params.out_w * 2, front = min(-place_in_16(to) & 15, bytes), middle = (bytes - front) & ~15;
      if (middle > 0) store_bytes(to + front, shared_address(from + front), middle);
#pragma unroll 1
      for (int i = front > 0 ? 0 : middle; i < bytes; i += i + 4 == front ? 4 + middle : 4)
        *reinterpret_cast<uint32_t*>(to + i) = *reinterpret_cast<const uint32_t*>(from + i);
    }
    commit_stores();
  }
};

// The sums of a weight's gradient that a warp has: matrices of which diagonals belong to rows of taps, one for each column of taps. There are two of each:
// of products whose upper rows of x are in the upper half of a fragment, or in the lower one.
template <typename T, int kTaps>
struct PlaneProducts {
  static constexpr int kHalf = kTaps / 2, kBeside = (kHalf + 1) / 2, kWords = 2 * kBeside + 1;
  float sums[2][kTaps][4] = {}, bias_sums[4] = {};

  // Two columns, kShift beside those of the word in the middle.
  template <int kShift>
  static __device__ __forceinline__ uint32_t shifted(const uint32_t (&words)[kWords]) {
    constexpr int kFirst = kShift >= 0 ? kBeside + kShift / 2 : kBeside - (1 - kShift) / 2;
    if constexpr (kShift % 2 == 0) return words[kFirst];
    else return __byte_perm(words[kFirst], words[kFirst + 1], 0x5432);
  }

  template <int kTap>
  __device__ __forceinline__ void multiply(float (&to)[kTaps][4], const uint32_t (&x)[4], const uint32_t (&g)[2][kWords]) {
    mma_k16<T>(to[kTap], x[0], x[1], x[2], x[3], shifted<kHalf - kTap>(g[0]), shifted<kHalf - kTap>(g[1]));
    if constexpr (kTap + 1 < kTaps) multiply<kTap + 1>(to, x, g);
  }

  // Sixteen columns at a time, of which products are taken down the rows: eight of the gradient's times sixteen of x, the lower eight of which are the
  // next products' upper ones, and stay in their registers. The warps of a stage take turns.
  __device__ __forceinline__ void operator()(const PlaneRingParams& p, int channel, const PlaneStage& stage, uint32_t slots, uint32_t zeros, int warp) {
    const int line = int(threadIdx.x) % 32 / 4, quarter = int(threadIdx.x) % 4, row_bytes = p.plan.row_bytes;
    uint32_t ones[4];
    set_apart(ones, pack<T>(1.f, 1.f));
    const int grad_place = int(rows_offset(p, p.tensors[0], channel, stage.first_image, stage.first_row) & 15), grad_step = int(p.tensors[0].image_bytes & 15);
    const int x_place = int(rows_offset(p, p.tensors[1], channel, stage.first_image, stage.first_row) & 15), x_step = int(p.tensors[1].image_bytes & 15);
    const int grad_slot = int(slots) + (line + p.tensors[0].pad) * row_bytes + 4 * quarter;
    const int x_slot = int(slots) + p.plan.images * p.plan.slot_bytes + line * row_bytes + 4 * quarter;
    const PlaneRows rows_of_x(p.tensors[1], stage, kTaps);
    int image = 0, chunk = 16 * warp;
    const auto wrap = [&] {
      while (chunk >= p.in_w && image < stage.images) chunk -= p.plan.chunk_columns, ++image;
    };
#pragma unroll 1
    for (wrap(); image < stage.images; chunk += 16 * kPlaneRingSumWarps, wrap()) {
      const int column = chunk + 2 * quarter;
      uint32_t x_masks[2], grad_masks[2][kWords];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x_masks[half] = column + 8 * half < p.in_w ? ~0u : 0;
#pragma unroll
        for (int k = 0; k < kWords; ++k) grad_masks[half][k] = unsigned(column + 8 * half + 2 * (k - kBeside)) < unsigned(p.in_w) ? ~0u : 0;
      }
      int grad = grad_slot + image * p.plan.slot_bytes + (grad_place + image * grad_step) % 16 + 2 * chunk;
      int x = x_slot + image * p.plan.slot_bytes + (x_place + image * x_step) % 16 + 2 * chunk;
      const auto load_x = [&](int row, uint32_t& left, uint32_t& right) {
        const uint32_t from = rows_of_x.has(row) ? x : zeros;
        left = load_shared(from) & x_masks[0], right = load_shared(from + 16) & x_masks[1];
        x += 8 * row_bytes;
      };
      const auto load_grad = [&](int row, uint32_t (&to)[2][kWords]) {
        const uint32_t from = row < stage.rows ? grad : zeros;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int k = 0; k < kWords; ++k) to[half][k] = load_shared(from + 16 * half + 4 * (k - kBeside)) & grad_masks[half][k];
        grad += 8 * row_bytes;
      };
      uint32_t rows[4];
      load_x(line, rows[0], rows[2]);
#pragma unroll 1
      for (int first = 0; first < stage.rows; first += kPlaneRingSumRows) {
        uint32_t g[2][2][kWords], next[2];
        load_x(first + line + 8, rows[1], rows[3]);
        load_grad(first + line, g[0]);
        load_x(first + line + 16, next[0], next[1]);
        load_grad(first + line + 8, g[1]);
        multiply<0>(sums[0], rows, g[0]);
        mma_k16<T>(bias_sums, ones[0], ones[1], ones[2], ones[3], g[0][0][kBeside], g[0][1][kBeside]);
        rows[0] = next[0], rows[2] = next[1];
        multiply<0>(sums[1], rows, g[1]);
        mma_k16<T>(bias_sums, ones[0], ones[1], ones[2], ones[3], g[1][0][kBeside], g[1][1][kBeside]);
      }
    }
  }

  // Sums up the diagonals, one column of taps at a time.
  __device__ __forceinline__ void store(const PlaneRingParams& p, int channel, int split, float (&products)[16][9]) const {
    const int lane = int(threadIdx.x) % 32, line = lane / 4, quarter = lane % 4;
    float* const to = p.partial + (int64_t{split} * p.channels + channel) * (kTaps * kTaps + 1);
#pragma unroll
    for (int tap = 0; tap <= kTaps; ++tap) {
      const bool is_bias = tap == kTaps;
      if (is_bias && !p.need_bias) break;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        products[line + i / 2 * 8][2 * quarter + i % 2] = is_bias ? bias_sums[i] : sums[0][tap % kTaps][i] + sums[1][tap % kTaps][(i + 2) % 4];
      __syncwarp();
      if (lane < (is_bias ? 1 : kTaps)) {
        float sum = 0;
        for (int j = 0; j < 8; ++j) sum += products[j + lane][j];
        to[is_bias ? kTaps * kTaps : lane * kTaps + tap] = sum;
      }
      __syncwarp();
    }
  }
};

// A block goes through some stages of a channel. Its first warp convolves, the others sum up products, where both gradients are wanted.
template <typename T, int kTaps, bool kSums>
__global__ void __launch_bounds__(plane_ring_threads(kSums), plane_ring_blocks(kSums, kTaps))
depthwise_plane_ring(const __grid_constant__ PlaneRingParams params) {
  constexpr int kTensors = kSums ? 2 : 1, kWarps = plane_ring_threads(kSums) / 32;
  extern __shared__ __align__(128) char ring[];
  __shared__ uint32_t zeros[32];
  __shared__ float products[kSums ? kPlaneRingSumWarps : 1][16][9];
  __shared__ uint64_t full[kPlaneRingStages], left[kPlaneRingStages];  // barriers: of copies, and of the warps that sum up
  const PlaneRingPlan& plan = params.plan;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const uint32_t zero = shared_address(zeros) + 32;  // words before and behind it are read, too
  const int channel = int(blockIdx.x) % params.channels, split = int(blockIdx.x) / params.channels;
  const int first = int(int64_t{plan.stages} * split / plan.splits), last = int(int64_t{plan.stages} * (split + 1) / plan.splits);
  if (threadIdx.x < kPlaneRingStages) {
    mbarrier::init(shared_address(full + threadIdx.x), 1);
    mbarrier::init(shared_address(left + threadIdx.x), 32 * kPlaneRingSumWarps);
    mbarrier::init_fence();
  }
  if (threadIdx.x < 32) zeros[lane] = 0;
  __syncthreads();

  const auto fill = [&](int index, int slot) {
    if (index >= last) return;
    const uint32_t to = shared_address(ring + slot * plan.stage_bytes());
    fill_stage<kTensors, kTaps>(params, channel, PlaneStage(params, index), to, shared_address(full + slot));
  };
  const auto for_each_stage = [&](auto&& use) {
    for (int index = first, slot = 0, parity = 0; index < last; ++index) {
      mbarrier::wait(shared_address(full + slot), parity);
      use(index, slot, parity, PlaneStage(params, index), ring + slot * plan.stage_bytes());
      if (++slot == kPlaneRingStages) slot = 0, parity ^= 1;
    }
  };
  if (warp == 0) {
    for (int slot = 0; slot < kPlaneRingStages; ++slot) fill(first + slot, slot);
    const PlaneConvolution<T, kTaps> convolve(params, channel);
    for_each_stage([&](int index, int slot, int parity, const PlaneStage& stage, char* at) {
      // Alone, results take the place of what was read. The stage before is filled anew once its own have left, and all warps have left it.
      char* const results = kSums ? ring + kPlaneRingStages * plan.stage_bytes() : at;
      convolve(stage, shared_address(at), zero, results, kSums ? plan.result_bytes : plan.slot_bytes, [&] {
        wait_until_read<0>();
        __syncwarp();
        if (index == first) return;
        const int before = (slot + kPlaneRingStages - 1) % kPlaneRingStages;
        if (kSums) mbarrier::wait(shared_address(left + before), slot == 0 ? parity ^ 1 : parity);
        fill(index - 1 + kPlaneRingStages, before);
      });
    });
    wait_until_read<0>();
  } else if constexpr (kSums) {
    PlaneProducts<T, kTaps> sums;
    for_each_stage([&](int, int slot, int, const PlaneStage& stage, char* at) {
      sums(params, channel, stage, shared_address(at), zero, warp - 1);
      mbarrier::arrive(shared_address(left + slot));
    });
    sums.store(params, channel, split * kPlaneRingSumWarps + warp - 1, products[warp - 1]);
  }
}

}  // namespace fusebackend::depthwise_conv
