"""permute -> add: found where it pays, refused with a reason elsewhere, bitwise equal to eager always."""

import pytest
import torch
from torch import nn

import fusebackend
from fusebackend.patterns.transpose_add import match as family
from fusebackend.tools.byte_lm import ByteLM

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Sites too small to pay on a GPU are found here all the same: the tests are about shapes."""
    monkeypatch.setattr(family, "_SMALL_CUDA", 0)


def tensor(*shape, dtype=torch.float32, device="cpu"):
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    low = 0 if dtype == torch.uint8 else -100
    return torch.randint(low, 100, shape, device=device).to(dtype)


def check(interpreted, fn, *inputs, count=1, values=None, **kwargs):
    """The result equals eager's (or ``values``) to the bit, strides included, and the family was applied ``count`` times."""
    expected = fn(*inputs)
    result = interpreted(fn, options={"fuse.patterns": "transpose_add"}, **kwargs)(*inputs)
    assert result.dtype == expected.dtype and result.stride() == expected.stride()
    assert torch.equal(result, expected if values is None else values)
    report = fusebackend.last_report()
    assert len(report.substitutions) == count, report
    return report


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("alpha", [1, 4, -2])
def test_every_dtype_is_bitwise_eager(interpreted, device, dtype, alpha):
    x, y = tensor(70, 131, dtype=dtype, device=device), tensor(131, 70, dtype=dtype, device=device)
    check(interpreted, lambda x, y: torch.add(x.t(), y, alpha=alpha), x, y)
    check(interpreted, lambda x, y: torch.sub(y, x.t(), alpha=alpha), x, y)


@pytest.mark.parametrize("alpha", [3, 0.1, -1e-3, 3.7])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_alpha_rounds_once(interpreted, device, dtype, alpha):
    x, y = tensor(200, 133, dtype=dtype, device=device), tensor(133, 200, dtype=dtype, device=device)
    # Eager on the CPU rounds 16-bit floats more than once here (see the family's reference); on CUDA it does not.
    once = family.reference(x.t(), y, alpha, 0, [0, 1]) if device.type == "cpu" else None
    check(interpreted, lambda x, y: torch.add(x.t(), y, alpha=alpha), x, y, values=once)


