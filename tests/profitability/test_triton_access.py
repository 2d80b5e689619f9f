"""What a generated kernel moves, counted by running its index arithmetic: kernels whose counts are known by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusebackend.profitability import triton_access
from fusebackend.profitability.inductor_kernels import TritonKernel, _kernel, generated_kernels
from fusebackend.profitability.unfit import Unfit

TRANSPOSE = """
@triton.jit
def triton_poi_0(in_ptr0, out_ptr0, ynumel, xnumel, YBLOCK : tl.constexpr, XBLOCK : tl.constexpr):
    yoffset = tl.program_id(1) * YBLOCK
    yindex = yoffset + tl.arange(0, YBLOCK)[:, None]
    ymask = yindex < ynumel
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[None, :]
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + (xindex + 64*yindex), xmask & ymask, eviction_policy='evict_last').to(tl.float32)
    tmp1 = tl_math.exp(tmp0)
    tl.store(out_ptr0 + (yindex + 64*xindex), tmp1, xmask & ymask)
"""
COPY = """
@triton.jit
def triton_poi_1(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = (xindex % 10)
    x1 = xindex // 10
    tmp0 = tl.load(in_ptr0 + (x0 + 10*x1), xmask)
    tl.store(out_ptr0 + (xindex), tmp0, xmask)
"""


@pytest.fixture
def work(monkeypatch):
    """The work of a kernel in one configuration."""

    def of(source, sizes, types, warps=4, numbers=(), **blocks):
        config = SimpleNamespace(kwargs=blocks, num_warps=warps)
        monkeypatch.setattr(triton_access, "configurations", lambda kernel: [config])
        (found,) = triton_access.works(TritonKernel(source, sizes, types, numbers=frozenset(numbers)))
        return found

    return of


def test_a_transpose_in_whole_tiles(work):
    found = work(TRANSPOSE, {"xnumel": 64, "ynumel": 64}, {"in_ptr0": "*fp32", "out_ptr0": "*fp32"}, XBLOCK=32, YBLOCK=32)
    q = found.quantities
    assert q["read"] == q["written"] == q["moved"] / 2 == 64 * 64 * 4
    assert q["blocks"] == 4 and q["divisions"] == 0
    # 32 elements are a line, in the source by rows and in the result by columns: Triton lays each access out along its own.
    assert q["lines read"] == q["lines written"] == 4 * 32
    assert found.shape["least vector"] == found.shape["last vector"] == 4  # 16 bytes
    assert found.shape["log2 pages of a block"] == 1  # one of each
    assert (found.shape["height"], found.shape["width"], found.shape["edge"]) == (5, 5, 0)


def test_columns_that_are_far_apart_waste_sectors(work):
    """A tile of one row writes one element of each column's sector."""
    found = work(TRANSPOSE, {"xnumel": 64, "ynumel": 64}, {"in_ptr0": "*fp32", "out_ptr0": "*fp32"}, XBLOCK=64, YBLOCK=1)
    q = found.quantities
    assert q["read"] == 64 * 64 * 4 and q["written"] == 8 * q["read"]
    assert q["lines written"] == 64 * 64
    assert found.shape["last vector"] == 2  # one element of 4 bytes


def test_what_is_masked_is_not_counted(work):
    found = work(COPY, {"xnumel": 1000}, {"in_ptr0": "*fp32", "out_ptr0": "*fp32"}, XBLOCK=1024)
    q = found.quantities
    assert q["read"] == q["written"] == 4000 and q["moved"] == 8000
    assert q["divisions"] == 2 * 1024 and found.shape["divisions an element"] == 2
    assert found.shape["edge"] == pytest.approx(0.034, abs=1e-3)  # 1024 of 1000


def test_smaller_elements_have_shorter_vectors_where_threads_would_be_idle(work):
    types = {"in_ptr0": "*i8", "out_ptr0": "*i8"}
    assert work(COPY, {"xnumel": 4096}, types, XBLOCK=4096).shape["least vector"] == 4
    assert work(COPY, {"xnumel": 4096}, types, XBLOCK=256).shape["least vector"] == 1  # 256 elements for 128 threads


def test_sizes_of_64_bits_count_only_where_they_divide(work):
    types = {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "ks0": "i64"}
    assert work(COPY, {"xnumel": 100, "ks0": 10}, types, XBLOCK=128).shape["64-bit"] == 1
    assert work(TRANSPOSE, {"xnumel": 64, "ynumel": 64, "ks0": 64}, types, XBLOCK=32, YBLOCK=32).shape["64-bit"] == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("tl.store(out_ptr0 + (xindex), tmp0, xmask)", "tl.atomic_add(out_ptr0 + (xindex), tmp0, xmask)"), "adds atomically"),
        (("in_ptr0 + (x0", "in_ptr9 + (x0"), "not understood: NameError"),
        (("x1 = xindex // 10", "x1 = xindex // 0"), "not understood"),
    ],
)
def test_what_is_not_understood_is_unfit(work, change, reason):
    with pytest.raises(Unfit, match=reason):
        work(COPY.replace(*change), {"xnumel": 1000}, {"in_ptr0": "*fp32", "out_ptr0": "*fp32"}, XBLOCK=1024)


