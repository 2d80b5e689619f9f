"""Pointwise programs, stored or summed over outer dims, on a GPU, against fp64: every kind of input, layouts, streams, graphs, devices."""

import itertools
import math
import threading

import pytest
import torch
from pointwise_programs import EVERY_NAME, GATE, GELU, PRODUCT, RELU, SELF, SILU, SQUEEZED, computed_rows, computed_sums, types_of

from fusebackend.patterns.computed_sums import ops, program
from fusebackend.patterns.computed_sums.ops import reference, rows_reference
from fusebackend.patterns.computed_sums.program import MOST_INPUTS, MOST_SUMS

pytestmark = pytest.mark.usefixtures("library")
cuda = pytest.mark.cuda

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
HALVES = [f16, bf16]


def check(text, inputs, dtypes, scale=1.0, rows=True, batch_dims=0, means=False):
    """The sums are those of fp64, but for rounding, and for errors in fp32 that do not grow with the number of rows."""
    found = computed_sums(inputs, text, dtypes, batch_dims, means)
    wide = [t if t.dtype is torch.bool else t.double() for t in inputs]
    exact = reference(wide, text, [f64] * len(dtypes), batch_dims, means)
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    add, summed = torch.mean if means else torch.sum, list(range(batch_dims, len(shape) - 1))
    amounts = [add(t.abs().expand(shape), summed) for t in program.evaluate(text, wide, len(dtypes))]
    assert len(found) == len(dtypes)
    for ours, right, amount, dtype in zip(found, exact, amounts, dtypes):
        assert ours.dtype == dtype and ours.shape == right.shape == (*shape[:batch_dims], shape[-1]) and ours.is_contiguous()
        # What is computed may be a small difference of large numbers: an error of the other columns' size is none.
        largest = max([0.0, *amount.nan_to_num(0, 0, 0).flatten().tolist()])
        bound = torch.finfo(dtype).eps * right.abs() + scale * 2e-6 * (amount + largest) + torch.finfo(dtype).tiny
        error = (ours.double() - right).abs()
        assert bool((error <= bound).all()), f"{(error / bound).max():.3g} times the bound"
    if rows:
        check_rows(text, inputs, dtypes)
    return found


def check_rows(text, inputs, dtypes):
    """What is stored is what PyTorch computes of it in fp32, but for roundings."""
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    found = computed_rows(inputs, text, dtypes)
    assert len(found) == len(dtypes)
    for ours, right, dtype in zip(found, rows_reference(inputs, text, dtypes), dtypes):
        assert ours.dtype == dtype and ours.shape == shape and ours.is_contiguous()
        finite = right[right.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        eps = max(torch.finfo(dtype).eps, 1e-5)
        torch.testing.assert_close(ours, right, rtol=eps, atol=2e-6 * largest + torch.finfo(dtype).tiny, equal_nan=True)
    return found


def batch_norm(shape, dtype, make=torch.randn):
    columns = (*[1] * (len(shape) - 1), shape[-1])
    dy, x = (make(shape, device="cuda").to(dtype) for _ in range(2))
    mean, scale, weight, bias = (torch.randn(columns, device="cuda") for _ in range(4))
    return [dy, x, mean, scale.abs() + 0.5, weight, bias]


@cuda
@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 8, 24, 33, 67, 96, 144, 480, 1152, 2304, 5000])
def test_batch_norm_behind_silu(columns, dtype):
    for rows in ((2, 7, 5), (16, 28, 28), (1, 1, 1), (40000,)):
        shape = (*rows, columns)
        if math.prod(shape) < 1 << 26:
            check(SILU, batch_norm(shape, dtype), [f32, f32])
            check(SILU, batch_norm(shape, dtype), [dtype, f32])


@cuda
@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_other_programs(dtype):
    for shape in ((50, 14, 14, 96), (3, 35, 33)):
        columns = (*[1] * (len(shape) - 1), shape[-1])
        dy, x = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
        mean = torch.randn(columns, device="cuda")
        check(RELU, [dy, x.relu(), x, mean], [f32, dtype])
        check(GELU, [x, dy], [f32])
        check(SELF, [x], [dtype])
        check("t0=square(i0);out(i0);out(t0);t1=mul(t0,i0);out(t1);t2=abs(i0);out(t2)", [x], [f32, f16, bf16, f32])
        mask = torch.randn(shape, device="cuda") > 0
        check("t0=not(i1);t1=where(t0,i0,0.0);out(t1)", [dy, mask], [f32])
        check("t0=mul(i0,i1);out(t0)", [dy, (x * 10).abs().to(torch.uint8)], [f32])


