#include "depthwise_conv/work.h"

#include <algorithm>

#include "common/facts.h"
#include "depthwise_conv/channel_ring_plan.h"
#include "depthwise_conv/channel_tile_plan.h"
#include "depthwise_conv/dilated_rows_plan.h"
#include "depthwise_conv/outer_products_plan.h"
#include "depthwise_conv/register_window_plan.h"
#include "depthwise_conv/rolling_band_plan.h"
#include "depthwise_conv/rolling_window_plan.h"
#include "depthwise_conv/row_products_plan.h"
#include "depthwise_conv/toeplitz_plan.h"

namespace fusebackend::depthwise_conv {
namespace {

struct Facts {
  bool band, channel, dilated, rolling, rows, toeplitz, window, outer;
  double blocks, shared_bytes, loaded, products, rows_of_taps;
  bool transposes, elements;
  double partial_bytes;
  double ring_rows;
};

std::string text(const Facts& f) {
  FactText facts;
  facts.add("band", f.band).add("channel", f.channel).add("dilated", f.dilated).add("rolling", f.rolling).add("rows", f.rows).add("toeplitz", f.toeplitz).add("window", f.window)
      .add("outer", f.outer).add("blocks", f.blocks).add("shared_bytes", f.shared_bytes).add("loaded", f.loaded).add("products", f.products)
      .add("rows_of_taps", f.rows_of_taps).add("transposes", f.transposes).add("elements", f.elements).add("partial_bytes", f.partial_bytes)
      .add("ring_rows", f.ring_rows);
  return facts.str();
}

bool is_elements(Move m) { return m == Move::kElements || m == Move::kSparse; }

// Of rolling_window.cuh.
Facts rolling_window(const RollingWindowPlan& p, const Geometry& g) {
  Facts f = {};
  f.rolling = true;
  const int taps = int(g.taps.w), step = rolling_step(p.form);
  const double strips = double(p.strips) * double(g.channels), rows = strips * p.rows, loaded = strips * ((p.rows - 1) * step + taps);
  f.blocks = double(p.strip_tiles * p.channel_tiles), f.shared_bytes = double(p.groups * rolling_channels(taps, p.form) * taps * taps * 4);
  f.loaded = loaded * rolling_window_columns(taps, p.form), f.products = rows * rolling_columns(taps, p.form) * double(g.tap_count());
  return f;
}

// Of rolling_input_grad.cuh.
Facts rolling_input_grad(const RollingWindowPlan& p, const Geometry& g) {
  Facts f = {};
  f.rolling = true;
  const int taps = int(g.taps.w), columns = kRollingInputColumns;
  const double rows = double(p.strips) * double(g.channels) * (p.rows + taps / 2);
  f.blocks = double(p.strip_tiles * p.channel_tiles), f.shared_bytes = double(p.groups * rolling_channels(taps, p.form) * taps * taps * 4);
  f.loaded = rows * (columns + taps / 2), f.products = rows * columns * double(g.tap_count());
  return f;
}

// Of channel_band.cuh, or channel_products.cuh.
Facts channel_tile(const ChannelTilePlan& p, const Geometry& g, bool weight_grad) {
  Facts f = {};
  f.channel = true;
  const double tiles = double(p.groups) * p.column_tiles * p.channel_tiles, source_rows = double(p.rows) + double(g.taps.h) - 1;
  f.blocks = weight_grad ? double(p.splits) * p.channel_tiles : tiles, f.shared_bytes = p.shared_bytes;
  f.loaded = tiles * p.segments * p.words * 2 * kTileChannels * (weight_grad ? source_rows + p.rows : source_rows);
  f.rows_of_taps = tiles * kTileChannels * source_rows * double(g.taps.h), f.products = f.rows_of_taps * 2048;
  return f;
}

// Of dilated_rows.cuh. What the taps' loads share counts once: the L1 cache has it.
Facts dilated_rows(const Geometry& g, double rows, double blocks) {
  Facts f = {};
  f.dilated = true;
  f.blocks = blocks, f.loaded = rows * double(std::min(g.in.w, g.out.w + (g.taps.w - 1) * g.dilation.w));
  f.products = rows * double(g.out.w * g.taps.w);
  return f;
}

// The kernels that come first. Neither is set if none fits. What row_ring takes is described as rolling_window's, which takes
// longer, what plane_ring takes as rolling_band's and row_products', what strided_ring takes as toeplitz' and outer_products', and what channel_ring takes
// as channel_band's, with the rows of its blocks.
Facts rolling(const Geometry& g, const Placement& source, const Placement& target, DType dtype, int sm_count) {
  Facts f = {};
  const DilatedRowsPlan d = dilated_rows_plan(g, dtype, source, target);
  // In blocks of as many threads as the other kernels of rows have: what a block costs, its threads do.
  if (d.fits) return dilated_rows(g, double(g.batch * g.channels * g.out.h), double(d.grid()) * kDilatedRowsThreads / kDilatedRowsSumThreads);
  const RollingBandPlan b = is_half(dtype) ? rolling_band_plan(g, source, target, sm_count) : RollingBandPlan{};
  if (b.fits) {
    f.band = true;
    const double source_rows = double(b.warps) * double(round_up(b.rows + g.taps.h - 1, rows_ahead(int(g.taps.h))));
    f.blocks = double(b.grid()), f.loaded = double(b.warps) * double(b.rows + g.taps.h - 1) * 256;
    f.rows_of_taps = source_rows * double(g.taps.h), f.products = f.rows_of_taps * 2048;
    return f;
  }
  const ChannelTilePlan c = is_half(dtype) ? channel_tile_plan(g, source, target, false, sm_count) : ChannelTilePlan{};
  if (c.fits) {
    f = channel_tile(c, g, false);
    const ChannelRingPlan r = channel_ring_plan(g, source, target, sm_count);
    if (r.fits) f.ring_rows = r.rows;
    return f;
  }
  const RollingWindowPlan w = rolling_window_plan(g, dtype, source, target, RollingResult::kForward, sm_count);
  return w.fits ? rolling_window(w, g) : f;
}

Facts convolution(const Geometry& g, bool transposed, const Strides& from, const Strides& to, DType dtype, int sm_count) {
  const Pair in = transposed ? g.out : g.in, out = transposed ? g.in : g.out;
  const double results = double(g.batch) * double(transposed ? g.channels : g.outputs()) * double(out.h * out.w);
  const Placement source = {from, transposed ? g.outputs() : g.channels, in.w, 0}, target = {to, transposed ? g.channels : g.outputs(), out.w, 0};
  const bool is_forward = !transposed || (g.multiplier == 1 && g.stride.h == 1 && g.stride.w == 1);
  const Geometry forward = transposed ? reversed(g) : g;
  Facts f = is_forward ? rolling(forward, source, target, dtype, sm_count) : Facts{};
  if (f.band || f.channel || f.dilated || f.rolling) return f;
  if (!is_forward) {
    const RollingWindowPlan w = rolling_window_plan(g, dtype, target, source, RollingResult::kInputGrad, sm_count);
    if (w.fits) return rolling_input_grad(w, g);
  }
  const ToeplitzPlan t = is_half(dtype) ? toeplitz_plan(g, transposed, source, target, sm_count) : ToeplitzPlan{};
  if (t.fits) {
    f.toeplitz = true;
    f.blocks = double(t.grid()), f.shared_bytes = t.shared_bytes;
    f.loaded = f.blocks * t.source.planes() * t.source.rows * t.source.columns;
    const double strips = f.blocks * t.target.planes() * t.target.rows * t.segments / 16;
    f.rows_of_taps = strips * double(g.taps.h) / t.phases;
    f.products = f.rows_of_taps * t.blocks * 128 * t.span * 8;
    f.transposes = t.fill == Move::kChannels || t.store == Move::kChannels;
    f.elements = is_elements(t.fill) || is_elements(t.store);
    return f;
  }
  if (dtype == DType::kFloat32 && has_register_window(g)) {
    const RegisterWindowPlan w = register_window_forward_plan(forward, sm_count);
    if (w.fits) {
      f.window = true;
      f.blocks = double(w.tiles() * g.channels), f.shared_bytes = w.shared_bytes;
      f.loaded = f.blocks * w.images * w.x_rows * (w.columns + g.taps.w - 1);
      f.products = f.blocks * w.images * w.rows * w.columns * double(g.tap_count());
      return f;
    }
  }
  f.blocks = results / 1024, f.products = results * double(g.tap_count()) * (transposed ? double(g.multiplier) : 1);
  f.loaded = f.products;
  return f;
}

}  // namespace

std::string forward_work(const WorkParams& p, int sm_count) { return text(convolution(p.g, false, p.x_stride, p.y_stride, p.dtype, sm_count)); }
std::string input_grad_work(const WorkParams& p, int sm_count) { return text(convolution(p.g, true, p.y_stride, p.dx_stride, p.dtype, sm_count)); }

std::string weight_grad_work(const WorkParams& p, int sm_count) {
  const Geometry& g = p.g;
  Facts f = {};
  const double taps = double(g.tap_count()), results = double(g.batch) * double(g.outputs()) * double(g.out.h * g.out.w);
  const Placement grad = {p.y_stride, g.outputs(), g.out.w, 0}, x = {p.x_stride, g.channels, g.in.w, 0};
  const DilatedRowsPlan d = dilated_rows_weight_grad_plan(g, p.dtype, grad, x, sm_count);
  const RowProductsPlan r = is_half(p.dtype) ? row_products_plan(g, grad, x, sm_count) : RowProductsPlan{};
  const ChannelTilePlan c = is_half(p.dtype) && !r.fits ? channel_tile_plan(g, x, grad, true, sm_count) : ChannelTilePlan{};
  const RollingWindowPlan v = r.fits || c.fits ? RollingWindowPlan{} : rolling_window_plan(g, p.dtype, x, grad, RollingResult::kWeightGrad, sm_count);
  const OuterProductsPlan o = is_half(p.dtype) && !r.fits && !c.fits && !v.fits ? outer_products_plan(g, grad, x, sm_count) : OuterProductsPlan{};
  double splits = 1;
  if (d.fits) {
    f = dilated_rows(g, results / double(g.out.w), double(g.channels) * d.splits), splits = d.splits;
    f.loaded += results;
  } else if (r.fits) {
    f.rows = true, splits = r.splits;
    f.blocks = double(g.channels) * r.splits;
    const double units = double(r.units) * double(g.channels);
    f.loaded = units * (16 * kChunkColumns + kBandRows * (kChunkColumns + 4 * 8));
    f.rows_of_taps = units * double(g.taps.w), f.products = f.rows_of_taps * 2048;
  } else if (c.fits) {
    f = channel_tile(c, g, true), splits = c.splits;
  } else if (v.fits) {
    f.rolling = true, splits = double(v.strip_tiles);
    f.blocks = double(v.strip_tiles * v.channel_tiles);
    const int columns = rolling_columns(int(g.taps.w), v.form), step = rolling_step(v.form);
    const double strips = double(v.strips) * double(g.channels), rows = strips * v.rows, loaded = strips * ((v.rows - 1) * step + double(g.taps.h));
    f.loaded = rows * columns + loaded * rolling_window_columns(int(g.taps.w), v.form), f.products = rows * columns * taps;
  } else if (o.fits) {
    f.outer = true, splits = o.splits;
    f.blocks = double(o.grid()), f.shared_bytes = o.shared_bytes;
    const double tiles = double(o.channel_tiles * o.tap_tiles * o.tiles());
    f.loaded = tiles * (double(o.grad.planes()) * o.grad.rows * o.grad.columns + double(o.x.planes()) * o.x.rows * o.x.columns);
    f.rows_of_taps = double(o.channel_tiles * o.tiles()) * o.grad.planes() * o.grad.rows * o.column_blocks / 16 * double(g.taps.h);
    f.products = f.rows_of_taps * 256 * o.blocks * 8;
    f.transposes = o.fill_grad == Move::kChannels || o.fill_x == Move::kChannels;
    f.elements = is_elements(o.fill_grad) || is_elements(o.fill_x);
  } else {
    const bool window = p.dtype == DType::kFloat32 && has_register_window(g) && g.taps.h <= g.taps.w;
    const RegisterWindowPlan w = window ? register_window_weight_grad_plan(g, sm_count) : RegisterWindowPlan{};
    f.window = w.fits;
    if (w.fits) {
      splits = w.splits;
      f.blocks = double(w.splits) * double(g.channels), f.shared_bytes = w.shared_bytes;
      const double tiles = double(w.tiles()) * double(g.channels) * w.images;
      f.loaded = tiles * (double(w.rows) * w.columns + double(w.x_rows) * (w.columns + double(g.taps.w) - 1));
      f.products = tiles * w.rows * w.columns * taps;
    } else {
      f.blocks = double(g.outputs()) * (taps + 1), f.products = results * taps, f.loaded = 2 * f.products;
    }
  }
  f.partial_bytes = 4 * splits * double(g.outputs()) * (taps + 1);
  return text(f);
}

std::string gradients_work(const WorkParams& p, int sm_count) {
  const Geometry& g = p.g;
  const Placement grad = {p.y_stride, g.outputs(), g.out.w, 0}, x = {p.x_stride, g.channels, g.in.w, 0}, dx = {p.dx_stride, g.channels, g.in.w, 0};
  const DilatedRowsPlan d = dilated_rows_gradients_plan(g, p.dtype, grad, x, dx, true, sm_count);
  if (!d.fits) return text({});
  const double inputs = double(g.batch) * double(g.channels) * double(g.in.h * g.in.w);
  Facts f = dilated_rows(reversed(g), inputs / double(g.in.w), double(g.channels) * d.splits);
  f.loaded += inputs, f.products *= 2;  // one of each window's elements is for x's gradient, the other for the weight's
  f.partial_bytes = 4 * double(d.splits) * double(g.channels) * double(g.tap_count() + 1);
  return text(f);
}

}  // namespace fusebackend::depthwise_conv
