"""What a generated reduction computes and moves, counted by running its code: kernels whose counts are known by hand."""

from types import SimpleNamespace

import pytest

from fusebackend.profitability import calibration, estimating, triton_reductions
from fusebackend.profitability.inductor_kernels import TritonKernel
from fusebackend.profitability.unfit import Unfit

PERSISTENT = """
@triton.jit
def triton_per_0(in_ptr0, in_ptr1, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    R0_BLOCK: tl.constexpr = 32
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    r0_index = tl.arange(0, R0_BLOCK)[None, :]
    r0_mask = r0_index < r0_numel
    x0 = (xindex % 64)
    tmp0 = tl.load(in_ptr0 + (r0_index + 17*xindex), r0_mask & xmask, other=0.0)
    tmp1 = tl.load(in_ptr1 + (x0), xmask, eviction_policy='evict_last')
    tmp2 = libdevice.exp(tmp0)
    tmp3 = tmp2 * tmp1
    tmp4 = tl.broadcast_to(tmp3, [XBLOCK, R0_BLOCK])
    tmp5 = tl.where(r0_mask & xmask, tmp4, 0)
    tmp6 = tl.sum(tmp5, 1)[:, None].to(tl.float32)
    tl.store(out_ptr0 + (xindex), tmp6, xmask)
"""
LOOPED = """
@triton.jit
def triton_red_1(in_ptr0, in_ptr1, out_ptr0, ynumel, xnumel, r0_numel,
                 YBLOCK : tl.constexpr, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    yoffset = tl.program_id(1) * YBLOCK
    yindex = yoffset + tl.arange(0, YBLOCK)[:, None, None]
    ymask = yindex < ynumel
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[None, :, None]
    xmask = xindex < xnumel
    r0_base = tl.arange(0, R0_BLOCK)[None, None, :]
    _tmp4 = tl.full([YBLOCK, XBLOCK, R0_BLOCK], 0, tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_mask = r0_index < r0_numel
        tmp0 = tl.load(in_ptr0 + (xindex + 64*r0_index), r0_mask & xmask, other=0.0).to(tl.float32)
        tmp1 = tl.load(in_ptr1 + (yindex + 32*r0_index), r0_mask & ymask, other=0.0).to(tl.float32)
        tmp2 = tmp0 * tmp1
        _tmp4 = tl.where(r0_mask & xmask & ymask, _tmp4 + tmp2, _tmp4)
    tmp4 = tl.sum(_tmp4, 2)[:, :, None]
    tl.store(out_ptr0 + (xindex + 64*yindex), tmp4, xmask & ymask)
"""
SOFTMAX = """
@triton.jit
def triton_red_2(in_ptr0, in_ptr1, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    _tmp1 = tl.full([XBLOCK, R0_BLOCK], float("-inf"), tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        tmp0 = tl.load(in_ptr0 + (r0_index + 512*xindex), None, eviction_policy='evict_last')
        tmp2 = triton_helpers.maximum(_tmp1, tmp0)
        _tmp1 = tl.where(r0_index < r0_numel, tmp2, _tmp1)
    tmp1 = triton_helpers.max2(_tmp1, 1)[:, None]
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        tmp3 = tl.load(in_ptr0 + (r0_index + 512*xindex), None, eviction_policy='evict_first')
        tmp4 = tmp3 - tmp1
        tmp5 = libdevice.exp(tmp4)
        tl.store(out_ptr0 + (r0_index + 512*xindex), tmp5, None)
"""
POINTERS = {"in_ptr0": "*fp32", "in_ptr1": "*fp32", "out_ptr0": "*fp32"}


@pytest.fixture
def work(monkeypatch):
    """The work of a kernel in one configuration, on a device of 10 multiprocessors."""

    def of(source, sizes, warps=4, **blocks):
        config = SimpleNamespace(kwargs=blocks, num_warps=warps)
        monkeypatch.setattr(triton_reductions, "configurations", lambda kernel: [config])
        (found,) = triton_reductions.works(TritonKernel(source, sizes, POINTERS, True), 10)
        return found

    return of


