// Tiles of the operands in shared memory, as they lie in memory, and the copies that fill them. They run several stages ahead of what is computed,
// into the next tile of the result too.
#pragma once

#include "common/cuda_common.cuh"
#include "common/integer_math.h"
#include "strided_bmm/strided_bmm.h"

namespace fusebackend::strided_bmm {

// 16 bytes, of which those from `bytes` on are zeros.
__device__ __forceinline__ void cp_async_16_of(uint32_t shared, const void* global, int bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
#endif
}

template <typename Word>
__device__ __forceinline__ void read_vector(Word (&v)[4], uint32_t shared) {
  static_assert(sizeof(Word) == 4);
  uint32_t w[4];
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(shared) : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = reinterpret_cast<Word&>(w[i]);
}

// A vector to memory. The compiler divides an ordinary store of one that is gathered from registers, and memory then takes each part as a whole.
__device__ __forceinline__ void write_vector(void* global, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(global), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// A tile of kRows rows and kDepth terms of kEntries batch entries. Vectors of 16 bytes are exchanged within a row, so that lanes that read the same
// vector of eight rows read other banks.
template <typename T, Inner kInner, int kRows, int kDepth, int kEntries, int kThreads>
struct Tile {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kEntryBytes = kRows * kDepth * sizeof(T), kBytes = kEntryBytes * kEntries;
  static constexpr int kTermVectors = kDepth / kVector, kRowVectors = kRows / kVector;
  static constexpr int kBatchVectors = kTileEntries / kVector;  // of the entries at one row and one term
  // Copies by all threads: of so many vectors side by side, in so many lines each; and how many they are.
  static constexpr int kAlong = kInner == Inner::kTerms ? kTermVectors : kInner == Inner::kRows ? kRowVectors : kBatchVectors;
  static constexpr int kLines = kThreads / kAlong, kCopies = kBytes / 16 / kThreads;
  static_assert(kBytes % (16 * kThreads) == 0 && kThreads % kAlong == 0);
  static_assert(kInner != Inner::kTerms || kTermVectors == 8 || kTermVectors == 2);
  static_assert(kInner != Inner::kRows || kRowVectors % 8 == 0 || kRowVectors == 4);
  // The lines of one copy are those of other entries, if there are several, or leave the exchange of vectors as it is.
  static constexpr int kEntryLines = kInner == Inner::kTerms ? kRows : kDepth;
  static_assert(kEntries == 1 || (kInner == Inner::kBatch ? kEntries == kTileEntries && kLines / kDepth % 8 == 0
                                                          : kLines % kEntryLines == 0));
  static_assert(kEntries > 1 || kLines % 8 == 0);

  // Of vectors of terms.
  static __device__ __forceinline__ int term_offset(int row, int vector) {
    return row * kTermVectors * 16 + ((vector ^ (kTermVectors == 8 ? row & 7 : row >> 2 & 1)) << 4);
  }
  // Of vectors of rows.
  static __device__ __forceinline__ int row_offset(int term, int vector) {
    return term * kRowVectors * 16 + ((vector ^ (kRowVectors >= 8 ? term & 7 : term >> 1 & 3)) << 4);
  }
  // Of vectors of batch entries.
  static __device__ __forceinline__ int batch_offset(int row, int term, int vector) {
    return (row * kDepth * kBatchVectors + ((term * kBatchVectors + vector) ^ (row & 7))) * 16;
  }

  // A thread's vectors of each tile: the i-th is i steps behind its first one, along the batch entries if there are several, else along the dim
  // that is not the vectors' own. Of vectors of batch entries, along the dim by which lanes do not run.
  struct Copy {
    int row, term;     // of the first vector
    int offset, step;  // in memory, in elements
    uint32_t to;       // in the tile
    bool by_rows;      // vectors of batch entries: lanes run along rows rather than terms

    __device__ __forceinline__ explicit Copy(const Operand& at) : by_rows(at.row < at.term) {
      const int vector = threadIdx.x % kAlong, line = threadIdx.x / kAlong;
      const int row_stride = int(at.row), term_stride = int(at.term), batch_stride = int(at.batch);
      if constexpr (kInner == Inner::kTerms) {
        row = line % kEntryLines, term = vector * kVector;
        offset = line / kEntryLines * batch_stride + row * row_stride + term;
        step = kEntries > 1 ? kLines / kEntryLines * batch_stride : kLines * row_stride;
        to = line / kEntryLines * kEntryBytes + term_offset(row, vector);
      } else if constexpr (kInner == Inner::kRows) {
        term = line % kEntryLines, row = vector * kVector;
        offset = line / kEntryLines * batch_stride + term * term_stride + row;
        step = kEntries > 1 ? kLines / kEntryLines * batch_stride : kLines * term_stride;
        to = line / kEntryLines * kEntryBytes + row_offset(term, vector);
      } else {
        row = by_rows ? line % kRows : line / kDepth, term = by_rows ? line / kRows : line % kDepth;
        offset = row * row_stride + term * term_stride + vector * kVector;
        step = by_rows ? kLines / kRows * term_stride : kLines / kDepth * row_stride;
        to = batch_offset(row, term, vector);
      }
    }

    // `from`: the tile's first element. `rows`, `terms`: how many there are from there on.
    __device__ __forceinline__ void run(uint32_t tile, const T* from, int rows, int terms) const {
      if (kInner == Inner::kBatch && by_rows) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          const int further = i * (kLines / kRows);  // terms, of which the first one's has other bits
          copy(tile + (to ^ further * kBatchVectors << 4), from, i, row < rows && term + further < terms ? 16 : 0);
        }
      } else if constexpr (kInner == Inner::kBatch) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) copy(tile + to + i * kThreads * 16, from, i, term < terms && row + i * (kLines / kDepth) < rows ? 16 : 0);
      } else {
        const int line = kInner == Inner::kTerms ? row : term, lines = kInner == Inner::kTerms ? rows : terms;
        const int left = kInner == Inner::kTerms ? terms - term : rows - row;
        const int bytes = min(max(left, 0), kVector) * int(sizeof(T));
#pragma unroll
        for (int i = 0; i < kCopies; ++i) copy(tile + to + i * kThreads * 16, from, i, line + (kEntries > 1 ? 0 : i * kLines) < lines ? bytes : 0);
      }
    }
    __device__ __forceinline__ void copy(uint32_t place, const T* from, int i, int bytes) const {
      cp_async_16_of(place, bytes ? from + (offset + i * step) : from, bytes);
    }
  };
};

