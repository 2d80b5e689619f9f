"""Sums along rows by an index against fp64: shared indices, strides, long bins; infinities, repetition, streams, graphs, errors."""

import math
import subprocess
import sys

import pytest
import torch

from fusebackend.patterns.row_scatter.ops import DTYPES, limits, plan_facts, reference

op = torch.ops.fusebackend.row_scatter
pytestmark = pytest.mark.usefixtures("library")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
MULTIPROCESSORS, MOST_SHARED = 132, 227 << 10  # of an H200: bytes, of a block

#: Sizes of the source, of the index, and bins.
SHAPES = [
    ((3, 20, 64), (3, 20, 64), 64),
    ((9, 20, 64), (1, 20, 64), 33),
    ((2, 3, 20, 72), (1, 1, 20, 72), 128),
    ((2, 3, 20, 72), (2, 1, 20, 72), 7),
    ((2, 3, 4, 72), (1, 3, 1, 72), 50),
    ((5, 131), (5, 131), 131),
    ((6, 7, 1), (6, 7, 1), 12),
    ((17, 600), (17, 600), 5),
    ((3, 2, 3000), (1, 2, 3000), 1),
    ((4, 33, 40), (4, 33, 1), 10),
    ((50,), (50,), 9),
    ((70, 8), (70, 8), 64),
    ((2, 4096), (2, 4096), 4096),
]


def check(source, index, bins, self=None):
    """The result has the error of one rounding, and of a sum in fp32."""
    got = op(source, index, bins, self)
    start = None if self is None else self.double()
    exact = reference(source.double(), index, bins, start)
    magnitude = reference(source.double().abs(), index, bins, None if start is None else start.abs())
    assert got.dtype == source.dtype and got.shape == exact.shape and got.is_contiguous()
    terms = 64 if source.is_cuda else source.shape[-1]  # one after another on a CPU
    bound = torch.finfo(source.dtype).eps / 2 * exact.abs() + terms * torch.finfo(f32).eps * magnitude + torch.finfo(source.dtype).tiny
    assert bool(((got.double() - exact).abs() <= bound).all())
    return got


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize(("shape", "index_shape", "bins"), SHAPES, ids=str)
def test_onto_zeros_and_onto_a_tensor(device, shape, index_shape, bins, dtype):
    source = torch.randn(shape, device=device).to(dtype)
    index = torch.randint(bins, index_shape, device=device)
    check(source, index, bins)
    check(source, index.expand(shape), bins)
    check(source, index.int(), bins, torch.randn(*shape[:-1], bins, device=device).to(dtype))


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("copies", [1, 3, 9])
def test_strides_gaps_and_misaligned_tensors(device, dtype, copies):
    x = torch.randn(copies, 40, 136, device=device).to(dtype)
    index = torch.randint(50, (1, 40, 136), device=device)
    check(x[:, :, 8:72], index[:, :, 3:67], 50)
    check(x[:, :, 1:66], index[:, :, :65], 50)
    check(x[:, 3:, ::2], index[:, 3:, ::2], 51)
    across = torch.randint(50, (1, 136, 40), device=device)
    check(x.mT, across, 50)
    check(x[:, :, 5:].mT, across[:, 5:], 50)
    check(x[:, 1:, :77].mT, across[:, :77, 1:], 51)
    check(x.mT, index.mT, 50)
    check(x[..., :1].expand(copies, 40, 136), index, 50)
    check(x[:, :1].expand(copies, 40, 136), index, 50)
    check(x.permute(1, 0, 2), index.permute(1, 0, 2), 50)
    check(x.permute(1, 2, 0), index.permute(1, 2, 0).expand(40, 136, copies), 50)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_tiles_may_grow_from_call_to_call(device, dtype):
    """The shared memory that a kernel may have is set once, for all tiles."""
    for sources in (8, 72, 520, 1000, 4000):
        for copies in (1, 4, 9):
            index = torch.randint(40, (1, 24, sources), device=device)
            check(torch.randn(copies, 24, sources, device=device).to(dtype), index, 40)
            check(torch.randn(copies, sources, 24, device=device).to(dtype).mT, index, 40)


