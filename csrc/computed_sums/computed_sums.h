// What a program computes of several inputs, element by element: stored, or added along the rows of each image of a batch, out[s][b][c] = sum over r
// of result s of (input k at b, r, c). The kernel is compiled at run time, for a program, and for types and kinds of its inputs. No size and no
// stride is compiled into it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/integer_math.h"

namespace fusebackend::computed_sums {

constexpr int kMostInputs = 16, kMostOuts = 4, kMostNumbers = 16;  // program.py has the same
constexpr int64_t kMostRows = INT32_MAX;

// Element types, by the letters that they have in a variant.
enum Type : char { kFloat32 = 'f', kFloat16 = 'h', kBFloat16 = 'b', kUInt8 = 'u', kBool = 'o' };
constexpr int element_bytes(char type) { return type == kFloat32 ? 4 : type == kFloat16 || type == kBFloat16 ? 2 : 1; }

// How an input lies: at row r of all images, and column c, it has data[(r / divisor % period) * row_stride + c * column_stride]; of kTransposed, whose
// rows are those of images of `period` rows of `divisor` pixels, data[image * period * divisor + r % divisor * period + r / divisor % period].
enum Kind : char {
  kRows = 'r',     // a row of its own for each row, columns side by side
  kGroups = 'g',   // the same, but rows share one (of an image, say), or the rows come again
  kFactors = 'f',  // one number for all columns of a row, or of several
  kTransposed = 't',  // one number for all columns of a row, of images that lie column by column: so Inductor leaves statistics of images
  kImages = 'i',   // one row for all rows of an image that are added: is read once for each image
  kColumns = 'c',  // one row for all: is read once
  kScalar = 's',   // one number
};
constexpr bool is_read_once(char kind) { return kind == kImages || kind == kColumns || kind == kScalar; }
constexpr bool is_one_row(char kind) { return kind == kImages || kind == kColumns; }
constexpr bool is_vector(char kind) { return kind == kRows || kind == kGroups; }

struct Lies {
  Kind kind;
  int64_t row_stride, divisor, period;
};
// An input of these sizes and strides, which broadcast to those of `domain`, whose first `batch_dims` are those of the batch, if
// rows are added. None if it does not lie in one of these ways.
std::optional<Lies> describe(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, const std::vector<int64_t>& domain, int64_t batch_dims);

// A program as it is compiled: its numbers, but for those such as 0.5 that most programs have, are arguments of the kernel, n0, n1, ... in the
// text. So norms of tensors of many sizes, which divide by these, share a kernel.
struct Program {
  std::string text;
  std::vector<float> numbers;
};
const Program& prepare(const std::string& program);

// What one compiled kernel is for.
struct Variant {
  std::string program;       // the text of a Program
  int numbers;               // that it has
  std::string types, kinds;  // a letter an input
  int outs;                  // results of the program
  std::string stored;        // a letter for each result, as which it is stored; none if results are added
  int vector;                // columns of a thread: of each row it loads so many elements, with loads of at most 16 bytes

  bool adds() const { return stored.empty(); }
  int rows_at_once() const;  // whose loads a thread has under way
  int blocks_at_once() const;  // of a multiprocessor, of the most threads: by the registers that a thread needs
  std::string key() const;
};
// The longest vector that loads of 16 bytes and the registers of a thread allow; 1, 2, 4 or 8.
int widest_vector(const Variant& v);

// The text that is compiled; its kernel is computed_sums_rows or computed_rows. Throws std::runtime_error: the program is malformed.
std::string source(const Variant& v);
// The body of the function that computes the results (program.cpp).
std::string translate(const std::string& program, int numbers, const std::string& types, int outs);

// The kernels' parameters; inputs.cuh has the same.
struct Input {
  const void* data;
  int64_t row_stride;  // in elements
  FastDiv group, period;
};
struct Arguments {
  Input inputs[kMostInputs];
  void* out[kMostOuts];   // the results; of a kernel that is followed by another, `out[0]` are sums in fp32, [sum][image][split][column]
  int64_t columns;
  uint32_t batch, rows, tiles, splits;  // `rows` of each image
  float scale;                          // of sums: 1, or 1 / `rows` for means
  int32_t tile_vectors, lanes, finished;
  int32_t results[kMostOuts];  // their types
  float numbers[kMostNumbers];
};

// The longest vector, up to the widest, at whose multiples all rows begin that are read by vectors, and that divides the columns.
int vector_of(const Variant& v, const Arguments& p);

// How a GPU computes it: a block has some columns of some of an image's rows, `lanes` rows at once.
constexpr int kMostThreads = 512;
struct Plan {
  int tile_vectors;  // of a row, that one block has
  int lanes, threads;
  int64_t batch;
  int64_t tiles;     // blocks beside one another
  int64_t splits;    // blocks that share an image's rows: each takes every splits-th group of `lanes` rows

  int64_t blocks() const { return batch * tiles * splits; }
  // What blocks leave of each sum for the second kernel. None where one block sums all rows of a column.
  int64_t partials(int64_t columns) const { return splits > 1 ? batch * splits * columns : 0; }
};
Plan make_plan(const Variant& v, int64_t batch, int64_t rows, int64_t columns, int multiprocessors);
// Each thread has its sums there.
inline int shared_bytes(const Variant& v, int threads) { return v.adds() ? v.outs * v.vector * threads * int(sizeof(float)) : 0; }

}  // namespace fusebackend::computed_sums
