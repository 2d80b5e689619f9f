"""Which products are read where they lie, as if on a GPU: einsums, and what contractions become."""

import pytest
import torch
from families.traced_graphs import traced, traced_joint
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.bench import CASES
from fusebackend.patterns.contraction.match import Contraction
from fusebackend.patterns.permute.match import Permute
from fusebackend.patterns.strided_bmm.layout import Strided, begins_with_whole_vectors, layout_of
from fusebackend.patterns.strided_bmm.match import StridedBmm
from fusebackend.rewriting import apply

aten, op = torch.ops.aten, torch.ops.fusebackend.strided_bmm.default
pytestmark = pytest.mark.usefixtures("library", "kernels_for_every_device")

bf16, f32 = torch.bfloat16, torch.float32
SIZES = dict(zip("bclshpn", (2, 1, 64, 64, 24, 64, 64)))


def calls(graph, *targets):
    return [n for n in graph.nodes if n.target in targets]


def run(graph, *inputs):
    """What ``graph`` computes, on a CPU."""
    return torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*inputs)


def einsum(equation, dtype=bf16, sizes=SIZES):
    inputs = [torch.randn([sizes[d] for d in dims]).to(dtype) for dims in equation.split("->")[0].split(",")]
    return traced(lambda x, y: torch.einsum(equation, x, y), *inputs), inputs


def undecomposed(fn, *shapes):
    """The graph of ``fn`` as it is written, as if on a GPU: for a CPU Inductor takes some products apart, and no mutation is left."""
    with FakeTensorMode():
        graph = make_fx(fn)(*map(torch.empty, shapes)).graph
        for node in graph.nodes:
            if isinstance(value := node.meta.get("val"), torch.Tensor):
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), device="cuda")
    return graph


def rewritten(graph, *patterns):
    outcome = apply.rewrite(graph, list(patterns), "forward", strict=True)
    graph.eliminate_dead_code()
    return outcome


#: Equations with how many copies they need.
EINSUMS = {"bclhn,bcshn->bclsh": 2, "bclsh,bcshp->bclhp": 2, "bclhn,bclhp->bchpn": 2, "bclhn,bchpn->bclhp": 1}


@pytest.mark.parametrize("dtype", [bf16, torch.float16, f32], ids=str)
@pytest.mark.parametrize("equation", EINSUMS)
def test_einsums_read_their_operands_where_they_lie(equation, dtype):
    graph, inputs = einsum(equation, dtype)
    assert len(calls(graph, aten.clone.default)) == EINSUMS[equation]
    outcome = rewritten(graph, StridedBmm())
    assert len(outcome.substitutions) == 1
    assert len(calls(graph, op)) == 1 and not calls(graph, aten.clone.default, aten.bmm.default)
    wanted = torch.einsum(equation, *(x.double() for x in inputs))
    torch.testing.assert_close(
        run(graph, *inputs).double(), wanted, atol=0.2 if dtype != f32 else 1e-4, rtol=0.02 if dtype != f32 else 1e-4
    )


def test_one_row_and_one_column_are_left():
    graph = undecomposed(lambda x, y: x.clone().permute(0, 2, 1).bmm(y), (2, 8, 1), (2, 8, 1))
    outcome = rewritten(graph, StridedBmm())
    assert [rejection.reason for rejection in outcome.rejections] == ["a product with one row and one column"]


def test_gradients_read_what_was_copied_for_the_forward():
    graph = traced_joint(
        lambda x, y: torch.einsum("bclhn,bcshn->bclsh", x, y),
        [torch.randn([SIZES[d] for d in dims]) for dims in ("bclhn", "bcshn")],
        (0, 1),
    )
    rewritten(graph, StridedBmm())
    assert len(calls(graph, op)) == 3 and not calls(graph, aten.bmm.default)


def test_it_comes_before_faster_copies():
    graph, _ = einsum("bclhn,bcshn->bclsh")
    rewritten(graph, StridedBmm(), Permute())
    assert len(calls(graph, op)) == 1 and not calls(graph, torch.ops.fusebackend.permute_copy.default)


def test_contractions_copy_nothing():
    """Forward and gradients, each as the kernels of one route or another compute it."""
    for dtype in (bf16, f32):
        for fn, equation in CASES.values():
            inputs = [torch.randn([SIZES[d] for d in dims]) for dims in equation.split("->")[0].split(",")]
            fakes = [(*x.shape, dtype) for x in inputs]
            graph = traced(fn, *fakes)
            rewritten(graph, Contraction())
            assert calls(graph, op) and not calls(graph, aten.bmm.default, aten.clone.default), equation
            given = [x.to(dtype) for x in inputs]
            wanted = torch.einsum(equation, *(x.double() for x in given))
            found = run(graph, *given)
            assert found.stride() == fn(*given).stride()
            assert float((found.double() - wanted).norm() / wanted.norm()) < (5e-3 if dtype == bf16 else 1e-6)


def test_gradients_of_contractions_copy_nothing():
    def gradients(c, b, gradient):
        product = gradient[..., None]
        return (product * b[:, :, None]).sum(3), (product * c[:, :, :, None]).sum(2)

    shapes = [tuple(SIZES[d] for d in dims) for dims in ("bclhn", "bcshn", "bclsh")]
    graph = traced(gradients, *[(*s, bf16) for s in shapes])
    rewritten(graph, Contraction())
    assert len(calls(graph, op)) == 2 and not calls(graph, aten.bmm.default, aten.clone.default)
    inputs = [torch.randn(s).to(bf16) for s in shapes]
    for found, wanted in zip(run(graph, *inputs), gradients(*[x.double() for x in inputs])):
        assert float((found.double() - wanted).norm() / wanted.norm()) < 5e-3


