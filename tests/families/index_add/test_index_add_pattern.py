"""The spellings that become an index_add, and those that do not with their reasons."""

from __future__ import annotations

import random

import pytest
import torch

import fusebackend
from fusebackend.backend import fuse

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

pytestmark = pytest.mark.usefixtures("library")


ALL = {"fuse.strict": True, "fuse.gate": "off"}


def explain(function, *inputs):
    """What is found, whether it pays or not."""
    return fusebackend.explain(torch.compile(function, backend=fuse, options=ALL), *inputs)


@pytest.fixture(autouse=True)
def no_counts():
    torch._dynamo.utils.counters.clear()


N, ROWS, COLUMNS = 30, 50, 8


def embedding(x, i, padding):
    return torch.nn.functional.embedding(i, x, padding).relu()


def x_(dtype=torch.float32):
    return torch.randn(ROWS, COLUMNS).to(dtype)


def s_(dtype=torch.float32):
    return torch.randn(N, COLUMNS).to(dtype)


def i_(*shape, rows=ROWS):
    return torch.randint(0, rows, shape or (N,))


bf16 = torch.bfloat16
SPELLINGS = {
    "index_add": (lambda x, i, s: x.index_add(0, i, s), [x_, i_, s_]),
    "index_add alpha": (lambda x, i, s: x.index_add(0, i, s, alpha=-2.5), [x_, i_, s_]),
    "index_add last dim": (
        lambda x, i, s: x.index_add(-1, i, s),
        [x_, lambda: i_(rows=COLUMNS), lambda: torch.randn(ROWS, N)],
    ),
    "index_add bf16": (lambda x, i, s: x.index_add(0, i, s), [lambda: x_(bf16), i_, lambda: s_(bf16)]),
    "index_add int32 index": (lambda x, i, s: x.index_add(0, i.int(), s), [x_, i_, s_]),
    "index_add integers": (
        lambda x, i, s: x.index_add(0, i, s, alpha=3),
        [lambda: torch.arange(400).view(50, 8), i_, lambda: torch.arange(240).view(30, 8)],
    ),
    "index_add_ on an input": (lambda x, i, s: x.index_add_(0, i, s), [x_, i_, s_]),
    "index_add_ inside": (lambda x, i, s: (x * 2).index_add_(0, i, s) + 1, [x_, i_, s_]),
    "self used later": (lambda x, i, s: x.index_add(0, i, s) + x, [x_, i_, s_]),
    "index_put": (lambda x, i, s: x.index_put((i,), s, accumulate=True), [x_, i_, s_]),
    "index_put_ negative": (lambda x, i, s: x.index_put_((i - ROWS,), s, accumulate=True), [x_, i_, s_]),
    "index_put dim 1": (
        lambda x, i, s: torch.ops.aten.index_put(x, [None, i], s, True),
        [lambda: torch.randn(3, 50, 8), i_, lambda: torch.randn(3, 30, 8)],
    ),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i[:, None].expand(-1, COLUMNS), s), [x_, i_, s_]),
    "scatter_reduce": (lambda x, i, s: x.scatter_reduce(0, i[:, None].expand(-1, COLUMNS), s, "sum"), [x_, i_, s_]),
    "message passing": (
        lambda x, i, j, w: x.new_zeros(ROWS, COLUMNS).index_add(0, i, x[j] * w[:, None]),
        [x_, i_, i_, lambda: torch.randn(N)],
    ),
    "message passing onto x": (lambda x, i, j: x.index_add(0, i, x[j]), [x_, i_, i_]),
    "PyG message passing": (
        lambda x, i, j: x.new_zeros(ROWS, COLUMNS).scatter_add_(0, i[:, None].expand(-1, COLUMNS), x[j]),
        [lambda: x_().requires_grad_(), i_, i_],
    ),
    "counts": (lambda i: torch.zeros(ROWS, device=i.device).index_add(0, i, torch.ones(N, device=i.device)), [i_]),
    "backward of x[i]": (lambda x, i: x[i] * 2, [lambda: x_().requires_grad_(), i_]),
    "backward of x[i] bf16": (lambda x, i: x[i] * 2, [lambda: x_(bf16).requires_grad_(), i_]),
    "backward of x[i, j-dim]": (lambda x, i: x[i].sin(), [lambda: x_().requires_grad_(), lambda: i_(4, 6)]),
    "backward of x[:, i]": (lambda x, i: x[:, i].sin(), [lambda: torch.randn(3, 50, 8, requires_grad=True), i_]),
    "backward of index_select": (lambda x, i: x.index_select(0, i).sin(), [lambda: x_().requires_grad_(), i_]),
    "backward of embedding": (lambda x, i: embedding(x, i, None), [lambda: x_().requires_grad_(), lambda: i_(4, 6)]),
    "backward of padded embedding": (
        lambda x, i: embedding(x, i, 3),
        [lambda: x_().requires_grad_(), lambda: i_(40, 6)],
    ),
    "backward of embedding bf16": (
        lambda x, i: embedding(x, i, None),
        [lambda: x_(bf16).requires_grad_(), lambda: i_(40, 6)],
    ),
}