def test_a_sum_in_one_tile(work):
    found = work(PERSISTENT, {"xnumel": 1024, "r0_numel": 17}, XBLOCK=32)
    q = found.quantities
    assert q["blocks"] == 32 and q["padded terms"] == 1024 * 32  # 17 terms in tiles of 32
    assert q["moved"] == 4 * (1024 * 17 + 1024 + 1024)  # what is masked is not loaded, and a factor of each row is loaded once
    assert q["functions"] == 1024 * 32  # one exp an element of the tile, masked or not
    assert q["divisions"] == 1024  # the index of a row
    assert found.shape["log2 rows"] == found.shape["log2 columns"] == 5 and found.shape["log2 steps"] == 0
    assert found.shape["log2 elements a thread"] == 3


def test_a_loop_is_run_for_some_of_its_steps(work):
    found = work(LOOPED, {"ynumel": 32, "xnumel": 64, "r0_numel": 1000}, YBLOCK=8, XBLOCK=16, R0_BLOCK=4)
    q = found.quantities
    assert q["blocks"] == 4 * 4 and q["padded terms"] == 32 * 64 * 1000
    assert q["moved"] == 4 * (16 * 1000 * (8 + 16) + 32 * 64)
    assert q["written"] == 4 * 32 * 64 and found.kind == triton_reductions.KIND
    # One product, one addition, and three masks (two for a row or a column of the tile, counted there), an element each.
    assert 2 * 32 * 64 * 1000 <= q["operations"] <= 6 * 32 * 64 * 1000
    assert found.shape["dimensions"] == 2 and 2 ** found.shape["log2 steps"] == pytest.approx(250)
    assert q["steps in waves"] == 250  # sixteen blocks run at once on ten multiprocessors
    assert q["elements in waves"] == 250 * 8 * 16 * 4 / 128


def test_loops_one_after_the_other_add_up(work):
    found = work(SOFTMAX, {"xnumel": 256, "r0_numel": 512}, XBLOCK=8, R0_BLOCK=64)
    q = found.quantities
    assert 2 ** found.shape["log2 steps"] == pytest.approx(8 + 8)
    assert q["moved"] == 4 * 256 * 512 * 3  # read twice, written once
    assert found.kind == triton_reductions.NORMALIZATION
    assert q["functions"] == 256 * 512
    assert q["padded terms"] == 2 * 256 * 512


def test_the_two_results_of_an_online_softmax_are_followed(work):
    # Its maximum and its sum are kept together while the loop runs, and reduced together behind it.
    online = SOFTMAX.replace(
        "_tmp1 = tl.where(r0_index < r0_numel, tmp2, _tmp1)",
        "_tmp1, _tmp9 = triton_helpers.online_softmax_combine(_tmp1, _tmp9, tmp0, False)",
    )
    online = online.replace("    for r0", "    _tmp9 = tl.full([XBLOCK, R0_BLOCK], 0.0, tl.float32)\n    for r0", 1)
    online = online.replace(
        "tmp1 = triton_helpers.max2(_tmp1, 1)[:, None]",
        "tmp1, tmp9 = triton_helpers.online_softmax_reduce(_tmp1, _tmp9, 1, False)\n    tmp1 = tmp1[:, None]",
    )
    sizes = {"xnumel": 256, "r0_numel": 512}
    found, plain = (work(source, sizes, XBLOCK=8, R0_BLOCK=64) for source in (online, SOFTMAX))
    assert found.quantities["moved"] == plain.quantities["moved"] and found.shape["log2 steps"] == plain.shape["log2 steps"]


def test_more_blocks_than_run_at_once_take_turns(work):
    few = work(PERSISTENT, {"xnumel": 32 * 160, "r0_numel": 17}, XBLOCK=32).quantities
    many = work(PERSISTENT, {"xnumel": 32 * 1600, "r0_numel": 17}, XBLOCK=32).quantities
    assert few["steps in waves"] == 1 and many["steps in waves"] == 10  # of 16 blocks of 128 threads on each of ten