CASES = {
    "second operand": (lambda x, y: y + x.transpose(0, 1), [(33, 65), (65, 33)]),
    "rank 3": (lambda x, y: x.transpose(1, 2) + y, [(3, 40, 50), (3, 50, 40)]),
    "rank 4": (lambda x, y: x.permute(0, 3, 1, 2) + y, [(2, 20, 30, 24), (2, 24, 20, 30)]),
    "rank 5 reversed": (lambda x, y: x.permute(4, 3, 2, 1, 0) + y, [(3, 5, 7, 9, 11), (11, 9, 7, 5, 3)]),
    "mT": (lambda x, y: x.mT + y, [(2, 3, 30, 40), (2, 3, 40, 30)]),
    "broadcast over the batch": (lambda x, y: y + x.transpose(1, 2), [(4, 40, 50), (50, 40)]),
    "broadcast of the permuted one": (lambda x, y: x.t() + y, [(40, 50), (6, 50, 40)]),
    "a slice, misaligned": (lambda x, y: x[1:, 3:].t() + y, [(41, 53), (50, 40)]),
    "a column slice": (lambda x, y: x[:, ::1][:, 1:].t() + y, [(40, 51), (50, 40)]),
    "size-1 dims": (lambda x, y: x.permute(2, 1, 0) + y, [(40, 1, 50), (50, 1, 40)]),
    "narrow": (lambda x, y: x.t() + y, [(1000, 3), (3, 1000)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_spellings_ranks_and_layouts(interpreted, device, name, dynamic):
    fn, shapes = CASES[name]
    check(interpreted, fn, *(tensor(*s, device=device) for s in shapes), dynamic=dynamic)


def test_a_transposed_graph_input_needs_no_permute_in_the_graph(interpreted, device):
    check(interpreted, lambda x, y: x + y, tensor(40, 50, device=device).t(), tensor(50, 40, device=device))


def test_the_same_tensor_twice(interpreted, device):
    check(interpreted, lambda x: x.t() + x, tensor(60, 60, device=device))


def test_expanded_and_empty_operands(interpreted, device):
    # A stride of 0 along the fast dim: no second memory order, so nothing to do; the result must be right all the same.
    check(interpreted, lambda x, y: x.t() + y.expand(50, 40), tensor(40, 50, device=device), tensor(1, 40, device=device), count=0)
    for shapes in [((0, 50), (50, 0)), ((40, 0), (0, 40))]:
        x, y = (tensor(*s, device=device) for s in shapes)
        assert interpreted(lambda x, y: x.t() + y)(x, y).shape == (x.t() + y).shape


@pytest.mark.parametrize(
    ("fn", "shapes", "reason"),
    [
        (lambda x, y: x.t().double() + y.double().double(), [(8, 6), (6, 8)], "Inductor fuses it with its neighbour"),
        (lambda x, y: x.t() + y.half(), [(8, 6), (6, 8)], "mixed dtypes: torch.float32 and torch.float16"),
        (lambda x, y: x.t().to(torch.complex64) + y, [(8, 6), (6, 8)], "mixed dtypes"),
        (lambda x, y: (x > 0).t() + (y > 0), [(8, 6), (6, 8)], "dtype torch.bool is not supported"),
        (lambda x, y: x.t() + y, [(8, 6), (8,)], "run along the same dim"),
        (lambda x, y: x.t() + y.t(), [(8, 6), (8, 6)], "run along the same dim"),
        (lambda x, y: torch.relu(x.t() + y), [(8, 6), (6, 8)], "neighbour aten.relu.default"),
        (lambda x, y: (x.t() + y).sum(0), [(8, 6), (6, 8)], "neighbour aten.sum.dim_IntList"),
        (lambda x, y: x.exp().t() + y, [(8, 6), (6, 8)], "neighbour aten.exp.default"),
        (lambda x, y: x.t() + y.to(memory_format=torch.contiguous_format).sin(), [(8, 6), (6, 8)], "neighbour aten.sin.default"),
        (lambda x, y: torch.add(x.t(), y, alpha=2**60), [(8, 6), (6, 8)], "alpha=1152921504606846976 is not accepted"),
    ],
)
def test_a_near_miss_says_why(interpreted, fn, shapes, reason):
    inputs = [tensor(*s) for s in shapes]
    expected = fn(*inputs)
    result = interpreted(fn, options={"fuse.patterns": "transpose_add"})(*inputs)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    report = fusebackend.last_report()
    assert not report.substitutions
    assert any(reason in r.reason for r in report.rejections), report


@pytest.mark.cuda
def test_small_sums_stay_with_inductor(interpreted, monkeypatch):
    monkeypatch.setattr(family, "_SMALL_CUDA", 2 << 20)
    interpreted(lambda x, y: x.t() + y)(tensor(64, 600, device="cuda"), tensor(600, 64, device="cuda"))
    assert ["153600 bytes" in r.reason for r in fusebackend.last_report().rejections] == [True]


@pytest.mark.parametrize(
    ("shape", "order", "dtype", "dynamic", "reason"),
    [
        ((165, 83, 3), (2, 1, 0), torch.float16, False, None),
        ((165, 83, 3), (2, 1, 0), torch.float32, False, "long"),
        ((3, 83, 165), (2, 1, 0), torch.float32, True, None),
        ((3, 83, 165), (2, 1, 0), torch.float16, False, "long"),
        ((512, 320), (1, 0), torch.bfloat16, False, "long"),
        ((512, 320), (1, 0), torch.bfloat16, True, "long"),
        ((50, 60, 3), (2, 1, 0), torch.float16, False, "9000 elements"),
    ],
)
def test_on_a_cpu_only_sums_of_short_rows_are_proven(interpreted, shape, order, dtype, dynamic, reason):
    x, y = tensor(*shape, dtype=dtype), tensor(*(shape[d] for d in order), dtype=dtype)
    interpreted(lambda x, y: x.permute(order) + y, dynamic=dynamic, options={"fuse.gate": "auto"})(x, y)
    report = fusebackend.last_report()
    assert len(report.substitutions) == (reason is None)
    assert [reason in r.reason and "not timed" in r.reason for r in report.rejections] == [True] * (reason is not None)


def test_an_in_place_add_is_left_to_inductor_which_writes_in_place(interpreted):
    def fn(x, y):
        x.add_(y.t())
        return x

    x, y = tensor(8, 6), tensor(6, 8)
    expected = fn(x.clone(), y)
    got = interpreted(fn)(x, y)
    assert got is x and torch.equal(x, expected)
    assert "aten.copy_.default" in fusebackend.last_report().rejections[0].reason


def test_ordinary_adds_are_not_near_misses(interpreted):
    interpreted(lambda x, y: (x + y) * 2 + 1)(tensor(8, 6), tensor(8, 6))
    assert not fusebackend.last_report().rejections


def test_a_neighbour_behind_a_matmul_is_no_reason_to_refuse(interpreted):
    """The residual of the next layer is pointwise too, but it needs the matmul's result: no fusion can reach it."""
    linear = nn.Linear(40, 40)

    def fn(x, y):
        h = x.transpose(0, 1) + y
        return h + linear(h).relu()

    interpreted(fn, options={"fuse.patterns": "transpose_add"})(tensor(40, 50), tensor(50, 40))
    assert len(fusebackend.last_report().substitutions) == 1


def test_the_demo_model_has_one_a_block(device):
    model = ByteLM(channels=32, time_steps=64, blocks=3).to(device)
    compiled = torch.compile(model, backend="fuse", options={"fuse.gate": "off"})
    report = fusebackend.explain(compiled, torch.randint(256, (2, 64), device=device))
    found = [s for s in report.substitutions if s.pattern == "transpose_add" and s.graph == "forward"]
    assert len(found) == 3
    assert all("x + self.mix(x.transpose(1, 2)).transpose(1, 2)" in s.source.code for s in found)


def test_training_gives_eagers_gradients(interpreted, device):
    def fn(x, y, w):
        return ((x.transpose(1, 2) + y) @ w).square().mean()

    def gradients(f):
        inputs = [t.detach().clone().requires_grad_() for t in origin]
        f(*inputs).backward()
        return [t.grad for t in inputs]

    origin = tensor(3, 24, 40, device=device), tensor(3, 40, 24, device=device), tensor(24, 7, device=device)
    torch.testing.assert_close(gradients(interpreted(fn)), gradients(fn))


SAMPLES = [
    ((5, 7), (5, 7), [0, 1]),
    ((5, 7), (5, 7), [1, 0]),
    ((3, 5, 7), (5, 7), [2, 0, 1]),
    ((5, 1), (1, 7), [1, 0]),
    ((0, 4), (0, 4), [0, 1]),
    ((), (), []),
]


@pytest.mark.parametrize(("x_shape", "y_shape", "order"), SAMPLES)
def test_opcheck(device, x_shape, y_shape, order):
    x, y = (tensor(*s, device=device) for s in (x_shape, y_shape))
    torch.library.opcheck(family.transpose_add, (x, y, 1.5, 0, order))


@pytest.mark.parametrize(("x_shape", "y_shape", "order"), SAMPLES)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_the_operator_equals_its_reference(device, x_shape, y_shape, order, dtype):
    x, y = tensor(*x_shape, dtype=dtype, device=device), tensor(*y_shape, dtype=dtype, device=device)
    got, expected = (f(x, y, 1.5, 3, order) for f in (family.transpose_add, family.reference))
    assert torch.equal(got, expected) and got.stride() == expected.stride()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.ones(2, 3), torch.ones(2, 3).double(), 1.0, 0, [0, 1]), "dtype"),
        ((torch.ones(2, 3), torch.ones(2, 4), 1.0, 0, [0, 1]), "shape|size|broadcast"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, 0, [0, 0]), "order"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, 0, [0]), "order"),
        ((torch.ones(2, 3).to(torch.complex64), torch.ones(2, 3).to(torch.complex64), 1.0, 0, [0, 1]), "dtype"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(RuntimeError, match=words):
        family.transpose_add(*arguments)


@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    x = torch.randint(-100, 100, (46400, 46400), dtype=torch.int8, device="cuda")
    y = torch.randint(-100, 100, (46400, 46400), dtype=torch.int8, device="cuda")
    out = family.transpose_add(x.t(), y, 1.0, 1, [0, 1])
    assert torch.equal(out, x.t() + y)


@pytest.mark.parametrize(
    ("shape", "dtype", "dynamic", "reason"),
    [
        ((4100, 4096), torch.bfloat16, False, ""),  # the transposed operand's rows are of 4100
        ((4100, 4100), torch.bfloat16, False, "few bytes"),
        ((5100, 5100), torch.bfloat16, False, ""),
        ((4096, 4100), torch.bfloat16, False, "begin at sectors"),
        ((2900, 2900), torch.bfloat16, False, "few bytes"),
        ((4096, 2000), torch.bfloat16, False, "below 2048"),
        ((8, 4096, 4096), torch.bfloat16, True, ""),
        ((4096, 1024), torch.bfloat16, True, "few bytes"),
        ((2**20, 40), torch.bfloat16, True, "short rows"),
        ((700, 120, 240), torch.bfloat16, True, "short rows"),
        ((700, 120, 280), torch.bfloat16, True, "a side below 128"),
        ((700, 130, 280), torch.bfloat16, True, ""),
        ((4096, 4096), torch.float32, True, "large planes"),
        ((300, 100, 600), torch.float32, True, "a side below 128"),
        ((70, 100, 600), torch.float32, True, "few bytes"),
    ],
)
def test_where_a_gpu_gains(shape, dtype, dynamic, reason):
    found = _unproven(shape, [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2], dtype, dynamic)
    assert reason in found if reason else found == ""


def test_dynamic_sums_of_a_short_side_gain_where_another_dim_lies_between():
    assert _unproven((120, 700, 280), [2, 1, 0], torch.bfloat16, True) == ""
    assert _unproven((120, 700, 280), [2, 1, 0], torch.float32, True) == ""


def _unproven(shape, order, dtype, dynamic):
    """What the guards say of a sum of this shape and an operand whose dims lie in memory in this order."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    out = torch.empty(shape, dtype=dtype, device="meta")
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(shape)) if dynamic else None
    with mode:
        out = mode.from_tensor(out, source=ConstantSource("out"), symbolic_context=context) if dynamic else torch.empty_like(out)
        operand = torch.empty([out.shape[d] for d in order], dtype=dtype, device="meta").permute(
            [order.index(d) for d in range(len(shape))]
        )
        return family._unproven((operand, out), out)
