"""What an operator's kernel refuses its fake refuses too: so a call that can't be made is found while a graph is rewritten.

Each operator is called with arguments that are right but for one, on the CPU and on fake tensors: both must refuse, or both
must accept and agree on what they return.
"""

import functools
import itertools

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map_only

import fusebackend.rewriting.numeric_check  # noqa: F401  (defines an operator)
from fusebackend.native import ops as native_ops
from fusebackend.patterns.index_add.ops import DROP, STRICT, WRAP, reference_plan

ops = torch.ops.fusebackend
pytestmark = pytest.mark.usefixtures("library")


def floats(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def rows_of(n):
    return torch.zeros(n, dtype=torch.int64)  # in range of whatever has a row


def sums(**given):
    """The arguments of an index_add behind self or rows."""
    named = dict(
        dim=0, index=rows_of(5), source=floats(5, 3), weight=None, source_index=None, alpha=1.0, ignore_index=None, bounds=STRICT,
        precise=False, deterministic=False, plan=None,
    )  # fmt: skip
    return tuple({**named, **given}.values())


gathered = dict(source=floats(7, 3), source_index=rows_of(5), weight=floats(5), bounds=WRAP)
planned = dict(gathered, plan=reference_plan(rows_of(5), 4, None, WRAP, rows_of(5), 7))

heads = functools.partial(floats, dtype=torch.bfloat16)
attended = heads(2, 3, 5, 16), heads(2, 3, 7, 16), heads(2, 3, 7, 8), [heads(1, 3, 5, 7), floats(2, 1, 1, 7)]
bits = torch.zeros(2, 3, 1, 64, dtype=torch.int64)

seen = floats(2, 3, 5, 16), floats(2, 3, 7, 16), floats(2, 3, 7, 16)

#: Right calls of each operator.
CALLS = {
    "attention": [(*attended, 0.25, False, None, 1.0), (*attended[:3], [], 0.25, True, bits, 2.0)],
    "attention_backward": [
        (heads(2, 3, 5, 8), *attended, heads(2, 3, 5, 8), floats(2, 3, 5, 2), 0.25, False, [True, False], [], None, 1.0),
        (heads(2, 3, 5, 8), *attended, heads(2, 3, 5, 8), floats(2, 3, 5, 2), 0.25, False, [True, False], [True, True], bits, 2.0),
    ],
    "attention_mask_bits": [(torch.ones(2, 3, 5, 7, dtype=torch.bool),), (torch.ones(2, 2, 3, 5, 7, dtype=torch.bool),)],
    "index_add": [(floats(4, 3), *sums(**given)) for given in ({}, gathered, planned)],
    "index_add_": [(floats(4, 3), *sums(**given)) for given in ({}, gathered, planned)],
    "index_add_zeros": [(4, *sums(**given)) for given in ({}, gathered, dict(planned, plan=planned["plan"]))],
    "index_plan": [(rows_of(5), 4, None, WRAP, None, 5), (rows_of(5), 4, 0, DROP, rows_of(5), 7)],
    "permute_copy": [(floats(4, 5, 6), [1, 2, 0]), (floats(*[1] * 16), list(range(16)))],
    "transpose_add": [(floats(4, 5), floats(4, 5), 2.0, 2, [1, 0]), (floats(3, 4, 5), floats(4, 1), 2.0, 2, [1, 0, 2])],
    "matmul": [
        (floats(4, 5), floats(5, 6), floats(6), 1.0, 1.0, None, -1, None, -1, "auto"),
        (floats(2, 4, 5), floats(2, 5, 6), floats(4, 1), 1.0, 0.0, floats(2, 3, 4, 64, dtype=torch.bfloat16), -1, None, -1, "ffma"),
    ],
    "matmul_planes": [(floats(4, 5), -1), (floats(2, 4, 5), -2)],
    "causal_conv1d": [
        (floats(2, 4, 9), floats(4, 1, 3), floats(4), 2, 0, 0.0, True, False, *(None,) * 4, 0.0, ""),
        (floats(2, 4, 9), floats(4, 1, 3), None, 1, 1, 0.0, False, True, *(floats(4),) * 4, 1e-5, "gelu"),
    ],
    "causal_conv1d_backward": [(floats(2, 4, 9), floats(2, 4, 9), floats(4, 1, 3), floats(4), 2, 0.0, True, False, True, True, True)],
    "column_sum": [(floats(4, 5), 0, 1, False, torch.float32), (floats(3, 4, 5, 6), 1, 3, True, torch.float64)],
    "computed_rows": [([floats(4, 5), floats(1, 5)], "t0=mul(i0,i1);out(t0)", "f", False, [1, 0])],
    "computed_sums": [
        ([floats(4, 5), floats(1, 5)], "t0=mul(i0,i1);out(t0);out(i0)", "fb", 0, False, None),
        ([floats(3, 4, 5), floats(3, 1, 5)], "t0=mul(i0,i1);out(t0);out(i0)", "fb", 1, True, [0, 2, 1]),
        ([floats(3, 4, 5), floats(4)], "t0=mul(i0,i1);out(t0);out(i0)", "fb", 1, True, [0, 2, 1]),
    ],
    "column_moments": [(floats(4, 5), 0, 1, 0.0, 1e-5, torch.float32), (floats(3, 4, 5, 6), 1, 3, 1.0, 0.0, torch.float64)],
    "column_sums": [
        (floats(4, 5), floats(4, 5), 0, 1, torch.float32, False, torch.float32, True, False),
        (floats(3, 4, 5, 6), None, 1, 3, None, False, torch.float32, True, False),
    ],
    "row_scatter": [
        (floats(4, 5), rows_of(20).reshape(4, 5), 4, None),
        (floats(2, 3, 5), rows_of(15).reshape(1, 3, 5).int(), 4, floats(2, 3, 4)),
    ],
    "max_pool_backward": [
        (floats(2, 3, 3, 4), rows_of(72).reshape(2, 3, 3, 4).to(torch.int8), [7, 8], [3, 2], [2, 2], [1, 0], [1, 1], [0, 2, 3, 1]),
        (floats(2, 5, dtype=torch.float64), rows_of(10).reshape(2, 5).to(torch.int8), [9], [3], [2], [1], [2], [0, 1]),
    ],
    "resample_backward": [
        (floats(2, 5, 3), 1, [rows_of(5), rows_of(5)], [floats(5), floats(5)], [2], [4], [0, 1, 2], torch.bfloat16),
        (floats(5, 6, 3, dtype=torch.float64), 0, [rows_of(5).int(), rows_of(6).int()], [], [1, 1], [2, 3], [1, 2, 0], torch.float64),
    ],
    "sdpa": [(*seen, floats(2, 1, 1, 7), 0.25, False, False), (*seen, None, 0.25, True, True)],
    "foreach_cast": [([floats(4, 5), floats(3)], torch.bfloat16), ([floats(4, 5, dtype=torch.float16)], torch.float32)],
    "small_bmm": [(floats(5, 3, 4), floats(5, 4, 6)), (floats(2, 8, 4).mT, floats(2, 4, 8).mT)],
    "strided_bmm": [
        (floats(2, 8, 4, 8), floats(2, 8, 12, 8), [0, 2, 3, 1]),
        (heads(2, 3, 4, 8), heads(2, 3, 16, 8), [0, 1, 2, 3]),
    ],
    "depthwise_conv": [
        (floats(2, 4, 9, 9), floats(8, 1, 3, 3), floats(8), [1, 2], [1, 1, 0, 2], [1, 2], None, *(floats(8),) * 4, 1e-5, "silu"),
        (floats(2, 4, 9, 9), floats(4, 1, 3, 3), None, [1, 1], [0, 0, 0, 0], [1, 1], True, *(None,) * 4, 0.0, ""),
    ],
    "depthwise_conv_backward": [
        (floats(2, 4, 7, 7), floats(2, 4, 9, 9), floats(4, 1, 3, 3), [1, 1], [0, 0, 0, 0], [1, 1], True, False, True, True, True),
    ],
    "numeric_check": [(floats(4, 5), floats(4, 5), "a site")],
}
#: Those that take no tensor.
FACTS = {
    "attention_limits",
    "attention_min_shared_bytes",
    "attention_work",
    "causal_conv1d_limits",
    "causal_conv1d_prefers_btc",
    "causal_conv1d_transposes_btc",
    "causal_conv1d_work",
    "column_sum_plan",
    "computed_sums_compilations",
    "computed_sums_compile",
    "computed_sums_kind",
    "computed_sums_plan",
    "depthwise_conv_limits",
    "depthwise_conv_work",
    "fp32_matmul_constant",
    "fp32_matmul_work",
    "index_add_limits",
    "index_add_work",
    "index_plan_work",
    "max_pool_backward_plan",
    "resample_backward_plan",
    "row_scatter_limits",
    "row_scatter_plan",
    "small_bmm_most_size",
    "small_bmm_plan",
    "strided_bmm_plan",
    "strided_bmm_refusal",
    "strided_bmm_shared_bytes",
}


def test_no_operator_is_left_out():
    named = {op._schema.name.removeprefix("fusebackend::") for op in native_ops.defined if op.namespace == "fusebackend"}
    defined = {name for name in named if not name.startswith("test_")}  # of other tests
    assert defined == CALLS.keys() | FACTS


def wrong_tensors(tensor):
    yield None
    yield tensor.unsqueeze(0)
    yield tensor[0] if tensor.dim() else tensor
    yield tensor.reshape(-1)
    yield floats(*[1] * 17, dtype=tensor.dtype)
    for d, size in enumerate(tensor.shape):
        yield tensor.narrow(d, 0, size - 1)
        yield tensor.narrow(d, 0, 1)
        yield tensor.narrow(d, 0, 1).expand(tensor.shape)
        yield tensor.narrow(d, 0, 0)
        yield torch.cat([tensor, tensor], d)
        yield torch.cat([tensor, tensor], d).narrow(d, 0, size + 1)
        yield torch.stack([tensor, tensor], d + 1).select(d + 1, 0)  # with gaps
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64):
        yield tensor.to(dtype)


