"""The fp32 matmul kernels on a GPU: against fp64, at every layout, odd size and edge of fp32, and in torch.compile.

All three kernels run on a GPU of compute capability 9.0; which one a product gets elsewhere is chosen by the op.
"""

import itertools
import math

import pytest
import torch

import fusebackend
from fusebackend.backend import fuse
from fusebackend.patterns.fp32_matmul.match import LEAST_K, unavailable
from fusebackend.patterns.fp32_matmul.ops import constant, reference_planes

ops = torch.ops.fusebackend
KERNELS = ("wgmma", "mma", "ffma")
inf, nan = math.inf, math.nan


def device() -> torch.device:
    return torch.device("cuda")


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]


@pytest.fixture(autouse=True, scope="module")
def kernels():
    reason = unavailable(torch.device("cuda", 0))
    if reason:
        pytest.skip(reason)


def laid_out(sizes, order):
    """A random tensor in one of the memory orders that a matrix may have."""
    *batch, rows, columns = sizes
    if order == "rows":
        return torch.randn(*batch, rows, columns, device=device())
    if order == "columns":
        return torch.randn(*batch, columns, rows, device=device()).mT
    if order == "slice":  # odd pitch and offset: no vectorised access
        return torch.randn(*batch, rows + 1, columns + 3, device=device())[..., 1:, 3:]
    return torch.randn(*batch, 2 * rows, 2 * columns, device=device())[..., ::2, ::2]  # "steps": no unit stride


def errors(c, a, b, alpha=1.0, rest=0.0):
    """Normwise, and largest componentwise error relative to |A||B|, to fp64."""
    exact = alpha * (a.double() @ b.double()) + rest
    scale = abs(alpha) * (a.double().abs() @ b.double().abs()) + abs(rest)
    error = c.double() - exact
    return (error.norm() / exact.norm()).item(), (error.abs() / scale.clamp_min(1e-300)).max().item()


def product(a, b, d=None, alpha=1.0, beta=0.0, kernel="auto"):
    return ops.matmul(a, b, d, alpha, beta, None, -1, None, -1, kernel)


def one_by_one(a, b):
    """The product with each sum added up in its order, rounded to fp32 after each term."""
    c = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for k in range(a.shape[1]):
        c = (c.double() + a[:, k : k + 1].double() * b[k : k + 1].double()).float()
    return c


def check(c, a, b, kernel="auto", **kw):
    normwise, componentwise = errors(c, a, b, **kw)
    allowed = 4e-7 if kernel != "ffma" else 2e-7 + 3e-8 * a.shape[-1] ** 0.5  # as any sum in fp32, one term after the other
    if kernel == "ffma" and componentwise >= allowed and not kw:  # of very many elements the largest error may be larger
        allowed = 1.2 * errors(one_by_one(a, b), a, b)[1]
    assert normwise < allowed and componentwise < allowed, (normwise, componentwise)