def run(function, inputs):
    out = function(*inputs)
    if out.requires_grad:
        out.sum().backward()
    return [out.detach(), *(t.detach() for t in inputs), *(t.grad for t in inputs if t.grad is not None)]


def copies(inputs):
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]


@pytest.mark.codegen
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_replaced_and_equals_eager(name, device):
    function, makers = SPELLINGS[name]
    inputs = [t.detach().to(device).requires_grad_(t.requires_grad) for t in (make() for make in makers)]
    report = explain(function, *copies(inputs))
    assert {s.pattern for s in report.substitutions} == {"index_add"}, report.rejections
    assert not report.rejections
    torch._dynamo.reset()
    expected = run(function, copies(inputs))
    found = run(torch.compile(function, backend=fuse, options=ALL), copies(inputs))
    for a, b in zip(expected, found):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, **({"rtol": 2e-2, "atol": 2e-2} if a.dtype is bf16 else {}))


def reasons(function, *inputs):
    report = explain(function, *inputs)
    assert not report.substitutions
    return " ".join(r.reason for r in report.rejections)


@pytest.mark.codegen
@pytest.mark.parametrize(
    "reason, function, inputs",
    [
        (
            "2 index tensors",
            lambda x, i, j, s: x.index_put((i, j), s, accumulate=True),
            [x_, i_, lambda: i_(rows=COLUMNS), lambda: torch.randn(N)],
        ),
        ("is bool", lambda x, s: x.index_put((x > 0,), s, accumulate=True), [x_, lambda: torch.tensor(1.0)]),
        (
            "are broadcast",
            lambda x, i, s: x.index_put((i,), s, accumulate=True),
            [x_, i_, lambda: torch.randn(COLUMNS)],
        ),
        ("not one number a row", lambda x, i, s: x.scatter_add(0, i, s), [x_, lambda: i_(N, COLUMNS), s_]),
        ("does not cover", lambda x, i, s: x.scatter_add(0, i[:, None].expand(-1, 5), s), [x_, i_, s_]),
        (
            "dtype complex64",
            lambda x, i, s: x.index_add(0, i, s),
            [lambda: x_(torch.complex64), i_, lambda: s_(torch.complex64)],
        ),
    ],
)
def test_refusal_gives_its_reason(reason, function, inputs):
    assert reason in reasons(function, *(make() for make in inputs))


@pytest.mark.codegen
def test_index_put_that_overwrites_is_no_candidate():
    assert reasons(lambda x, i, s: x.index_put((i,), s), x_(), torch.randperm(ROWS)[:N], s_()) == ""


@pytest.mark.codegen
@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_mutated_input_is_updated_without_a_copy(dtype):
    from torch._inductor.utils import run_and_get_code

    x, i, s = x_(dtype), i_(), s_(dtype)
    expected = x.index_add(0, i, s)
    compiled = torch.compile(lambda x, i, s: x.index_add_(0, i, s).sum(), backend=fuse, options=ALL)
    _, (code, *_) = run_and_get_code(compiled, x, i, s)
    torch.testing.assert_close(x, expected)
    body = code[code.index("def call(") :]
    assert "index_add_" in body
    assert "copy_(" not in body and f"empty_strided_cpu(({ROWS}, {COLUMNS})" not in body


@pytest.mark.codegen
def test_embedding_absorbs_its_mask_and_its_rounding():
    i = i_(40, 6)
    report = explain(lambda x: embedding(x, i, 3), x_(bf16).requires_grad_())
    (substitution,) = report.substitutions
    assert "rounded once" in substitution.note
    assert not [name for name in substitution.replacement if "convert" in name]


