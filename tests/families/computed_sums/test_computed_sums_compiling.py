"""Without a GPU: what compiled kernels take of a multiprocessor, what is refused, how inputs lie, and which blocks compute what."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from pointwise_programs import EVERY_NAME, PRODUCT, SELF, SILU, computed_sums, types_of
from torch._subclasses import FakeTensorMode

from fusebackend.patterns.computed_sums import expression, ops
from fusebackend.patterns.computed_sums.program import MOST_INPUTS, MOST_SUMS

pytestmark = pytest.mark.usefixtures("library")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def compiled(text, dtypes, kinds, sums, architecture="sm_90", **more):
    facts = ops.compile_kernel(text, dtypes, kinds, sums, architecture, **more)
    if isinstance(facts, str) and facts.startswith("NVRTC is not found"):
        pytest.skip(facts)
    assert not isinstance(facts, str), facts
    return facts


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", sorted(EVERY_NAME))
def test_every_name_compiles(name, architecture):
    types = types_of(name)
    assert compiled(EVERY_NAME[name], types, "r" * len(types), 1, architecture)["registers"] > 0


@pytest.mark.parametrize("stored", [[f32], [bf16], [f16]], ids=str)
@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_rows_compile(vector, stored):
    facts = compiled("t0=sub(i0,i1);t1=mul(t0,i2);t2=sigmoid(t1);out(t2)", [bf16, f32, f32], "rcc", 1, vector=vector, stored=stored)
    assert facts["vector"] == vector and facts["spill_bytes"] == 0


def test_more_threads_have_fewer_registers_where_rows_are_stored():
    gradient = SILU.replace("out(t9);", "").replace("out(t10)", "t11=sub(t9,t10);t12=mul(t11,i3);out(t12)")
    for dtype in (bf16, f32):
        facts = compiled(gradient, [dtype, dtype, f32, f32, f32, f32], "rrcccc", 1, stored=[dtype])
        assert facts["registers"] <= 64 and facts["spill_bytes"] == 0
    plan = ops.plan_facts([bf16, bf16, f32, f32, f32, f32], "rrcccc", 1, 802816, 144, 132, stored=[bf16])
    assert plan["blocks_at_once"] == 2 and plan["blocks"] == 264 and plan["partials"] == plan["shared_bytes"] == 0


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_every_kind_and_type_compiles(vector, architecture):
    text = "t0=mul(i0,i1);t1=mul(t0,i2);t2=where(i3,t1,i4);t3=add(t2,i5);out(t3);out(i0);t4=mul(t3,i4);out(t4);t5=sub(t4,i6);out(t5)"
    facts = compiled(text, [bf16, f16, f32, torch.bool, torch.uint8, f32, bf16], "rgfrcsi", 4, architecture, vector=vector)
    assert facts["vector"] == vector and facts["spill_bytes"] == 0


@pytest.mark.parametrize("kinds", ["cc", "cs", "ss", "ff", "gg", "cf", "ii", "if", "tt", "ct"])
def test_no_input_needs_rows_of_its_own(kinds):
    assert compiled(PRODUCT, [bf16, f32], kinds, 1)["registers"] > 0


def test_the_kernel_of_batch_norm_behind_silu_keeps_to_its_registers():
    for dtype in (bf16, f32):
        facts = compiled(SILU, [dtype, dtype, f32, f32, f32, f32], "rrcccc", 2)
        assert facts["registers"] <= 128 and facts["spill_bytes"] == facts["stack_bytes"] == 0
        assert facts["vector"] == (8 if dtype == bf16 else 4) and facts["rows_at_once"] == 2


@pytest.mark.parametrize(
    "kinds",
    ["r" * MOST_INPUTS, "rr" + "c" * (MOST_INPUTS - 2), "rg" * (MOST_INPUTS // 2), "rf" * (MOST_INPUTS // 2), "rt" * (MOST_INPUTS // 2)],
)
def test_as_many_inputs_and_sums_as_may_be_do_not_spill(kinds):
    last = MOST_INPUTS - 2
    adds = [f"t{k}=add(t{k - 1},i{k + 1})" for k in range(1, last + 1)]
    text = ";".join(["t0=mul(i0,i1)", *adds, *(f"out(t{last - s})" for s in range(MOST_SUMS))])
    assert compiled(text, [bf16] * MOST_INPUTS, kinds, MOST_SUMS)["spill_bytes"] == 0


def test_a_kernel_is_compiled_once_and_shapes_do_not_matter():
    text = "t0=mul(i0,12.3);t1=add(t0,i0);out(t1)"
    before = ops.compilations()
    compiled(text, [bf16], "r", 1)
    assert ops.compilations() == before + 1
    compiled(text.replace("12.3", "1e-07"), [bf16], "r", 1)  # its numbers are arguments
    assert ops.compilations() == before + 1
    compiled(text, [bf16], "r", 1)
    ops.plan_facts([bf16], "r", 1, 1000, 64, 132)
    assert ops.compilations() == before + 1
    compiled(text, [bf16], "r", 1, "sm_80")
    assert ops.compilations() == before + 2


def test_an_unknown_architecture_is_a_reason():
    compiled(SELF, [f32], "r", 1)
    reason = ops.compile_kernel(SELF, [f32], "r", 1, "sm_13")
    assert isinstance(reason, str) and "NVRTC" in reason and "sm_13" in reason


def test_without_nvrtc_there_is_a_reason():
    code = (
        "import torch\nfrom fusebackend.native import loader\nfrom fusebackend.patterns.computed_sums import ops\nloader.load()\n"
        "print(ops.compile_kernel('out(i0)', [torch.float32], 'r', 1, 'sm_90'))"
    )
    environment = {**os.environ, "FUSEBACKEND_NVRTC": "/nowhere/nvrtc.so"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "NVRTC is not found" in found.stdout and "/nowhere/nvrtc.so" in found.stdout, found.stderr


MALFORMED = {
    "": "is accepted",
    "out(i0);": "is accepted",
    "t0=add(i0,1.0)": "results",
    "out(i0);out(i0)": "results",
    "t0=add(i0,1.0);t0=add(i0,1.0);out(t0)": "t1",
    "t1=add(i0,1.0);out(t1)": "t0",
    "t0=add(i0);out(t0)": "takes 2 arguments, not 1",
    "t0=neg(i0,i0);out(t0)": "takes 1 arguments, not 2",
    "t0=system(i0);out(t0)": "there is no function 'system'",
    "t0=neg(i2);out(t0)": "i2",
    "t0=neg(t0);out(t0)": "t0",
    "t0=neg(i0) ;out(t0)": "accepted",
    " out(i0)": "accepted",
    "t0=neg(x);out(t0)": "'x'",
    "t0=add(i0,1.0f);out(t0)": "'1.0f'",
    "t0=add(i0,0x10);out(t0)": "'0x10'",
    "t0=add(i0,.5);out(t0)": "'.5'",
    "t0=add(i0,);out(t0)": "''",
    "t0=add(i0,(i0));out(t0)": "add",
    "t0=add(i0,i0)}asm(;out(t0)": "accepted",
    "t0=mul(i0,n0);out(t0)": "'n0'",
    "t0=mul(i0,0.3);t1=mul(i0,n0);out(t1)": "'n0'",
    "t0=and(i0,i1);out(t0)": "truth value",
    "t0=neg(i1);out(t0)": "truth value",
    "t0=lt(i0,0.0);out(t0)": "truth value",
    "t0=where(i0,i0,i0);out(t0)": "truth value",
}


@pytest.mark.parametrize("text", MALFORMED, ids=repr)
def test_malformed_programs_are_refused(text):
    with pytest.raises(RuntimeError, match="program|statement") as found:
        torch.ops.fusebackend.computed_sums_compile(text, [f32, torch.bool], "rr", 1, [], 0, "sm_90")
    assert MALFORMED[text] in str(found.value)


def test_other_arguments_are_refused():
    compile_ = torch.ops.fusebackend.computed_sums_compile
    for arguments, why in (
        ((SELF, [f64], "r", 1, [], 0, "sm_90"), "fp32, fp16, bf16, uint8 and bool"),
        ((SELF, [], "", 1, [], 0, "sm_90"), f"1 to {MOST_INPUTS} inputs"),
        ((SELF, [f32] * (MOST_INPUTS + 1), "r" * (MOST_INPUTS + 1), 1, [], 0, "sm_90"), f"1 to {MOST_INPUTS} inputs"),
        ((SELF, [f32], "r", MOST_SUMS + 1, [], 0, "sm_90"), f"1 to {MOST_SUMS} results"),
        ((SELF, [f32], "rr", 1, [], 0, "sm_90"), "2 kinds for 1 inputs"),
        ((SELF, [f32], "x", 1, [], 0, "sm_90"), "kinds are"),
        ((SELF, [f32], "r", 1, [], 3, "sm_90"), "a vector of"),
    ):
        with pytest.raises(RuntimeError, match=why):
            compile_(*arguments)


def test_the_fake_tells_what_comes_and_refuses_what_the_kernel_refuses():
    with FakeTensorMode():
        x, column = torch.empty(4, 5, 8), torch.empty(1, 1, 8, dtype=bf16)
        found = computed_sums([column, x], "t0=mul(i0,i1);out(t0);out(i1)", [f32, bf16])
        assert [(t.shape, t.dtype, t.stride()) for t in found] == [((8,), f32, (1,)), ((8,), bf16, (1,))]
        for inputs, text, dtypes, why in (
            ([x.double()], SELF, [f32], "not supported"),
            ([x], SELF, [f64], "results are of types"),
            ([x[0, 0]], SELF, [f32], "one rank"),
            ([x, x[0]], PRODUCT, [f32], "one rank"),
            ([x, x[:, :3]], PRODUCT, [f32], "does not broadcast"),
            ([x[:, :1], x[:1]], PRODUCT, [f32], "no input has the sizes"),
            ([x], SELF, [f32, f32], "1 sums"),
            ([x] * (MOST_INPUTS + 1), SELF, [f32], f"{MOST_INPUTS} inputs"),
            ([x], "t0=foo(i0);out(t0)", [f32], "there is no function 'foo'"),
        ):
            with pytest.raises(RuntimeError, match=why):
                computed_sums(inputs, text, dtypes)
        (of_images,) = computed_sums([column, x], PRODUCT, [bf16], batch_dims=1, means=True)
        assert (of_images.shape, of_images.dtype, of_images.stride()) == ((4, 8), bf16, (8, 1))
        for batch_dims in (-1, 2):
            with pytest.raises(RuntimeError, match="of 3 dims 0 to 1 are accepted"):
                computed_sums([x], SELF, [f32], batch_dims)


@pytest.mark.parametrize(
    ("sizes", "strides", "domain", "kind"),
    [
        ((2, 3, 4, 8), (96, 32, 8, 1), (2, 3, 4, 8), "r"),
        ((2, 3, 4, 8), (192, 64, 16, 1), (2, 3, 4, 8), "r"),
        ((2, 3, 4, 8), (192, 32, 8, 1), (2, 3, 4, 8), None),  # images with gaps between them
        ((2, 3, 4, 8), (96, 4, 1, 12), (2, 3, 4, 8), None),
        ((1, 1, 1, 8), (1, 1, 1, 1), (2, 3, 4, 8), "c"),
        ((2, 3, 4, 8), (0, 0, 0, 1), (2, 3, 4, 8), "c"),
        ((2, 1, 1, 8), (8, 8, 8, 1), (2, 3, 4, 8), "g"),
        ((1, 3, 4, 8), (0, 32, 8, 1), (2, 3, 4, 8), "g"),
        ((1, 3, 1, 8), (0, 8, 8, 1), (2, 3, 4, 8), "g"),
        ((2, 1, 4, 8), (32, 32, 8, 1), (2, 3, 4, 8), None),
        ((2, 3, 4, 1), (12, 4, 1, 1), (2, 3, 4, 8), "f"),
        ((2, 1, 1, 1), (1, 1, 1, 1), (2, 3, 4, 8), "f"),
        ((2, 3, 4, 1), (12, 1, 3, 3), (2, 3, 4, 8), "t"),
        ((5, 2, 3, 4, 1), (24, 12, 1, 3, 3), (5, 2, 3, 4, 8), "t"),
        ((3, 4, 1), (1, 3, 1), (3, 4, 8), "t"),
        ((2, 3, 4, 1), (24, 1, 3, 1), (2, 3, 4, 8), None),  # images with gaps between them
        ((2, 3, 4, 1), (12, 1, 4, 1), (2, 3, 4, 8), None),  # columns with gaps
        ((1, 3, 4, 1), (12, 1, 3, 1), (2, 3, 4, 8), None),  # one image for all
        ((2, 3, 4, 8), (96, 1, 3, 12), (2, 3, 4, 8), None),
        ((1, 1, 1, 1), (1, 1, 1, 1), (2, 3, 4, 8), "s"),
        ((5, 1), (1, 1), (5, 1), "r"),
        ((5, 1), (7, 3), (5, 1), "r"),
        ((1, 8), (8, 1), (1, 8), "c"),
    ],
    ids=str,
)
def test_how_inputs_lie(sizes, strides, domain, kind):
    assert ops.kind(sizes, strides, domain) == kind


@pytest.mark.parametrize(
    ("sizes", "batch_dims", "kind"),
    [
        ((2, 1, 1, 8), 1, "i"),
        ((2, 1, 1, 8), 2, "i"),
        ((1, 3, 1, 8), 2, "i"),
        ((2, 3, 1, 8), 2, "i"),
        ((2, 3, 1, 8), 1, "g"),
        ((1, 3, 4, 8), 1, "g"),
        ((2, 3, 4, 8), 1, "r"),
        ((1, 1, 1, 8), 1, "c"),
        ((2, 1, 1, 1), 1, "f"),
    ],
    ids=str,
)
def test_how_inputs_of_a_batch_lie(sizes, batch_dims, kind):
    assert ops.kind(sizes, torch.empty(sizes).stride(), (2, 3, 4, 8), batch_dims) == kind


@pytest.mark.parametrize("sizes", [(4, 1, 8), (4, 0, 8), (1, 1, 8), (4, 0, 1), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("domain", [(4, 0, 8), (0, 1, 8), (0, 0, 8), (4, 0, 0)], ids=str)
def test_how_inputs_lie_is_told_of_no_rows_too(sizes, domain):
    """The process ended by a division where rows of images are none."""
    for batch_dims in range(2):
        assert ops.kind(sizes, torch.empty(sizes).stride(), domain, batch_dims) in set("rgftics")


def test_plans_give_every_row_to_one_block_and_fit_the_device():
    for rows in (1, 7, 100, 3000, 12544, 802816, 2**31 - 1):
        for columns in (1, 3, 8, 67, 96, 480, 1152, 2304, 100_000):
            for types, kinds in (([bf16, bf16, f32], "rrc"), ([f32], "r"), ([bf16, torch.bool, f32, f16], "rrgf")):
                facts = ops.plan_facts(types, kinds, 2, rows, columns, 132)
                vectors = columns / facts["vector"]
                assert (
                    vectors.is_integer()
                    and facts["tile_vectors"] * (facts["tiles"] - 1) < vectors <= facts["tile_vectors"] * facts["tiles"]
                )
                assert 1 <= facts["lanes"] <= rows and facts["lanes"] * facts["tile_vectors"] <= facts["threads"] <= 512
                assert facts["splits"] == 1 or facts["lanes"] * facts["splits"] <= rows
                assert facts["partials"] == (2 * facts["splits"] * columns if facts["splits"] > 1 else 0)
                if rows * columns > 10_000_000 and columns < 10_000:
                    assert 0.85 * 132 < facts["blocks"] <= 132


@pytest.mark.parametrize("batch", [2, 31, 132, 133, 256, 1000, 40_000])
def test_plans_of_images_keep_the_device_busy(batch):
    for rows in (1, 9, 49, 784, 12544):
        for columns in (1, 3, 67, 96, 144, 672, 1152, 5000, 100_000):
            facts = ops.plan_facts([bf16, bf16, f32], "rrc", 1, rows, columns, 132, batch=batch)
            vectors = columns / facts["vector"]
            assert facts["tile_vectors"] * (facts["tiles"] - 1) < vectors <= facts["tile_vectors"] * facts["tiles"]
            assert 1 <= facts["lanes"] <= rows and facts["lanes"] * facts["tile_vectors"] <= facts["threads"] <= 512
            assert facts["splits"] == 1 or facts["lanes"] * facts["splits"] <= rows
            assert facts["blocks"] == batch * facts["tiles"] * facts["splits"]
            assert facts["partials"] == (facts["blocks"] * columns / facts["tiles"] if facts["splits"] > 1 else 0)
            if batch * rows * columns > 10_000_000 and columns >= 67:
                threads = facts["blocks"] * facts["lanes"] * facts["tile_vectors"]
                assert threads > 0.7 * 132 * 512 or facts["rows_at_once"] * facts["lanes"] * facts["splits"] > rows / 2


def test_plans_depend_on_alignment():
    aligned, odd = (ops.plan_facts([bf16], "r", 1, 1000, 64, 132, misaligned)["vector"] for misaligned in (0, 2))
    assert (aligned, odd) == (8, 1)


def test_sites_and_the_library_agree_on_what_is_read_where_it_lies():
    """Three dims of sizes 1 to 3, broadcast or not, at strides that make them one, or do not."""
    for domain in itertools.product((1, 2, 3), repeat=3):
        for sizes in itertools.product(*((1, n) if n > 1 else (1,) for n in domain)):
            for strides in itertools.product((1, 2, 3, 6, 9), repeat=3):
                given = sizes, strides, domain
                assert expression.collapses(*given) == (ops.kind(*given) not in (None, "t")), given