def test_kernels_of_other_heuristics_are_unfit():
    with pytest.raises(Unfit, match="other heuristics"):
        triton_access.works(TritonKernel(COPY, {"xnumel": 1000}, {"in_ptr0": "*fp32", "out_ptr0": "*fp32"}))


ARGUMENTS = "{'in_ptr0': '*fp32', 'ks0': 'i64', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}"
SIGNATURE = f"@triton_heuristics.pointwise(\n    triton_meta={{'signature': {ARGUMENTS}}},\n)"


def test_the_sizes_of_a_call_are_evaluated():
    kernel = _kernel(SIGNATURE, "arg0_1, s0, 3*s0 + (s1 // 2), stream=stream0", {"s0": 5, "s1": 9})
    assert kernel.sizes == {"ks0": 5, "xnumel": 19}
    assert kernel.types["in_ptr0"] == "*fp32"


SCALED = COPY.replace("def triton_poi_1(in_ptr0,", "def triton_poi_1(in_ptr0, in_ptr1,").replace(
    "    tl.store", "    tmp1 = in_ptr1\n    tmp2 = tmp1.to(tl.float32)\n    tmp0 = tmp0 / tmp2\n    tl.store"
)


def test_a_number_that_a_kernel_computes_with_is_no_size_of_it(work):
    """A tensor of no dims on the CPU, such as the root by which attention divides its scores, is passed by its value."""
    arguments = "{'in_ptr0': '*bf16', 'in_ptr1': 'fp32', 'in_ptr2': 'i64', 'ks0': 'fp64', 'out_ptr0': '*bf16', 'xnumel': 'i32'}"
    signature = SIGNATURE.replace(ARGUMENTS, arguments)
    kernel = _kernel(signature, "arg0_1, convert_element_type_21.item(), arg2_1.item(), zuf0, buf1, 4096, stream=stream0", {})
    assert kernel.sizes == {"xnumel": 4096} and kernel.numbers == {"in_ptr1", "in_ptr2", "ks0"}
    found = work(SCALED, kernel.sizes, {"in_ptr0": "*bf16", "in_ptr1": "fp32", "out_ptr0": "*bf16"}, numbers={"in_ptr1"}, XBLOCK=1024)
    assert found.quantities["read"] == found.quantities["written"] == 2 * 4096 and found.shape["accesses"] == 2


@pytest.mark.parametrize(
    ("source", "arguments", "reason"),
    [
        (SIGNATURE.replace("pointwise", "split_scan"), "a, 1, 2", "split_scan of another kind"),
        ("@triton_heuristics.pointwise(\n)", "a, 1, 2", "no signature"),
        (SIGNATURE, "a, 1, u0", "the size u0"),
        (SIGNATURE, "a, 1, __import__('os')", "the size"),
    ],
)
def test_calls_that_are_not_understood_are_unfit(source, arguments, reason):
    with pytest.raises(Unfit, match=reason):
        _kernel(source, arguments, {"s0": 5})


GATHER = """
@triton.jit
def triton_poi_2(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex % 512
    x1 = xindex // 512
    tmp0 = tl.load(in_ptr0 + (INDEX), xmask)
    tmp1 = tl.full([XBLOCK], 64, tl.int32)
    tmp2 = tmp0 + tmp1
    tmp3 = tmp0 < 0
    tmp4 = tl.where(tmp3, tmp2, tmp0)
    tl.device_assert(((0 <= tmp4) & (tmp4 < 64)) | ~(xmask), "index out of bounds: 0 <= tmp4 < 64")
    tmp5 = tl.load(in_ptr1 + (PLACE), xmask)
    tl.store(out_ptr0 + (xindex), tmp5, xmask)
"""


@pytest.mark.parametrize(
    ("index", "place", "read", "lines"),
    [
        ("x0", "tmp4 + 64*x1", 2**15 + 8 * 64 * 4, 256 + 64),  # of each row all 64 elements, and none behind them
        ("x1", "x0 + 512*tmp4", 8 * 32 + 2**14, 128 + 128),  # whole rows
        ("x0", "x1 + 512*tmp4", 2**15 + 8 * 64 * 32, 256 + 2**12),  # a column: each element in a line of its own
    ],
)
def test_what_an_index_leads_to_is_read_up_to_the_bound_that_is_asserted(work, index, place, read, lines):
    types = {"in_ptr0": "*i64", "in_ptr1": "*fp32", "out_ptr0": "*fp32"}
    found = work(GATHER.replace("INDEX", index).replace("PLACE", place), {"xnumel": 4096}, types, XBLOCK=512)
    assert (found.quantities["read"], found.quantities["lines read"]) == (read, lines)


def test_nodes_without_inputs_are_asked_for_too():
    """A causal mask is made of positions alone. On a CPU Inductor generates C++ for it."""

    def mask():
        positions = torch.ops.prims.iota.default(4, start=0, step=1, dtype=torch.int64, device="cpu", requires_grad=False)
        return positions[:, None] >= positions

    graph = make_fx(mask, tracing_mode="fake")().graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    with pytest.raises(Unfit, match="no Triton kernel"):
        generated_kernels(nodes)