def test_kernels_of_one_sum_are_one_work(work):
    first = work(LOOPED, {"ynumel": 32, "xnumel": 64, "r0_numel": 1000}, YBLOCK=8, XBLOCK=16, R0_BLOCK=4)
    second = work(PERSISTENT, {"xnumel": 1024, "r0_numel": 17}, XBLOCK=32)
    ((both,),) = triton_reductions.merged([[second], [first]], (), ())
    assert both.shape == first.shape and both.quantities["launches"] == 2
    assert both.quantities["read"] == first.quantities["read"] + second.quantities["read"]


#: What Inductor of torch 2.11 makes of Mamba-2's recurrence over 17 chunks (96 products of 17 x 8192 and 17 x 17 matrices), backward.
RECURRENCE = """
@triton.jit
def triton_per_2(in_ptr0, in_ptr1, in_ptr2, in_ptr3, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    R0_BLOCK: tl.constexpr = 32
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = tl.full([XBLOCK], True, tl.int1)[:, None]
    r0_index = tl.arange(0, R0_BLOCK)[None, :]
    r0_mask = r0_index < r0_numel
    r0_4 = r0_index
    x3 = xindex // 3342336
    x5 = (xindex % 196608)
    x2 = ((xindex // 196608) % 17)
    x1 = ((xindex // 8192) % 24)
    x6 = xindex
    tmp0 = tl.load(in_ptr0 + (x5 + 196608*r0_4 + 3342336*x3), r0_mask, eviction_policy='evict_last', other=0.0)
    tmp1 = tl.load(in_ptr1 + (x2 + 17*r0_4), r0_mask, eviction_policy='evict_last', other=0.0).to(tl.int1)
    tmp2 = tl.load(in_ptr2 + (0))
    tmp3 = tl.broadcast_to(tmp2, [1, 1])
    tmp4 = tl.load(in_ptr3 + (x2 + 17*r0_4 + 289*x1 + 6936*x3), r0_mask, eviction_policy='evict_last', other=0.0)
    tmp5 = tl.where(tmp1, tmp3, tmp4)
    tmp6 = libdevice.exp(tmp5)
    tmp7 = tmp0 * tmp6
    tmp8 = tl.broadcast_to(tmp7, [XBLOCK, R0_BLOCK])
    tmp10 = tl.where(r0_mask, tmp8, 0)
    tmp11 = tl.sum(tmp10, 1)[:, None].to(tl.float32)
    tl.store(out_ptr0 + (x6), tmp11, None)
"""


def test_the_shipped_calibration_knows_what_is_computed_for_each_product(monkeypatch):
    """It took 1500 us on an H200; by the number of products alone it was expected to take 240."""
    configs = [SimpleNamespace(kwargs={"XBLOCK": x}, num_warps=warps) for x, warps in ((1, 2), (8, 2), (32, 8), (128, 8))]
    monkeypatch.setattr(triton_reductions, "configurations", lambda kernel: configs)
    types = {**{f"in_ptr{i}": "*fp32" for i in (0, 2, 3)}, "in_ptr1": "*i1", "out_ptr0": "*fp32"}
    kernel = TritonKernel(RECURRENCE, {"xnumel": 13369344, "r0_numel": 17}, types, True)
    works = triton_reductions.merged([triton_reductions.works(kernel, 132)], (), ())
    assert works[0][0].quantities["functions"] == 13369344 * 32
    found = calibration._read(calibration.FOLDER / "NVIDIA-H200-torch2.11.json")
    assert found is not None
    time = estimating.total(found[1], works)
    assert 400 < time.expected < 2000 and time.low > 250


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("tl.sum(tmp5, 1)", "tl.associative_scan(tmp5, 1)"), "calls associative_scan"),
        (("in_ptr0 + (r0", "in_ptr9 + (r0"), "not understood: NameError"),
        (("tl.store(", "tl.atomic_add("), "adds atomically"),
    ],
)
def test_what_is_not_understood_is_unfit(work, change, reason):
    with pytest.raises(Unfit, match=reason):
        work(PERSISTENT.replace(*change), {"xnumel": 1024, "r0_numel": 17}, XBLOCK=32)