SIZES = [(1, 1, 1), (3, 5, 7), (128, 256, 32), (129, 257, 33), (127, 255, 1234), (1000, 777, 65), (384, 768, 8192)]
SIZES += [(4095, 63, 513), (2900, 1500, 96)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m, n, k", SIZES)
def test_all_layouts_at_odd_sizes(m, n, k, kernel):
    for order_a, order_b in itertools.product(("rows", "columns", "slice", "steps"), repeat=2):
        a, b = laid_out((m, k), order_a), laid_out((k, n), order_b)
        check(product(a, b, kernel=kernel), a, b, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bias", ["none", "row", "column", "full", "scalar"])
@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (-2.0, 0.5), (1.5, 0.0)])
def test_bias_is_added_in_the_epilogue(bias, alpha, beta, kernel):
    a, b = torch.randn(5, 200, 300, device=device()), torch.randn(5, 300, 131, device=device())
    shape = {"none": None, "row": (131,), "column": (200, 1), "full": (5, 200, 131), "scalar": ()}[bias]
    d = None if shape is None else torch.randn(shape, device=device())
    c = product(a, b, d, alpha, beta, kernel)
    check(c, a, b, kernel, alpha=alpha, rest=0.0 if d is None else beta * d.double().expand(5, 200, 131))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bias_scaled_by_zero_is_not_read(kernel):
    a, b = torch.randn(64, 64, device=device()), torch.randn(64, 64, device=device())
    assert product(a, b, torch.full((64,), nan, device=device()), 1.0, 0.0, kernel).isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_broadcast_batch(kernel):
    a, b = torch.randn(6, 130, 70, device=device()), torch.randn(70, 50, device=device()).expand(6, 70, 50)
    check(product(a, b, kernel=kernel), a, b, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", [(0, 5, 7), (5, 0, 7), (5, 7, 0)])
def test_empty(sizes, kernel):
    m, n, k = sizes
    d = torch.randn(n, device=device())
    c = product(torch.randn(m, k, device=device()), torch.randn(k, n, device=device()), d, 1.0, 2.0, kernel)
    torch.testing.assert_close(c, (2 * d).expand(m, n))


@pytest.mark.parametrize("kernel", KERNELS)
def test_integers_are_exact(kernel):
    a, b = (torch.randint(-200, 200, shape, device=device()).float() for shape in ((300, 400), (400, 500)))
    assert torch.equal(product(a, b, kernel=kernel).double(), a.double() @ b.double())
    x = torch.randn(400, 400, device=device())
    assert torch.equal(product(x, torch.eye(400, device=device()), kernel=kernel), x)


def test_unknown_names_are_refused():
    x = torch.randn(8, 8, device=device())
    with pytest.raises(RuntimeError, match="kernel cutlass: auto, wgmma, mma and ffma are known"):
        product(x, x, kernel="cutlass")


# More planes than the limit: halved along m, along n, along the batch, along k.
LARGE = [((8192, 40000), (40000, 256)), ((256, 40000), (40000, 8192)), ((80, 1024, 2048), (80, 2048, 512)), ((130, 2**20), (2**20, 120))]


@pytest.mark.parametrize("kernel", ["wgmma", "mma"])
@pytest.mark.parametrize("a_shape, b_shape", LARGE)
def test_workspace_is_bounded(a_shape, b_shape, kernel):
    a, b = torch.randn(a_shape, device=device()), torch.randn(b_shape, device=device())
    d = torch.randn(b_shape[-1], device=device())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    c = product(a, b, d, 1.0, 1.0, kernel)
    assert torch.cuda.max_memory_allocated() - before < constant("planes_limit") + 20e6 + c.nbytes
    for rows in (slice(0, 64), slice(-64, None)):
        part = a[..., rows, :]
        check(c[..., rows, :], part, b, rest=d.double().expand(*part.shape[:-1], b_shape[-1]))


# Products that hardly take longer in pieces, and the most scratch memory, in MiB, that they take then: halved along k, m and the batch.
PIECES = [((8192, 50257), (50257, 768), 250), ((2**19, 512), (512, 384), 250), ((512, 512, 512), (512, 512, 512), 250)]


@pytest.mark.parametrize("a_shape, b_shape, most", PIECES)
def test_large_planes_are_made_in_pieces(a_shape, b_shape, most):
    a, b = torch.randn(a_shape, device=device()), torch.randn(b_shape, device=device())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    c = product(a, b)
    scratch = torch.cuda.max_memory_allocated() - before - c.nbytes
    assert scratch < most * 2**20 < 1.5 * (a.nbytes + b.nbytes)
    for rows in (slice(0, 64), slice(-64, None)):
        check(c[..., rows, :], a[..., rows, :], b)


# Bytes behind the result, in MiB: for all planes, and for those of a piece.
@pytest.mark.parametrize("free", [300, 100])
def test_where_memory_is_short_a_product_is_computed_in_pieces(free, starved):
    a, b = torch.randn(4096, 4096, device=device()), torch.randn(4096, 4096, device=device())
    with starved(4096 * 4096 * 4 + free * 2**20):
        c = ops.matmul(a, b, None, 1.0, 0.0)
    check(c[:64], a[:64], b)


def test_where_it_is_too_short_for_pieces_it_is_computed_without_planes(starved):
    """Batches with planes of their own are not divided."""
    a, b = torch.randn(4, 256, 4096, device=device()), torch.randn(4, 4096, 8192, device=device())
    planes = ops.matmul_planes(a, -1)
    with starved(4 * 256 * 8192 * 4 + 2**26):  # 768 MiB would be needed
        c = ops.matmul(a, b, None, 1.0, 0.0, planes, -1)
    assert torch.equal(c, product(a, b, kernel="ffma"))
    with starved(4 * 256 * 8192 * 4 + 2**26), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        ops.matmul(a, b, None, 1.0, 0.0, planes, -1, None, -1, "wgmma")


def test_planes_match_their_reference_and_serve_both_products():
    for order in ("rows", "columns", "slice"):
        x, y = laid_out((3, 300, 130), order), torch.randn(3, 130, 90, device=device())
        for inner in (-1, -2):
            planes = ops.matmul_planes(x, inner)
            size = x.shape[inner]
            assert torch.equal(planes[..., :size], reference_planes(x, inner)[..., :size])
            check(ops.matmul(x, y, None, 1.0, 0.0, planes, inner), x, y)
            check(ops.matmul(y.mT, x.mT, None, 1.0, 0.0, None, -1, planes, -3 - inner), y.mT, x.mT)
            check(ops.matmul(x.mT, x, None, 1.0, 0.0, planes, -3 - inner, planes, inner), x.mT, x)


def test_foreign_planes_are_refused():
    x = torch.randn(64, 32, device=device())
    with pytest.raises(RuntimeError, match="not the operand's planes"):
        ops.matmul(x, x.mT, None, 1.0, 0.0, ops.matmul_planes(torch.randn(64, 96, device=device()), -1), -1)


def samples(kind, m, n, k, generator):
    def normal(*shape):
        return torch.randn(*shape, device=device(), generator=generator)

    if kind == "normal":
        return normal(m, k), normal(k, n)
    if kind == "uniform":
        return [torch.rand(*shape, device=device(), generator=generator) for shape in ((m, k), (k, n))]
    if kind == "log-normal":
        return (4 * normal(m, k)).exp(), (4 * normal(k, n)).exp()
    half, w = normal(m, k // 2), normal(k // 2, n)
    return torch.cat([half, half], 1), torch.cat([w, -w * (1 + 1e-3 * normal(k // 2, n))], 0)


@pytest.mark.parametrize("kernel", ["wgmma", "mma"])
@pytest.mark.parametrize("k", [16, 64, 128, 256, 384, 512, 1024, 2048, 8192, 65536])
@pytest.mark.parametrize("kind", ["normal", "uniform", "log-normal", "cancelling"])
def test_no_less_accurate_than_cublas(kind, k, kernel):
    """Means over several products; over many where one element is most of the norm, and its one rounding the error."""
    generator = torch.Generator(device()).manual_seed(k)
    ours, cublas = [], []
    for _ in range((400 if k <= 2048 else 100) if kind == "log-normal" else 4):
        a, b = samples(kind, 768, 1024, k, generator)
        ours.append(errors(product(a, b, kernel=kernel), a, b))
        cublas.append(errors(a @ b, a, b))
    ours_norm, ours_component = torch.tensor(ours).mean(0)
    cublas_norm, cublas_component = torch.tensor(cublas).mean(0)
    assert ours_component <= cublas_component
    if kind != "log-normal" or k >= (LEAST_K if kernel == "wgmma" else 256):
        assert ours_norm <= cublas_norm
    else:  # the norm of such a product is its largest element, and this error one rounding of it, where cuBLAS's is little more
        assert ours_norm <= 1.25 * cublas_norm


@pytest.mark.parametrize("kernel", KERNELS)
def test_infinities_and_nans_as_fp32_gives(kernel):
    torch.manual_seed(0)
    a, b = torch.randn(300, 200, device=device()), torch.randn(200, 310, device=device()).round()
    a[5, 7], a[9, 3], a[20, 1], b[11, 4] = inf, -inf, nan, inf
    a[30, 2], a[30, 5], a[50, 8], b[8, 44] = inf, -inf, inf, 1e-40
    c, exact = product(a, b, kernel=kernel), (a.double() @ b.double()).float()
    assert torch.equal(c.isnan(), exact.isnan()) and torch.equal(c.isinf(), exact.isinf())
    assert torch.equal(c[c.isinf()], exact[c.isinf()])
    torch.testing.assert_close(c[c.isfinite()], exact[c.isfinite()], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [nan, inf])
def test_training_that_has_diverged_does_not_stand_still(value):
    def milliseconds(a, b):
        times = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            product(a, b)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    a, b = torch.randn(2048, 2048, device=device()), torch.randn(2048, 2048, device=device())
    c = product(torch.full_like(a, value), b)
    assert c.isnan().all()
    assert milliseconds(torch.full_like(a, value), b) < 10 * milliseconds(a, b)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_ends_of_the_range(kernel):
    top = torch.finfo(torch.float32).max
    a, b = torch.zeros(8, 64, device=device()), torch.zeros(64, 8, device=device())
    a[0, 0], a[1, 1], b[0, 0], b[0, 1], b[1, 1], b[1, 2] = top, -top, 1.0, 2.0, 1.0, 1e-30
    c = product(a, b, kernel=kernel)
    assert c[0, 0] == top and c[0, 1] == inf and c[1, 1] == -top and c[1, 2] == (a[1, 1] * b[1, 2])
    small, x = torch.randn(256, 256, device=device()) * 1e-32, torch.randn(256, 256, device=device())
    assert errors(product(small, x, kernel=kernel), small, x)[0] < 4e-7
    tiny = torch.randn(256, 256, device=device()) * 1e-38  # low bits are lost, at most 2^-134 an element
    lost = (product(tiny, x, kernel=kernel).double() - tiny.double() @ x.double()).abs()
    assert (lost <= 2.0**-134 * x.double().abs().sum(0) + 2.0**-149 * 256).all()


def test_same_result_every_time():
    for m, n, k in ((768, 768, 8192), (3072, 768, 2048), (1100, 1500, 700)):
        a, b = torch.randn(m, k, device=device()), torch.randn(k, n, device=device())
        first = ops.matmul(a, b, None, 1.0, 0.0)
        assert all(torch.equal(first, ops.matmul(a, b, None, 1.0, 0.0)) for _ in range(5))


def test_in_a_cuda_graph_and_on_a_side_stream():
    x, w, out = (torch.randn(1024, 1024, device=device()) for _ in range(3))
    static = {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = ops.matmul(x, w, None, 1.0, 0.0)
    stream.synchronize()
    check(eager, x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planes = ops.matmul_planes(x, -1)
        static["y"] = ops.matmul(x, w, None, 1.0, 0.0, planes, -1)
        static["z"] = ops.matmul(static["y"], w, out, 1.0, 1.0)
    x.copy_(torch.randn_like(x))
    graph.replay()
    check(static["y"], x, w)
    check(static["z"], static["y"], w, rest=out.double())


def test_under_autocast_products_are_not_fp32(interpreted):
    def f(a, b):
        with torch.autocast("cuda", torch.bfloat16):
            return a @ b

    interpreted(f)(torch.randn(2048, 2048, device=device()), torch.randn(2048, 2048, device=device()))
    report = fusebackend.last_report()
    assert not [s for s in report.substitutions if s.pattern == "fp32_matmul"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_step_through_the_backend(dynamic):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1024, 3072), torch.nn.GELU(), torch.nn.Linear(3072, 1024)).to(device())
    compiled = torch.compile(net, backend=fuse, dynamic=dynamic)
    for rows in (2048, 1777):
        x = torch.randn(rows, 1024, device=device(), requires_grad=True)
        wanted = torch.autograd.grad(net.double()(x.double()).square().mean(), [x, *net.parameters()])
        net.float()
        found = torch.autograd.grad(compiled(x).square().mean(), [x, *net.parameters()])
        for f, w in zip(found, wanted):
            assert (f.double() - w.double()).norm() / w.double().norm() < 2e-6


def around(size, *places):
    """Indices of a dimension: its ends, and the places."""
    wanted = {i + d for i in (0, size, *places) for d in range(-100, 100)}
    return torch.tensor(sorted(i for i in wanted if 0 <= i < size), device=device())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m, n, k", [(46_400, 46_400, 40), (70_000, 192, 1 << 15), (192, 70_000, 1 << 15)])
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.usefixtures("large_memory")
def test_more_than_two_to_the_31_elements(m, n, k, order, kernel):
    """In the result, or in an operand. Compared is what lies at their ends, and around the element of that number."""
    assert max(m * n, m * k, k * n) > 2**31
    a, b = laid_out((m, k), order), laid_out((k, n), order)
    c = product(a, b, kernel=kernel)
    rows, columns = around(m, 2**31 // n, 2**31 // k), around(n, 2**31 % n, 2**31 // k)
    check(c[rows][:, columns], a[rows], b[:, columns], kernel)


@pytest.mark.usefixtures("large_memory")
def test_planes_of_more_than_two_to_the_31_elements():
    x = torch.randn(66_000, 1 << 15, device=device())
    planes = ops.matmul_planes(x, -1)
    for part in (slice(0, 64), slice(2**31 // x.shape[1] - 32, 2**31 // x.shape[1] + 32), slice(x.shape[0] - 64, None)):
        assert torch.equal(planes[:, :, part], reference_planes(x[part], -1))
    y = torch.randn(1 << 15, 96, device=device())
    c = ops.matmul(x, y, None, 1.0, 0.0, planes, -1, None, -1, "auto")
    check(c[-200:], x[-200:], y)


def test_sizes_that_only_the_data_decide_compile(monkeypatch):
    """Operands whose strides are not known before run time are left to Inductor, which could not lower our operator with them."""
    monkeypatch.setattr(torch._dynamo.config, "capture_scalar_outputs", True)

    def fn(count):
        n = count.item()
        torch._check(n >= 1024)
        return torch.ones(1024, n, device=device()) @ torch.ones(n, 1024, device=device())

    compiled = torch.compile(fn, backend="fuse", fullgraph=True, options={"fuse.gate": "off", "fuse.strict": True})
    assert torch.equal(compiled(torch.tensor(1500)), torch.full((1024, 1024), 1500.0, device=device()))
    (rejection,) = (r for r in fusebackend.last_report().rejections if r.pattern == "fp32_matmul")
    assert "are not known before run time" in rejection.reason