def wrong_values(argument, value):
    """Other values of an argument, most of them wrong."""
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        yield from wrong_tensors(rows_of(5) if value is None else value)
    elif kind in ("int", "SymInt", "Optional[int]"):
        yield from (-100, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 100)
    elif kind == "List[Tensor]":
        yield from ([], [*value, *value, *value][:5])
        yield from ([wrong, *value[1:]] for v in value[:1] for wrong in wrong_tensors(v) if wrong is not None)
    elif kind == "List[bool]":
        yield from ([], [*value, True], [not b for b in value])
    elif kind in ("List[int]", "Optional[List[int]]") and value is not None:
        yield from (value[:-1], [*value, len(value)], value[::-1], [0] * len(value), [-1, *value[1:]], [*value[:-1], 100])
    elif kind == "bool":
        yield not value
    elif kind == "str":
        yield "nonsense"


def outcome(op, args):
    try:
        return op(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def faked(args, mode, elsewhere=None):
    made = list(tree_map_only(torch.Tensor, mode.from_tensor, args))
    if elsewhere is not None:
        with mode:
            made[elsewhere] = torch.empty_like(made[elsewhere], device="cuda")
    return made


def spec(result):
    if isinstance(result, (tuple, list)):
        return tuple(map(spec, result))
    return (result.shape, result.stride(), result.dtype) if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("name", CALLS)
def test_kernel_and_fake_refuse_the_same(name):
    op, refused = getattr(ops, name).default, 0
    for right in CALLS[name]:
        calls = [right]
        for i, argument in enumerate(op._schema.arguments):
            calls += [(*right[:i], value, *right[i + 1 :]) for value in wrong_values(argument, right[i])]
        for args in calls:
            kernel = outcome(op, [written(a) if is_written(op, i) else a for i, a in enumerate(args)])
            with FakeTensorMode() as mode:
                fake = outcome(op, faked(args, mode))
            described = [tuple(a.shape) + (a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
            assert isinstance(kernel, str) == isinstance(fake, str), f"{described}: kernel {spec(kernel)}, fake {spec(fake)}"
            refused += isinstance(kernel, str)
            assert args is not right or not isinstance(kernel, str), kernel
            assert isinstance(kernel, str) or spec(kernel) == spec(fake), described
    assert refused


#: What only operators of ours make, whose results Inductor does not lay out: a position a call.
MADE_BY_OPERATORS = {"attention": {6}, "attention_backward": {12}, "matmul": {5}}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", CALLS)
def test_tensors_may_lie_in_any_order(name, device):
    """Inductor lays out anew what it computes, what a forward keeps for the backward, too: an operator in the backward's graph must take
    it in another order than the one in which it was matched."""
    if (name, device) == ("sdpa", "cuda"):
        pytest.skip("a kernel for CPUs")
    op = getattr(ops, name).default
    for right in CALLS[name]:
        right = [tree_map_only(torch.Tensor, lambda t: (torch.rand_like(t) if t.is_floating_point() else t).to(device), a) for a in right]
        for i, argument in enumerate(right):
            if i in MADE_BY_OPERATORS.get(name, ()) or is_written(op, i):
                continue
            moved = tree_map_only(torch.Tensor, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t, argument)
            args = [*right[:i], moved, *right[i + 1 :]]
            with FakeTensorMode() as mode:
                fake = outcome(op, faked(args, mode))
            kernel, wanted = outcome(op, args), outcome(op, right)
            assert not isinstance(wanted, str), wanted
            assert spec(kernel) == spec(fake), (i, kernel, fake)
            torch.testing.assert_close(kernel, wanted)


def written(tensor):
    """Memory that a kernel may write, laid out as the tensor."""
    return None if tensor is None else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def is_written(op, i):
    return op._schema.arguments[i].alias_info is not None and op._schema.arguments[i].alias_info.is_write


@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_two_devices_are_refused(name):
    op = getattr(ops, name).default
    for right in CALLS[name]:
        tensors = [i for i, a in enumerate(right) if isinstance(a, torch.Tensor)]
        for i in tensors if len(tensors) > 1 else ():
            with FakeTensorMode() as mode:
                assert "on" in outcome(op, faked(right, mode, elsewhere=i))


def test_rows_of_more_samples_than_the_kernels_count_are_refused():
    most, *_ = ops.causal_conv1d_limits()
    x = floats(1, 1, 1).expand(1, 1, most + 1)
    for args in (
        (x, floats(1, 1, 1), None, 0, 0, 0.0, False, False),
        (x[..., :3], floats(1, 1, 1), None, most + 1, -most, 0.0, False, False),
    ):
        assert_both_refuse(ops.causal_conv1d, args, f"rows of more than {most} samples")


def assert_both_refuse(op, args, words):
    with FakeTensorMode() as mode:
        assert words in outcome(op, faked(args, mode))
    assert words in outcome(op, args)


def test_convolutions_that_no_grid_covers_are_refused():
    """A grid has 2^31 - 1 blocks in x and 65,535 in z. The tensors are expanded: nothing is allocated."""
    _, taps, tiles, samples = ops.causal_conv1d_limits()
    assert (taps, tiles) == (65535 * 128, 2**31 - 1)
    few, many = floats(1, 1, 1), floats(1, 1, 1).expand(1 << 16, 1 << 15, 1)
    wide = floats(1, 1, 1).expand(1 << 15, 1, 2)
    long = floats(1, 1, 1).expand(1 << 12, 1 << 11, (samples << 8) - samples + 1)
    for x, weight in ((few.expand(1, 1, taps + 1), few.expand(1, 1, taps + 1)), (many, wide), (long, wide[: 1 << 11])):
        words = f"more than {taps} taps" if x.shape[0] == 1 else f"more than {tiles} rows"
        left = weight.shape[2] - 1
        assert_both_refuse(ops.causal_conv1d, (x, weight, None, left, 0, 0.0, False, False), words)
        assert_both_refuse(ops.causal_conv1d_backward, (x, x, weight, None, left, 0.0, False, False, False, True, False), words)


def test_a_fake_with_symbolic_sizes_adds_no_guard():
    for name, calls in CALLS.items():
        op = getattr(ops, name).default
        for args in calls:
            shapes = ShapeEnv()
            mode, count = FakeTensorMode(shape_env=shapes), itertools.count()

            def symbolic(a, mode=mode, count=count, name=name):
                context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * a.dim())
                return mode.from_tensor(a, symbolic_context=context, source=ConstantSource(f"{name}_{next(count)}"))

            made = tree_map_only(torch.Tensor, symbolic, args)
            guards = len(shapes.guards)
            op(*made)
            added = [guard for guard in shapes.guards[guards:] if not is_pytorchs_own(guard)]
            assert not added, (name, added)


def is_pytorchs_own(guard):
    """Of any new tensor: that its sizes are not negative and, if it has four dims, whether one is 0."""
    return str(guard.expr).endswith(">= 0") or "are_strides_like_channels_last" in str(guard.sloc)
