"""Inductor's generated code calls our operators past the dispatcher, and by it where somebody watches or something fails."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusebackend
from fusebackend.native import direct_calls, loader
from fusebackend.native.direct_calls import OPEN, prepare

F = torch.nn.functional
ours = torch.ops.fusebackend
bf16, f32 = torch.bfloat16, torch.float32


@pytest.fixture
def direct(library):
    """Skips where the library was built without Python's headers."""
    if not direct_calls.has_kernel(ours.permute_copy.default, "cpu"):
        pytest.skip("the library has no direct calls: it was built without Python.h")


def index(rows, count):
    return torch.arange(count) * 7 % rows


def whole(*shape):
    """Numbers whose sums are exact, since atomics add them in another order each time."""
    return torch.randint(-8, 9, shape).float()


#: One call of operators whose arguments and results are of all the types that there are.
CALLS = {
    "permute_copy": lambda: (torch.randn(5, 7, 3), [2, 0, 1]),
    "transpose_add": lambda: (torch.randn(5, 7), torch.randn(7, 5).mT, 0.5, 0, [1, 0]),
    "depthwise_conv": lambda: (
        *(torch.randn(2, 8, 9, 9), torch.randn(8, 1, 3, 3), torch.randn(8), [1, 1], [1, 1, 1, 1], [1, 1], True),
        *(None, None, None, None, 0.0, "relu"),
    ),
    "depthwise_conv_backward": lambda: (
        *(torch.randn(2, 8, 9, 9), torch.randn(2, 8, 9, 9), torch.randn(8, 1, 3, 3), [1, 1], [1, 1, 1, 1], [1, 1], None),
        *(False, True, True, True),
    ),
    "causal_conv1d": lambda: (torch.randn(2, 8, 30), torch.randn(8, 1, 4), None, 3, 0, 0.0, True, False, None, None, None, None, 0.0, ""),
    "attention": lambda: (*(torch.randn(2, 2, 24, 16).bfloat16() for _ in "qkv"), [torch.randn(1, 2, 24, 24)], 0.25, True, None, 1.0),
    "column_moments": lambda: (torch.randn(64, 40), 0, 1, 1.0, 1e-5, f32),
    "column_sum": lambda: (torch.randn(64, 40).bfloat16(), 0, 1, True, f32),
    "column_sums": lambda: (torch.randn(64, 40), torch.randn(64, 40), 0, 1, None, False, f32, True, False),
    "index_add": lambda: (whole(9, 16), 0, index(9, 40), whole(40, 16), None, None, 2.0, None, 1, False, True, None),
    "index_add_zeros": lambda: (9, 0, index(9, 40), whole(40, 16), None, None, 1.0, None, 1, False, False, None),
    "row_scatter": lambda: (torch.randn(4, 6, 30), index(20, 4 * 6 * 30).view(4, 6, 30), 20, None),
    "foreach_cast": lambda: ([torch.randn(64, 40), torch.randn(7)], torch.bfloat16),
    "max_pool_backward": lambda: (
        *(torch.randn(4, 6, 15, 20), index(9, 7200).view(4, 6, 15, 20).to(torch.int8)),
        *([30, 40], [3, 3], [2, 2], [1, 1], [1, 1], [0, 1, 2, 3]),
    ),
    "resample_backward": lambda: (
        *(torch.randn(4, 6, 30), 1, [index(5, 6), index(5, 6), index(20, 30)], [torch.randn(6), torch.randn(6), torch.randn(30)]),
        *([2, 1], [5, 20], [0, 1, 2], f32),
    ),
    "small_bmm": lambda: (torch.randn(50, 8, 8), torch.randn(50, 8, 8)),
    "computed_sums": lambda: ([torch.randn(64, 40), torch.randn(40)], "t0=mul(i0,i1);out(t0)", "f", 0, False, [0, 1]),
    "matmul": lambda: (torch.randn(64, 40), torch.randn(40, 32), None, 1.0, 0.0, None, -1, None, -1, "auto"),
    "strided_bmm": lambda: (torch.randn(1, 32, 40, 16).permute(0, 3, 1, 2), torch.randn(1, 24, 40, 16).permute(0, 3, 1, 2), [0, 2, 3, 1]),
}
ON_GPUS_ALONE = {"computed_sums", "foreach_cast", "matmul", "max_pool_backward", "resample_backward", "strided_bmm"}