@cuda
@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 8, 33, 96, 144, 1152, 2304])
def test_sums_of_each_image(columns, dtype, means):
    """Few images of many rows, which blocks share, and many of few; of one row, and of one pixel."""
    for images in ((2, 112, 112), (3, 5, 7), (200, 7, 7), (40, 28, 28), (1, 9, 9), (5, 1, 1), (700, 4, 1)):
        shape = (*images, columns)
        if math.prod(shape) < 1 << 24:
            dy, x, *vectors = batch_norm(shape, dtype)
            check(SQUEEZED, [x, *vectors], [dtype if means else f32], rows=False, batch_dims=1, means=means)  # few fp16 hold sums
            check(GATE, [dy, x, *vectors], [f32], rows=False, batch_dims=1, means=means)
            check(SILU, [dy, x, *vectors], [bf16, f32], rows=False, batch_dims=1, means=means)


@cuda
@pytest.mark.parametrize("batch_dims", [0, 1, 2, 3])
def test_kinds_of_inputs_of_a_batch(batch_dims):
    n, t, h, w, c = 3, 4, 6, 5, 40
    full = torch.randn(n, t, h, w, c, device="cuda").bfloat16()
    others = [
        (1, 1, 1, 1, c), (n, 1, 1, 1, c), (n, t, 1, 1, c), (1, t, 1, 1, c), (n, t, h, 1, c), (1, 1, h, w, c), (1, 1, 1, w, c),
        (1, t, h, w, c), (n, 1, 1, 1, 1), (n, t, 1, 1, 1), (1, 1, h, w, 1), (n, t, h, w, 1), (1, t, 1, 1, 1), (n, 1, h, 1, c),
    ]  # fmt: skip
    for shape in others:
        for other in (bf16, f32):
            factor = torch.randn(shape, device="cuda").to(other)
            check(PRODUCT, [full, factor], [f32], rows=False, batch_dims=batch_dims)
            check(PRODUCT, [factor[..., 3:36] if shape[-1] > 1 else factor, full[..., 3:36]], [f32], rows=False, batch_dims=batch_dims)
    gates = [torch.randn(n, t, 1, 1, c, device="cuda").bfloat16() for _ in range(2)]
    check("t0=mul(i0,i1);t1=add(t0,i2);out(t1)", [full, *gates], [f32], rows=False, batch_dims=batch_dims)
    check(PRODUCT, [full[:, :, 1:], full[:, :, 1:]], [f32], rows=False, batch_dims=batch_dims)  # which are copied


POSITIVE = {"log", "sqrt", "rsqrt", "reciprocal", "pow", "div", "log1p"}


@cuda
@pytest.mark.parametrize("name", sorted(EVERY_NAME))
def test_every_name(name):
    types = types_of(name)
    inputs = [torch.randn(999, 40, device="cuda") if t != torch.bool else torch.rand(999, 40, device="cuda") < 0.5 for t in types]
    inputs = [(t.abs() + 0.25 if name in POSITIVE else t).to(dtype) for t, dtype in zip(inputs, types)]
    text = EVERY_NAME[name]
    if name in ("not", "where"):  # which have NaN and infinity
        text = text.replace("nan", "2.5").replace("-inf", "2.5")
    check(text, inputs, [f32], scale=8000.0 if name in ("bf16", "fp16") else 1.0)
    if name in ("bf16", "fp16"):
        rounded = inputs[0].to(bf16 if name == "bf16" else f16).double().sum(0)
        torch.testing.assert_close(computed_sums(inputs, text, [f32])[0].double(), rounded, rtol=1e-5, atol=1e-4)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 90.0, -90.0, 200.0, -200.0, 3e38, -3e38, 1e-39, math.inf, -math.inf, math.nan]


@cuda
@pytest.mark.parametrize("name", sorted(EVERY_NAME))
def test_limits_of_every_name(name):
    """One row alone: what the sum is of."""
    types = types_of(name)
    values = torch.tensor(SPECIAL, device="cuda")
    pairs = torch.cartesian_prod(values, values).mT if len(types) == 2 else values[None]
    inputs = [t[None].bool() if dtype == torch.bool else t[None] for t, dtype in zip(pairs, types)]
    right = reference(inputs, EVERY_NAME[name], [f32])[0]
    for found in (computed_sums(inputs, EVERY_NAME[name], [f32])[0], computed_rows(inputs, EVERY_NAME[name], [f32])[0][0]):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6, equal_nan=True)