def test_a_library_multiplies_what_lies_as_it_reads_it():
    graph = traced(lambda x, y: (x[:, :, None] * y[:, None]).sum(-1), (4, 64, 128, bf16), (4, 64, 128, bf16))
    rewritten(graph, Contraction())
    assert calls(graph, aten.bmm.default) and not calls(graph, op)
    graph = traced(torch.bmm, (4, 64, 128, bf16), (4, 128, 64, bf16))
    assert not rewritten(graph, StridedBmm()).rejections and not calls(graph, op)


def test_columns_stand_beside_the_batch_in_the_result():
    """So that memory is written in long runs, whichever operand they are of. Dims: outer, batch, the operands' own, terms."""
    sizes = dict(enumerate((2, 16, 64, 32, 128)))
    operands = [Strided({0: 0, 1: 2, own: 1, 4: 3}, {0: sizes[own] * 16 * 128, own: 16 * 128, 1: 128, 4: 1}) for own in (2, 3)]
    for memory, columns in (((0, 2, 3, 1), 3), ((0, 3, 2, 1), 2)):
        layout = layout_of((operands[0], operands[1]), sizes, {0, 1}, {4}, memory, bf16)
        assert layout is not None
        assert layout.columns == (columns,) and layout.order == (0, 2, 3, 1) and layout.swapped == (columns == 2)


#: With a part of the reason.
LEFT = {
    "rows of no whole vectors": ("bclhn,bcshn->bclsh", bf16, dict(SIZES, n=63), "vectors of 16 bytes are not aligned"),
    "fp64": ("bclhn,bcshn->bclsh", torch.float64, SIZES, "float64"),
    "a batch that is innermost in both": ("cmkh,cnkh->chmn", bf16, dict(zip("cmnkh", (2, 32, 32, 16, 8))), "innermost in y"),
    "a batch in three parts": ("amckbh,ancbkh->abchmn", bf16, dict(zip("amcnkbh", (2, 16, 3, 16, 16, 5, 4))), "lie in memory as one"),
    "columns of no whole vectors": ("chmk,cnhk->chmn", bf16, dict(zip("cmnkh", (2, 32, 31, 16, 8))), "a result in which vectors"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernels_do_not_compute_is_left_with_the_reason(name):
    *site, reason = LEFT[name]
    graph, _ = einsum(*site)
    (rejection,) = rewritten(graph, StridedBmm()).rejections
    assert not calls(graph, op) and reason in rejection.reason and rejection.code == "unsupported"


def test_what_begins_between_vectors_is_left_with_the_reason():
    graph, _ = einsum("bclhn,bcshn->bclsh")
    for copy in calls(graph, aten.clone.default):
        x = g.value(copy.args[0])
        with x.fake_mode:
            copy.args[0].meta["val"] = x.as_strided(x.shape, x.stride(), 1)
    (rejection,) = rewritten(graph, StridedBmm()).rejections
    assert not calls(graph, op) and "multiple of 16 bytes" in rejection.reason


def test_long_sums_in_fp32_are_left():
    graph, _ = einsum("bclhn,bcshn->bclsh", f32, dict(SIZES, n=256))
    (rejection,) = rewritten(graph, StridedBmm()).rejections
    assert "256 terms in fp32" in rejection.reason


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("tf32")
def test_a_lower_precision_setting_is_respected():
    graph, _ = einsum("bclhn,bcshn->bclsh", f32)
    (rejection,) = rewritten(graph, StridedBmm()).rejections
    assert "less than fp32" in rejection.reason


def test_a_copy_from_before_a_mutation_is_read():
    def fn(x, y):
        copied = aten.clone.default(aten.permute.default(x, [0, 2, 1, 3]), memory_format=torch.contiguous_format)
        if mutates:
            aten.add_.Tensor(x, 1)
        return aten.bmm.default(aten.view.default(copied, [16, 16, 32]), y)

    for mutates in (False, True):
        graph = undecomposed(fn, (2, 16, 8, 32), (16, 32, 24))
        rewritten(graph, StridedBmm())
        assert len(calls(graph, op)) == (not mutates)


def test_parts_of_symbolic_sizes_are_looked_at_without_guards():
    def scores(x, y):
        return torch.einsum("clhn,cshn->clsh", *(t[:2, :24, :8, :16] for t in (x, y)))

    graph = traced(scores, (6, 40, 10, 48, bf16), (7, 41, 11, 49, bf16), dynamic=True)
    x = next(g.value(n) for n in graph.nodes)
    before = len(x.fake_mode.shape_env.guards)
    (rejection,) = rewritten(graph, StridedBmm()).rejections
    assert "not known to begin" in rejection.reason and rejection.code == "unsupported"  # nothing was raised
    assert calls(graph, aten.bmm.default)
    with x.fake_mode:
        last = x.new_empty(16, x.shape[0]).as_strided((8,), (1,), x.shape[0])
    assert not begins_with_whole_vectors(last)
    assert len(x.fake_mode.shape_env.guards) == before


def test_symbolic_sizes_are_left_with_the_reason():
    graph = traced(lambda x, y: torch.einsum("clhn,cshn->clsh", x, y), (6, 40, 10, 48, bf16), (6, 41, 10, 48, bf16), dynamic=True)
    (rejection,) = rewritten(graph, StridedBmm()).rejections
    assert rejection.reason.startswith("symbolic sizes") and rejection.code == "unsupported" and calls(graph, aten.bmm.default)