// Which tiles a kernel has. The threads of a block share a tile of the result; kBlocks such blocks share a multiprocessor.
template <typename T_, Route kRoute_, Inner kX_, Inner kY_, int kStages_, int kBlocks_>
struct Traits {
  using T = T_;
  static constexpr Route kRoute = kRoute_;
  static constexpr Inner kX = kX_, kY = kY_;
  static constexpr bool kHasWarpPerEntry = has_warp_per_entry(kRoute, sizeof(T));
  static constexpr int kThreads = kHasWarpPerEntry ? 32 * kTileEntries : 128, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kEntries = kRoute == Route::kOneEntry ? 1 : kTileEntries;
  static constexpr int kTileRows = tile_of(kRoute, sizeof(T)).rows, kTileColumns = tile_of(kRoute, sizeof(T)).columns;
  // Where batch entries are neighbours in x, or each is a warp's, a stage has all entries of few terms, else many terms of one entry.
  static constexpr bool kAllEntries = kRoute == Route::kFromBatch || kHasWarpPerEntry;
  static constexpr int kDepth = (kAllEntries ? 32 : 128) / sizeof(T), kStageEntries = kAllEntries ? kEntries : 1;
  static_assert(kRoute == Route::kFromBatch ? kX == Inner::kBatch && kY == Inner::kRows : kX != Inner::kBatch && kY != Inner::kBatch);
  using TileX = Tile<T, kX, kTileRows, kDepth, kStageEntries, kThreads>;
  using TileY = Tile<T, kY, kTileColumns, kDepth, kStageEntries, kThreads>;
  static constexpr int kStageBytes = TileX::kBytes + TileY::kBytes;
};

struct Tiles {
  int groups, rows, columns;  // of batch entries, rows and columns of the result
  int count;
  FastDiv by_span;
};

template <typename Traits>
struct Place {  // of a tile
  int outer, group, row, column;

  __device__ __forceinline__ Place(int tile, const Tiles& tiles) {
    group = tile % tiles.groups, tile /= tiles.groups;
    column = tile % tiles.columns * Traits::kTileColumns, tile /= tiles.columns;
    row = tile % tiles.rows * Traits::kTileRows, outer = tile / tiles.rows;
  }
};

// The stages in the order in which they are computed.
template <typename Traits>
struct Loader {
  using T = typename Traits::T;
  const Problem& p;
  const Tiles& tiles;
  const typename Traits::TileX::Copy copy_x;
  const typename Traits::TileY::Copy copy_y;
  const T *x, *y;
  int tile, entry = 0, term = 0, rows = 0, columns = 0;

  __device__ __forceinline__ Loader(const Problem& p, const Tiles& tiles) : p(p), tiles(tiles), copy_x(p.x), copy_y(p.y), tile(blockIdx.x) { begin_tile(); }
  __device__ __forceinline__ void begin_tile() {
    if (tile >= tiles.count) return;
    const Place<Traits> place(tile, tiles);
    rows = p.m - place.row, columns = p.n - place.column;
    const int first = place.group * p.span * Traits::kEntries;
    x = static_cast<const T*>(p.x.data) + place.outer * p.x.outer + first * p.x.batch + place.row * p.x.row;
    y = static_cast<const T*>(p.y.data) + place.outer * p.y.outer + first * p.y.batch + place.column * p.y.row;
  }
  __device__ __forceinline__ void load_next(uint32_t stage) {
    if (tile < tiles.count) {
      const int terms = p.k - term;
      copy_x.run(stage, x + entry * p.x.batch + term * p.x.term, rows, terms);
      copy_y.run(stage + Traits::TileX::kBytes, y + entry * p.y.batch + term * p.y.term, columns, terms);
      term += Traits::kDepth;
      if (term >= p.k) {
        term = 0, entry += Traits::kStageEntries;
        if (entry >= p.span * Traits::kEntries) entry = 0, tile += gridDim.x, begin_tile();
      }
    }
    cp_async_commit();
  }
};

}  // namespace fusebackend::strided_bmm