@cuda
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_kinds_of_inputs(dtype):
    n, h, w, c = 6, 12, 10, 40
    full = torch.randn(n, h, w, c, device="cuda").to(dtype)
    others = [
        (1, 1, 1, c), (n, 1, 1, c), (1, h, w, c), (1, h, 1, c), (1, 1, w, c), (n, h, 1, c), (n, 1, w, c), (n, h, w, c),
        (1, 1, 1, 1), (n, 1, 1, 1), (1, h, w, 1), (1, h, 1, 1), (n, h, w, 1),
    ]  # fmt: skip
    for shape in others:
        for other in (dtype, f32):
            factor = torch.randn(shape, device="cuda").to(other)
            check(PRODUCT, [full, factor], [f32])
            check(PRODUCT, [factor, full], [f32])
            check(PRODUCT, [full, factor.expand(full.shape)], [f32])
            check(PRODUCT, [full[..., 3:36], factor[..., 3:36] if shape[-1] > 1 else factor], [f32])
    for factor in (torch.randn(n, w, h, 1, device="cuda").transpose(1, 2), torch.randn(n, w, h, device="cuda").mT[..., None].to(dtype)):
        assert ops.kind(factor.shape, factor.stride(), full.shape) == "t"
        check(PRODUCT, [full, factor], [f32])
        check("t0=mul(i0,i1);t1=mul(t0,i2);out(t1)", [factor, full, torch.randn(n, h, w, 1, device="cuda")], [f32])
    vectors = [torch.randn(n, 1, 1, c, device="cuda").to(dtype) for _ in range(2)]
    check("t0=mul(i0,i1);t1=mul(t0,i2);out(t1)", [full, *vectors], [f32])


@cuda
@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_strides_and_offsets(dtype):
    wide = torch.randn(700, 76, device="cuda").to(dtype)
    for begin in range(9):
        check(PRODUCT, [wide[:, begin : begin + 64], wide[:, 4:68]], [f32])
        flat = wide.flatten()[begin : begin + 500 * 48].view(500, 48)
        check(PRODUCT, [flat, flat], [f32])
    image = torch.randn(5, 24, 9, 7, device="cuda").to(dtype)
    for other in (image, image.to(memory_format=torch.channels_last), image[::2], image[:, :, 1:]):
        moved = other.permute(0, 2, 3, 1)
        check(PRODUCT, [moved, moved], [f32])
        check(PRODUCT, [moved.contiguous(), moved], [f32])
    check(PRODUCT, [wide.mT, wide.mT], [f32])
    check(PRODUCT, [wide[:, ::2], wide[:, 1::2]], [f32])
    check(PRODUCT, [wide[:1].expand(5000, 76), wide[:1].expand(5000, 76)], [f32])


@cuda
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_dims_in_an_order(order):
    """As of permuted views; columns have one dim or all. Inputs that lie otherwise are copied."""
    sizes = [7, 12, 5, 24]
    back = [order.index(d) for d in range(4)]
    full = torch.randn(sizes, device="cuda").bfloat16().permute(back)  # walked side by side
    columns, image = torch.randn(48, device="cuda"), torch.randn(7, 1, 1, 24, device="cuda").permute(back)
    text = "t0=mul(i0,i1);t1=mul(t0,i2);t2=add(t1,i3);out(t2)"
    for first in (full, full.contiguous(), full.float()[..., :1].expand(full.shape), full.to(memory_format=torch.channels_last)):
        inputs = [columns[:24], first, image, columns[::2]]
        walked = [t if t.dim() == 1 else t.permute(order) for t in inputs]
        for batch_dims in range(3):
            found = ops.computed_sums(inputs, text, "f", batch_dims, False, order)[0]
            torch.testing.assert_close(found, reference(walked, text, [f32], batch_dims)[0], rtol=1e-5, atol=1e-4)
        for keeps_order in (False, True):
            found, right = (of(inputs, text, as_, keeps_order, order)[0] for of, as_ in ((ops.computed_rows, "f"), (rows_reference, [f32])))
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
            assert found.stride() == right.stride() and found.shape == full.shape


@cuda
def test_infinities_and_nan_stay_in_their_columns():
    dy, x, *others = batch_norm((5000, 33), bf16)
    dy[4321, 3], x[17, 5], dy[3, 7] = math.inf, math.nan, -math.inf
    dz, dzx = computed_sums([dy, x, *others], SILU, [f32, f32])
    rest = [c for c in range(33) if c not in (3, 5, 7)]
    assert not dz[[3, 5, 7]].isfinite().any() and not dzx[[3, 5, 7]].isfinite().any()
    assert dz[rest].isfinite().all() and dzx[rest].isfinite().all()


