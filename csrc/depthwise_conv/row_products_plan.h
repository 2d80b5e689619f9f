// The launch configuration of the weight's gradient of planes on tensor cores without shared memory (row_products.cuh), apart from the kernel.
#pragma once
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

constexpr int kRowProductsThreads = 128, kRowProductsBlocks = 5;  // of a multiprocessor
constexpr int kBandRows = 8, kChunkColumns = 16;                  // of the gradient, in a product

struct RowProductsPlan {
  bool fits;
  int columns;        // that a load has
  int bands, chunks;  // of an image
  int64_t units;      // of a channel
  int splits;         // of these, among blocks
};

RowProductsPlan row_products_plan(const Geometry& g, const Placement& grad, const Placement& x, int sm_count);

}  // namespace fusebackend::depthwise_conv