def test_bins_of_many_sources(device):
    source, sources = torch.rand(9, 6, 500, device=device), torch.arange(500)
    for index in (sources * 0, sources.clamp(200, 240), sources.flip(0) // 100):
        index = index.expand(1, 6, 500).to(device)
        check(source, index, 300)
        check(source.bfloat16(), index, 300)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_empty_tensors(device, dtype):
    for shape in ((0, 4), (4, 0), (3, 0, 5), (0,)):
        source, index = torch.empty(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=torch.int64)
        assert torch.equal(op(source, index, 6), source.new_zeros(*shape[:-1], 6))
        start = torch.randn(*shape[:-1], 6, device=device).to(dtype)
        assert torch.equal(op(source, index, 6, start), start)
    nothing = torch.empty(4, 0, device=device)
    assert op(nothing, torch.empty(4, 0, device=device, dtype=torch.int64), 0).shape == (4, 0)


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_no_less_exact_than_eager(device, dtype):
    source, index = torch.randn(30, 40, 700, device=device).to(dtype), torch.randint(60, (1, 40, 700), device=device)
    exact = reference(source.double(), index, 60)
    eager = source.new_zeros(30, 40, 60).scatter_add(-1, index.expand(source.shape), source)
    ours, theirs = ((t.double() - exact).norm() for t in (op(source, index, 60), eager))
    assert ours <= 1.02 * theirs


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_infinities_and_nan_stay_in_their_bins(device, dtype):
    source, index = torch.randn(9, 4, 100, device=device).to(dtype), torch.arange(100, device=device).expand(1, 4, 100) // 2
    source[0, 1, 6], source[5, 2, 9], source[7, 3, 20], source[7, 3, 21] = math.inf, math.nan, math.inf, -math.inf
    got = op(source, index, 50)
    assert got[0, 1, 3] == math.inf and got[5, 2, 4].isnan() and got[7, 3, 10].isnan()
    assert int((~got.isfinite()).sum()) == 3


@pytest.mark.parametrize(("shape", "index_shape", "bins"), SHAPES, ids=str)
def test_the_same_bits_in_every_run(device, shape, index_shape, bins):
    source, index = torch.randn(shape, device=device), torch.randint(bins, index_shape, device=device)
    first = op(source, index, bins)
    for _ in range(3):
        assert torch.equal(op(source, index, bins), first)


@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_an_index_out_of_range_is_an_error_on_cpus(index):
    indices = torch.zeros(1, 300, 70, dtype=torch.int64)
    indices[0, 200, 33] = index
    with pytest.raises(RuntimeError, match=f"index {index} is out of bounds for a dimension of size 5"):
        op(torch.randn(4, 300, 70), indices, 5)


@pytest.mark.cuda
@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_out_of_range_is_a_device_assertion(index):
    """As PyTorch's own kernels do, so in a process of its own: the CUDA context is lost."""
    program = f"""
import torch
from fusebackend.native import loader
import fusebackend.patterns.row_scatter
assert loader.load().path
i = torch.zeros(1, 30, 70, dtype=torch.int64, device="cuda")
i[0, 20, 33] = {index}
torch.ops.fusebackend.row_scatter(torch.randn(4, 30, 70, device="cuda"), i, 5)
torch.cuda.synchronize()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode != 0 and "device-side assert" in run.stderr, run.stderr[-2000:]
    assert "index out of bounds" in run.stdout + run.stderr


INDEX = torch.zeros(4, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("source", "index", "bins", "self", "reason"),
    [
        (torch.ones(4, 6, dtype=f64), INDEX, 3, None, "not supported"),
        (torch.ones(4, 6), INDEX.float(), 3, None, "int32 or int64"),
        (torch.ones(4, 6), INDEX[0], 3, None, "differ in rank"),
        (torch.ones(4, 6), INDEX[:2], 3, None, "does not broadcast"),
        (torch.ones(4, 6), INDEX, 0, None, "out of range"),
        (torch.ones(4, 6), INDEX, 9000, None, "rows may have"),
        (torch.ones(4, 9000), INDEX[:, :1], 3, None, "rows may have"),
        (torch.ones([1] * 9), INDEX[0, 0].reshape([1] * 9), 3, None, "9 dimensions"),
        (torch.ones(4, 6), INDEX, 3, torch.ones(4, 4), "self must have"),
    ],
)
def test_what_is_refused(source, index, bins, self, reason):
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match=reason):
            op(source.to(device), index.to(device), bins, None if self is None else self.to(device))


@pytest.mark.cuda
def test_streams_and_cuda_graphs():
    source, index = torch.randn(24, 64, 64, device="cuda").bfloat16(), torch.randint(64, (1, 64, 64), device="cuda")
    wanted = op(source, index, 64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = op(source, index, 64)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(source, index, 64)
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(beside, wanted) and torch.equal(got, wanted)


def planned(shape, strides, index_shape, bins=512, dtype=bf16, shared_bytes=MOST_SHARED, misaligned=0):
    index_strides = [math.prod(index_shape[d + 1 :]) for d in range(len(index_shape))]
    return plan_facts(shape, strides, index_shape, index_strides, bins, dtype, MULTIPROCESSORS, shared_bytes, misaligned)


def test_sources_are_loaded_by_vectors_in_the_order_in_which_they_lie():
    along = planned((192, 512, 512), (512 * 512, 512, 1), (1, 512, 512))
    assert along["along"] and along["group"] == 8 and along["index_rows"] == 512 and along["copies"] == 192
    across = planned((192, 512, 512), (512 * 512, 1, 512), (1, 512, 512))
    assert across["across"] and across["group"] == 4 and across["tile_rows"] == 16, "whole sectors"
    for strides, misaligned in (((511 * 511, 511, 1), 0), ((512 * 512, 512, 1), 2), ((512 * 512, 1, 511), 0), ((512 * 512, 1024, 2), 0)):
        facts = planned((192, 511, 511), strides, (1, 511, 511), misaligned=misaligned)
        assert not facts["along"] and not facts["across"]
        assert facts["coalesced"] == (strides[-1] != 2)


@pytest.mark.parametrize("shared_bytes", [64 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_tiles_fit_every_gpu(shared_bytes, dtype):
    """All but 4 KB of what a block may have, at every length of rows."""
    most = limits()[1]
    for sources in (1, 7, 64, 513, 2000, most):
        for copies in (1, 4, 100):
            for strides in ((40 * sources, sources, 1), (40 * sources, 1, 40)):
                facts = planned((copies, 40, sources), strides, (1, 40, sources), most, dtype, shared_bytes)
                assert facts["shared_bytes"] <= shared_bytes - 4096 and facts["sort_bytes"] <= 48 << 10
                assert facts["tile_rows"] >= 1 and facts["blocks"] >= 1


def check_parts(shape, index_shape, bins, device):
    """Of a source that is larger than what fp64 has room for: its first and last matrices."""
    source = torch.randn(shape, dtype=bf16, device=device)
    index = torch.randint(bins, index_shape, device=device)
    got = op(source, index, bins, None)
    for part in (slice(0, 2), slice(-2, None)):
        exact = reference(source[part].double(), (index[part] if index.shape[0] > 1 else index).expand(source[part].shape), bins, None)
        torch.testing.assert_close(got[part].double(), exact, rtol=2**-8, atol=1e-4)


def test_the_first_and_last_matrices(device):
    check_parts((5, 20, 64), (1, 20, 64), 33, device)
    check_parts((5, 20, 64), (5, 20, 64), 33, device)


@pytest.mark.cuda
@pytest.mark.parametrize("index_shape", [(1, 512, 512), (8200, 512, 1)], ids=str)
@pytest.mark.parametrize("bins", [512, 40])
@pytest.mark.usefixtures("large_memory")
def test_more_than_two_to_the_31_elements(index_shape, bins):
    assert 8200 * 512 * 512 > 2**31
    check_parts((8200, 512, 512), index_shape, bins, "cuda")