@cuda
def test_empty():
    for shape in ((0, 8), (4, 0, 5, 8)):
        found = computed_sums([torch.empty(shape, device="cuda"), torch.ones([1] * (len(shape) - 1) + [8], device="cuda")], PRODUCT, [bf16])
        assert torch.equal(found[0], torch.zeros(8, dtype=bf16, device="cuda"))
        assert computed_rows([torch.empty(shape, device="cuda")], SELF, [bf16])[0].shape == shape
    assert computed_sums([torch.empty(7, 0, device="cuda")], SELF, [f32])[0].shape == (0,)
    none = [torch.empty(4, 0, 5, 8, device="cuda")]
    for dtype in (f32, f16, bf16):
        assert torch.equal(computed_sums(none, SELF, [dtype], 1)[0], torch.zeros(4, 8, dtype=dtype, device="cuda"))
        assert computed_sums(none, SELF, [dtype], 1, means=True)[0].isnan().all()
    assert computed_sums(none, SELF, [f32], 2)[0].shape == (4, 0, 8)
    with pytest.raises(RuntimeError, match="there is no function"):
        computed_sums([torch.empty(0, 8, device="cuda")], "t0=foo(i0);out(t0)", [f32])


@cuda
@pytest.mark.parametrize("rows", [5, 333, 50_000])
def test_no_less_exact_than_eager(rows):
    x, y = (torch.randn(rows, 600, device="cuda") + 1 for _ in range(2))
    exact, eager, ours = (x.double() * y.double()).sum(0), (x * y).sum(0), computed_sums([x, y], PRODUCT, [f32])[0]
    assert (ours.double() - exact).norm() <= 1.05 * (eager.double() - exact).norm() + 1e-8 * exact.norm()


@cuda
def test_bits_repeat():
    inputs = batch_norm((64, 28, 28, 96), bf16)
    first = computed_sums(inputs, SILU, [f32, f32])
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(computed_sums(inputs, SILU, [f32, f32]), first))
    of_images = computed_sums(inputs, SILU, [f32, f32], 1)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(computed_sums(inputs, SILU, [f32, f32], 1), of_images))


@cuda
@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 3, 8, 20, 33, 144, 1032])
def test_data_movement_is_exact(columns, dtype):
    for rows in (1, 5, 4000):
        x = torch.randn(rows, columns, device="cuda").to(dtype)
        assert torch.equal(computed_rows([x], SELF, [dtype])[0], x)


@cuda
def test_numbers():
    x = torch.randn(3000, 48, device="cuda")
    for numbers in ([0.3, 0.5, 7.0], [1e-30, 3e38, -0.1], [0.7 + k for k in range(20)]):
        text = ";".join([f"t{k}={'add' if k % 2 else 'mul'}({f't{k - 1}' if k else 'i0'},{n})" for k, n in enumerate(numbers)])
        last = len(numbers) - 1
        for found in (computed_rows([x], f"{text};out(t{last})", [f32])[0], rows_reference([x], f"{text};out(t{last})", [f32])[0]):
            torch.testing.assert_close(found, rows_reference([x.double()], f"{text};out(t{last})", [f64])[0].float(), rtol=1e-4, atol=1e-5)


@cuda
def test_several_results_are_stored():
    x, y = torch.randn(3000, 48, device="cuda").bfloat16(), torch.randn(1, 48, device="cuda")
    check_rows("t0=mul(i0,i1);out(t0);out(i0);t1=neg(t0);out(t1);out(i1)", [x, y], [bf16, f32, f16, f32])


@cuda
def test_sizes_share_a_kernel():
    text = "t0=mul(i0,i1);t1=add(t0,0.123);out(t1)"
    make = lambda rows, columns: [torch.randn(rows, columns, device="cuda").bfloat16(), torch.randn(1, columns, device="cuda")]  # noqa: E731
    computed_sums(make(1000, 64), text, [f32])
    before = ops.compilations()
    for rows, columns in ((17, 64), (5000, 1032), (40000, 8)):
        check(text, make(rows, columns), [f32], rows=False)
        check(text, make(rows, columns), [bf16], rows=False)  # nor does the dtype of a sum matter
    assert ops.compilations() == before
    check(text, make(1000, 33), [f32], rows=False)  # which are read one by one
    assert ops.compilations() == before + 1


@cuda
def test_side_streams_and_cuda_graphs():
    inputs = batch_norm((64, 28, 28, 96), bf16)
    wanted, stream, graph = computed_sums(inputs, SILU, [f32, f32]), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert all(torch.equal(a, b) for a, b in zip(computed_sums(inputs, SILU, [f32, f32]), wanted))
    with torch.cuda.graph(graph):
        found = computed_sums(inputs, SILU, [f32, f32])
    inputs[0].mul_(2)
    graph.replay()
    assert all(torch.equal(a, 2 * b) for a, b in zip(found, wanted))