@pytest.mark.codegen
def test_dynamic_shapes_need_one_compile():
    def function(x, i, w):
        return torch.zeros(x.shape[0], COLUMNS).index_add(0, i, x[i] * w[:, None])

    compiled = torch.compile(function, backend=fuse, dynamic=True, fullgraph=True, options=ALL)
    x = x_()
    for n in (30, 7, 200):
        i, w = i_(n), torch.randn(n)
        torch.testing.assert_close(compiled(x, i, w), function(x, i, w))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("dim", "gathered"), [(0, lambda x, i: x[i] * 2), (1, lambda x, i: x[:, i] * 2)], ids=["0", "1"])
def test_an_index_of_two_dims_takes_any_sizes_in_one_compile(dim, gathered):
    options = {**ALL, "fuse.interpret": True}
    compiled = torch.compile(gathered, backend=fuse, dynamic=True, fullgraph=True, options=options)
    for shape, index in (((ROWS, COLUMNS, 3), (6, 7)), ((4, 5, 9), (2, 3)), ((7, 3, 2), (5, 4))):
        x, i = torch.randn(shape, requires_grad=True), i_(*index, rows=shape[dim])
        grad = torch.randn_like(gathered(x, i))
        expected, found = (torch.autograd.grad(f(x, i), x, grad)[0] for f in (gathered, compiled))
        torch.testing.assert_close(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert fusebackend.last_report().counts() == {"index_add": 1}


@pytest.mark.codegen
def test_a_second_shape_makes_sizes_symbols_and_sums_are_replaced_again():
    """Even sizes that must be equal get symbols of their own; where they differ at run time, it is an error as in eager."""
    compiled = torch.compile(lambda x, i, s: x.index_add_(0, i, s), backend=fuse, options=ALL)
    for rows, columns in ((50, 8), (40, 6)):
        x, i, s = torch.randn(rows, columns), torch.randint(rows, (30,)), torch.randn(30, columns)
        expected = x.index_add(0, i, s)
        torch.testing.assert_close(compiled(x, i, s), expected)
        assert len(fusebackend.last_report().substitutions) == 1
    with pytest.raises(RuntimeError):
        compiled(torch.randn(40, 6), i, torch.randn(30, 5))


@pytest.mark.codegen
def test_out_of_range_raises_from_compiled_code():
    compiled = torch.compile(lambda x, i, s: x.index_add(0, i, s), backend=fuse, options=ALL)
    with pytest.raises(IndexError):  # Inductor makes an index_put of it
        compiled(x_(), torch.full((N,), ROWS), s_())


@pytest.mark.codegen
def test_deterministic_setting_makes_a_deterministic_sum():
    torch.use_deterministic_algorithms(True)
    try:
        report = explain(lambda x, i, s: x.index_add(0, i, s), x_(), i_(), s_())
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic" in report.substitutions[0].note


# ---- legality is not profit ----


def small_sum(draw, device):
    shape = [draw.randint(1, 40) for _ in range(draw.randint(1, 3))]
    dim = draw.randrange(len(shape))
    source = list(shape)
    source[dim] = draw.randint(1, 30)
    index = torch.tensor([draw.randrange(shape[dim]) for _ in range(source[dim])], device=device)
    return dim, torch.randn(shape, device=device), index, torch.randn(source, device=device)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["small", "fused neighbour"])
def test_what_may_not_pay_is_applied_with_the_gate_off(interpreted, device, kind, seed):
    dim, x, i, s = small_sum(random.Random(f"{kind} {seed}"), device)

    def function(x, i, s):
        return x.index_add(dim, i, s.sin() if kind == "fused neighbour" else s)

    torch.testing.assert_close(interpreted(function, options={"fuse.strict": True})(x, i, s), function(x, i, s))
    assert [s.pattern for s in fusebackend.last_report().substitutions] == ["index_add"]


def test_an_empty_sum_is_applied_with_the_gate_off(interpreted, device):
    x, i, s = torch.randn(5, 3, device=device), torch.randint(5, (0,), device=device), torch.randn(0, 3, device=device)
    torch.testing.assert_close(interpreted(lambda x, i, s: x.index_add(0, i, s))(x, i, s), x)
    assert [s.pattern for s in fusebackend.last_report().substitutions] == ["index_add"]