def tensors_of(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def is_of_tensors(argument):
    return isinstance(argument, torch.Tensor) or (isinstance(argument, list) and argument and isinstance(argument[0], torch.Tensor))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("opened", ["tensors", "all but texts and dtypes"])
def test_a_direct_call_gives_what_the_operator_gives(direct, monkeypatch, device, name, opened):
    op = getattr(ours, name).default
    reason = "the kernel is CUDA's" if name in ON_GPUS_ALONE and device.type == "cpu" else loader.load().why_not(device, op)
    if reason:
        pytest.skip(reason)
    with device:
        arguments = CALLS[name]()
    assert direct_calls.has_kernel(op, device.type)
    wanted = tensors_of(op(*arguments))
    is_open = is_of_tensors if opened == "tensors" else lambda a: not isinstance(a, (str, torch.dtype))
    call = prepare(op, device.type, *(OPEN if is_open(a) else a for a in arguments))
    monkeypatch.setattr(op, "_op", None)  # what is not called
    got = call(*(a for a in arguments if is_open(a)))
    assert isinstance(got, torch.Tensor) == (op._schema.returns[0].type.kind() == "TensorType" and len(wanted) == 1)
    for g, w in zip(tensors_of(got), wanted, strict=True):
        assert g.dtype == w.dtype and g.stride() == w.stride() and not g.requires_grad
        assert torch.equal(g, w)


def test_neither_arguments_nor_results_are_kept(direct):
    call = prepare(ours.permute_copy.default, "cpu", OPEN, [1, 0])
    x = torch.randn(5, 7)
    references = weakref.ref(x), weakref.ref(call(x))
    del x
    gc.collect()
    assert [r() for r in references] == [None, None]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_dispatcher_sees_the_call(direct):
    x, call = torch.randn(5, 7), prepare(ours.permute_copy.default, "cpu", OPEN, [1, 0])
    with Seen() as seen:
        got = call(x)
    assert torch.equal(got, x) and got.stride() == (1, 5)
    assert seen.operators == [ours.permute_copy.default]


def test_a_profiler_sees_the_call(direct):
    x, call = torch.randn(5, 7), prepare(ours.permute_copy.default, "cpu", OPEN, [1, 0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        got = call(x)
    assert torch.equal(got, x) and got.stride() == (1, 5)
    assert "fusebackend::permute_copy" in {event.key for event in profiled.key_averages()}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ((OPEN, [0, 0]), (torch.randn(5, 7),)),  # the kernel refuses it
        ((OPEN, OPEN), (torch.randn(5, 7), "01")),  # no argument of this type
        ((OPEN, [1, 0]), (5.0,)),
        ((OPEN, [1, 0]), ("x",)),
        ((OPEN, [1, 0]), (None,)),
        ((OPEN, [1, 0]), ([[1]],)),
        ((OPEN, [1, 0]), (2**80,)),
    ],
)
def test_errors_are_those_of_the_operator(direct, arguments, given):
    op, values = ours.permute_copy.default, iter(given)
    with pytest.raises((RuntimeError, TypeError, ValueError, OverflowError)) as wanted:
        op(*(next(values) if a is OPEN else a for a in arguments))
    with pytest.raises(type(wanted.value)) as got:
        prepare(op, "cpu", *arguments)(*given)
    assert str(got.value).splitlines()[0] == str(wanted.value).splitlines()[0]


@pytest.mark.parametrize("value", ["x", None, [1], [torch.ones(2)]])
def test_a_number_of_another_type_is_refused_as_by_the_operator(direct, value):
    op, (x, y, _, *rest) = ours.transpose_add.default, CALLS["transpose_add"]()
    with pytest.raises(RuntimeError, match="argument 'alpha'"):
        op(x, y, value, *rest)
    with pytest.raises(RuntimeError, match="argument 'alpha'"):
        prepare(op, "cpu", OPEN, OPEN, OPEN, *rest)(x, y, value)


def test_a_number_in_a_tensor_is_read_as_by_the_operator(direct):
    op, (x, y, alpha, *rest) = ours.transpose_add.default, CALLS["transpose_add"]()
    assert torch.equal(prepare(op, "cpu", OPEN, OPEN, OPEN, *rest)(x, y, torch.tensor(alpha)), op(x, y, alpha, *rest))


def test_another_number_of_arguments_is_refused(direct):
    with pytest.raises(TypeError, match="CPU/permute_copy does not take 3 arguments"):
        prepare(ours.permute_copy.default, "cpu", OPEN, [1, 0], 1)
    with pytest.raises(TypeError, match="2 arguments were given, 1 are taken"):
        prepare(ours.permute_copy.default, "cpu", OPEN, [1, 0])(torch.randn(5, 7), [1, 0])


def test_without_a_kernel_the_operator_is_called(library, monkeypatch):
    monkeypatch.setattr(direct_calls, "has_kernel", lambda op, device_type: False)
    x = torch.randn(5, 7)
    with Seen() as seen:
        got = prepare(ours.permute_copy.default, "cpu", OPEN, [1, 0])(x)
    assert torch.equal(got, x) and got.stride() == (1, 5)
    assert seen.operators == [ours.permute_copy.default]


def code_of(fn, *inputs, **kwargs):
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(fn, backend="fuse", options={"fuse.gate": "off"}, **kwargs)
        result, (code, *_) = torch._inductor.utils.run_and_get_code(compiled, *inputs)
    assert fusebackend.last_report().substitutions
    return compiled, result, code


@pytest.mark.codegen
def test_generated_code_makes_equal_calls_by_one_function(direct, monkeypatch):
    fn = lambda x, w: F.conv2d(F.conv2d(x, w, padding=1, groups=8), w, padding=1, groups=8)  # noqa: E731
    x, w = torch.randn(2, 8, 9, 9), torch.randn(8, 1, 3, 3)
    compiled, result, code = code_of(fn, x, w)
    torch.testing.assert_close(result, fn(x, w))
    assert code.count("= prepare(torch.ops.fusebackend.depthwise_conv.default, 'cpu'") == 1
    assert code.count("= direct_call_0(") == 2
    monkeypatch.setattr(ours.depthwise_conv.default, "_op", None)
    torch.testing.assert_close(compiled(x, w), result)


@pytest.mark.codegen
def test_dynamic_sizes_are_given_at_each_call(direct):
    fn = lambda i, s: s.new_zeros(s.shape[1] * 2, s.shape[1]).index_add(0, i, s)  # noqa: E731
    compiled, result, code = code_of(fn, index(16, 300), torch.randn(300, 8), dynamic=True)
    assert "= direct_call_0(" in code
    for rows, width in ((300, 8), (77, 12), (1, 5)):
        i, s = index(2 * width, rows), torch.randn(rows, width)
        torch.testing.assert_close(compiled(i, s), fn(i, s))


@pytest.mark.codegen
def test_in_a_branch_of_control_flow(direct):
    fn = lambda x: torch.cond(x.sum() > 0, lambda x: x.t().contiguous(), lambda x: x.t().contiguous() + 1, (x,))  # noqa: E731
    x = torch.rand(50, 70)
    compiled, result, code = code_of(fn, x)
    assert torch.equal(result, x.mT) and torch.equal(compiled(-x), 1 - x.mT)
    assert code.count("import OPEN, prepare") == 1