@cuda
def test_a_kernel_may_be_compiled_while_a_graph_is_captured():
    x, graph = torch.randn(5000, 64, device="cuda"), torch.cuda.CUDAGraph()
    computed_sums([x], SELF, [f32])  # PyTorch's own first calls
    text = "t0=mul(i0,0.375);out(t0)"
    before = ops.compilations()
    with torch.cuda.graph(graph):
        found = computed_sums([x], text, [f32])
    assert ops.compilations() == before + 1
    graph.replay()
    torch.testing.assert_close(found[0].double(), (x.double() * 0.375).sum(0), rtol=1e-5, atol=1e-4)


@cuda
def test_threads_share_a_kernel():
    x, text, found = torch.randn(5000, 64, device="cuda"), "t0=mul(i0,0.625);out(t0)", []
    before = ops.compilations()
    torch.cuda.synchronize()
    threads = [threading.Thread(target=lambda: found.append(computed_sums([x], text, [f32])[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(torch.equal(t, found[0]) for t in found) and ops.compilations() == before + 1


@cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices():
    x = torch.randn(5000, 64)
    found = [computed_sums([x.to(f"cuda:{i}")], SELF, [f32])[0].cpu() for i in (1, 0, 1)]
    assert all(torch.equal(t, found[0]) for t in found)


def test_an_order_is_that_of_permuted_views():
    x, other, columns = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 1, 1), torch.randn(4)
    text, order = "t0=mul(i0,i1);t1=add(t0,i2);out(t1)", [0, 2, 3, 1]
    walked = [x.permute(order), other.permute(order), columns]
    for batch_dims, means in ((0, False), (1, True)):
        found = ops.computed_sums([x, other, columns], text, "f", batch_dims, means, order)
        torch.testing.assert_close(found, reference(walked, text, [f32], batch_dims, means), rtol=0, atol=0)
    (found,) = ops.computed_rows([x, other, columns], text, "f", False, order)
    assert found.stride() == (4 * 30, 1, 4 * 6, 4)
    torch.testing.assert_close(found, x * other + columns[:, None, None], rtol=0, atol=0)
    (found,) = ops.computed_rows([x, other, columns], text, "f", True, order)
    assert found.stride() == x.stride()
    for wrong in ([0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4]):
        with pytest.raises(RuntimeError, match="does not name each of the dims 0 to 3 once"):
            ops.computed_sums([x, other, columns], text, "f", 0, False, wrong)


@cuda
def test_wrong_tensors_are_refused():
    x = torch.randn(10, 8, device="cuda")
    for inputs, text, dtypes, why in (
        ([x.double()], SELF, [f32], "input 0 is Double"),
        ([x, x.cpu()], PRODUCT, [f32], "input 1 is not on the GPU"),
        ([x[0]], SELF, [f32], "inputs have at most 1 dims"),
        ([x, x[None]], PRODUCT, [f32], "input 0 has 2 dims, others have 3"),
        ([x, x[:5]], PRODUCT, [f32], "does not broadcast"),
        ([x[:1], x[:, :1]], PRODUCT, [f32], "no input has the sizes"),
        ([x], SELF, [f64], "results are of types"),
        ([x], SELF, [f32, f32], "1 results"),
        ([x] * (MOST_INPUTS + 1), SELF, [f32], f"1 to {MOST_INPUTS} inputs"),
        ([x], SELF, [f32] * (MOST_SUMS + 1), f"1 to {MOST_SUMS} results"),
        ([x], "t0=foo(i0);out(t0)", [f32], "there is no function 'foo'"),
    ):
        with pytest.raises(RuntimeError, match=why):
            computed_sums(inputs, text, dtypes)
    for batch_dims in (-1, 1):
        with pytest.raises(RuntimeError, match="of 2 dims 0 to 0 are accepted"):
            computed_sums([x], SELF, [f32], batch_dims)


@cuda
@pytest.mark.parametrize("shape", [(8_500_000, 256), (2**31 - 1, 1), (3, 700_003, 1027)], ids=str)
@pytest.mark.usefixtures("large_memory")
def test_more_than_2_to_the_31_elements(shape):
    x = torch.empty(shape, dtype=bf16, device="cuda").bernoulli_(0.5)
    columns = [1] * (len(shape) - 1) + [shape[-1]]
    found = computed_sums([x, torch.full(columns, 2.0, device="cuda")], PRODUCT, [f32])[0]
    exact = 2 * x.sum(list(range(len(shape) - 1)), dtype=torch.int64).double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
