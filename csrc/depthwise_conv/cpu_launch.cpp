#include "depthwise_conv/cpu_launch.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/cpu_features.h"
#include "common/facts.h"
#include "common/integer_math.h"
#include "depthwise_conv/cpu_loops.h"
#include "depthwise_conv/cpu_tiles.h"
#include "depthwise_conv/cpu_vector_kernels.h"

namespace fusebackend::depthwise_conv {
namespace {

constexpr int64_t kMostTileFloats = int64_t{1} << 20;
constexpr int64_t kMostConvolutions = 16;  // that x's gradient is made of
constexpr int64_t kUnits = 64;             // enough for the threads of most CPUs

const CpuKernels& kernels() {
  static const CpuKernels k = may_use_avx512() ? avx512_kernels() : vector_kernels();
  return k;
}

enum class Route { kLoops, kChannels, kPlanes };

// x's columns side by side, and small tiles of them.
bool has_planes(const Geometry& g, const Strides& x) { return (x.w == 1 || g.in.w == 1) && tile_plan(g).tile_floats() <= kMostTileFloats; }

Route route_of(const ForwardParams& p) {
  const Geometry& g = p.g;
  if (p.dtype == DType::kFloat64) return Route::kLoops;
  if (along_channels(p.y_stride, g.outputs(), g.out.w))
    return g.multiplier == 1 && p.x_stride.c == 1 && g.channels >= kernels().lanes ? Route::kChannels : Route::kLoops;
  return has_planes(g, p.x_stride) ? Route::kPlanes : Route::kLoops;
}

Route route_of(const WeightGradParams& p) {
  const Geometry& g = p.g;
  if (p.dtype == DType::kFloat64) return Route::kLoops;
  if (along_channels(p.grad_stride, g.outputs(), g.out.w))
    return g.multiplier == 1 && p.x_stride.c == 1 && g.channels >= kernels().lanes ? Route::kChannels : Route::kLoops;
  return (p.grad_stride.w == 1 || g.out.w == 1) && has_planes(g, p.x_stride) ? Route::kPlanes : Route::kLoops;
}

// Along one dim: results that leave the remainder `phase` when divided by the stride, as a convolution of stride 1.
struct Phase {
  int64_t results, first_tap, tap_step, taps, pad, dilation;
};
Phase phase_of(int64_t phase, int64_t in, int64_t taps, int64_t stride, int64_t pad, int64_t dilation) {
  const int64_t common = std::gcd(stride, dilation), step = stride / common;
  Phase f = {in > phase ? ceil_div(in - phase, stride) : 0, 0, step, 0, 0, dilation / common};
  // The result at u * stride + phase takes tap b of the gradient at (u * stride + phase + pad - b * dilation) / stride, where that is whole.
  for (int64_t b = 0; b < std::min(step, taps); ++b) {
    if ((phase + pad - b * dilation) % stride != 0) continue;
    f.first_tap = b, f.taps = ceil_div(taps - b, step);
    f.pad = (f.taps - 1) * f.dilation - (phase + pad - b * dilation) / stride;
  }
  return f;
}

struct Facts {
  Route route;
  double products, loaded, kernels;
};

std::string text(const Facts& f) {
  FactText facts;
  facts.add("channels", f.route == Route::kChannels).add("planes", f.route == Route::kPlanes).add("products", f.products).add("loaded", f.loaded)
      .add("kernels", f.kernels);
  return facts.str();
}

// Of results of `g`, whatever is summed up for them.
Facts facts_of(Route route, const Geometry& g) {
  const double results = double(g.batch) * double(g.outputs()) * double(g.out.h) * double(g.out.w), lanes = double(kernels().lanes);
  const double wide = double(route == Route::kChannels ? g.outputs() : g.out.w);
  const double share = route == Route::kLoops || wide == 0 ? 1 : std::ceil(wide / lanes) * lanes / wide;
  const TilePlan plan = route == Route::kPlanes ? tile_plan(g) : TilePlan{};
  return {route, results * share * double(g.tap_count()), double(g.batch) * double(g.outputs()) * double(plan.tiles()) * double(plan.tile_floats()), 1};
}

}  // namespace

std::string cpu_forward_work(const ForwardParams& p) { return text(facts_of(route_of(p), p.g)); }

std::string cpu_input_grad_work(const InputGradParams& p) {
  Facts all = {Route::kLoops, 0, 0, 0};
  for (const ForwardParams& f : input_grad_convolutions(p)) {
    const Facts one = facts_of(route_of(f), f.g);
    all = {one.route, all.products + one.products, all.loaded + one.loaded, all.kernels + 1};
  }
  return text(all.kernels > 0 ? all : facts_of(Route::kLoops, p.g));
}

std::string cpu_weight_grad_work(const WeightGradParams& p) { return text(facts_of(route_of(p), p.g)); }

int64_t forward_units(const ForwardParams& p) {
  switch (route_of(p)) {
    case Route::kChannels: return p.g.batch * p.g.out.h;
    case Route::kPlanes: return p.g.batch * p.g.outputs() * tile_plan(p.g).tiles();
    default: return loops_forward_units(p);
  }
}

void forward(const ForwardParams& p, int64_t begin, int64_t end) {
  switch (route_of(p)) {
    case Route::kChannels: return kernels().forward_channels(p, begin, end);
    case Route::kPlanes: return kernels().forward_planes(p, begin, end);
    default: return loops_forward(p, begin, end);
  }
}

std::vector<ForwardParams> input_grad_convolutions(const InputGradParams& p) {
  const Geometry& g = p.g;
  std::vector<ForwardParams> found;
  if (g.multiplier != 1 || g.stride.h * g.stride.w > kMostConvolutions || p.dtype == DType::kFloat64) return {};
  for (int64_t i = 0; i < g.stride.h; ++i) {
    for (int64_t j = 0; j < g.stride.w; ++j) {
      const Phase h = phase_of(i, g.in.h, g.taps.h, g.stride.h, g.pad.h, g.dilation.h), w = phase_of(j, g.in.w, g.taps.w, g.stride.w, g.pad.w, g.dilation.w);
      if (h.results == 0 || w.results == 0) continue;
      ForwardParams f = {};
      f.g = g;
      f.g.in = g.out, f.g.out = {h.results, w.results};
      f.g.taps = h.taps && w.taps ? Pair{h.taps, w.taps} : Pair{0, 0};
      f.g.stride = {1, 1}, f.g.pad = {h.pad, w.pad}, f.g.dilation = {h.dilation, w.dilation};
      f.dtype = p.dtype, f.x = p.grad, f.x_stride = p.grad_stride;
      f.y = static_cast<char*>(p.dx) + (i * p.dx_stride.h + j * p.dx_stride.w) * element_size(p.dtype);
      f.y_stride = {p.dx_stride.n, p.dx_stride.c, p.dx_stride.h * g.stride.h, p.dx_stride.w * g.stride.w};
      const int64_t last_h = h.first_tap + (h.taps - 1) * h.tap_step, last_w = w.first_tap + (w.taps - 1) * w.tap_step;
      f.w = static_cast<const char*>(p.w) + (f.g.taps.h ? last_h * p.w_stride.h + last_w * p.w_stride.w : 0) * element_size(p.dtype);
      f.w_stride = {p.w_stride.n, p.w_stride.c, -p.w_stride.h * h.tap_step, -p.w_stride.w * w.tap_step};
      if (route_of(f) == Route::kLoops) return {};
      found.push_back(f);
    }
  }
  return found;
}

int64_t weight_grad_parts(const WeightGradParams& p) {
  if (route_of(p) == Route::kLoops) return 0;
  return std::clamp<int64_t>(ceil_div(kUnits, weight_grad_units(p, 1)), 1, std::max<int64_t>(p.g.batch, 1));
}

int64_t weight_grad_partials(const WeightGradParams& p, int64_t parts) { return parts * p.g.outputs() * ((p.dw ? p.g.tap_count() : 0) + 1); }

int64_t weight_grad_units(const WeightGradParams& p, int64_t parts) {
  const int64_t lanes = kVectorsOfUnit * kernels().lanes;
  return parts * (route_of(p) == Route::kChannels ? ceil_div(p.g.channels, lanes) : p.g.outputs());
}

void weight_grad(const WeightGradParams& p, double* partial, int64_t parts, int64_t begin, int64_t end) {
  (route_of(p) == Route::kChannels ? kernels().weight_grad_channels : kernels().weight_grad_planes)(p, partial, parts, begin, end);
}

void reduce_weight_grad(const WeightGradParams& p, const double* partial, int64_t parts) {
  const int64_t taps = p.dw ? p.g.tap_count() : 0, outputs = p.g.outputs();
  dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t o = 0; o < outputs; ++o) {
      for (int64_t t = 0; t <= taps; ++t) {
        double sum = 0;
        for (int64_t part = 0; part < parts; ++part) sum += partial[(part * outputs + o) * (taps + 1) + t];
        if (t < taps) narrow(float(sum), static_cast<T*>(p.dw)[o * taps + t]);
        else if (p.db) narrow(float(sum), static_cast<T*>(p.db)[o]);
      }
    }
  });
}

}  // namespace fusebackend::depthwise_conv
