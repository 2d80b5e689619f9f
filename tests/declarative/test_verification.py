"""What verification refuses besides wrong numbers: memory that is shared or written, results that depend on history, lying fakes."""

import functools

import pytest
import torch
from example_pattern import pair
from torch._inductor import decomposition

import fusebackend
from fusebackend import RegistrationError, VerificationError
from fusebackend.rewriting import registry
from fusebackend.testing import PatternAssertion, assert_pattern

LIBRARY = torch.library.Library("test_verify", "FRAGMENT")
A, B = pair(4, 8)


def operator(name, kernel, fake=torch.empty_like, schema="(Tensor x) -> Tensor"):
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"test_verify::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.test_verify, name).default


def refused(error, search, replace, *example):
    before = [t.clone() for t in example]
    with pytest.raises(error) as caught:
        fusebackend.register_replacement(search, replace, example, name="test_refused")
    assert "test_refused" not in registry.known_names()
    assert all(map(torch.equal, example, before)), "the examples are the user's"
    return str(caught.value)


@pytest.mark.parametrize(
    ("search", "replace", "words"),
    [
        (lambda x: x.clone(), lambda x: x, "in the replacement output 0 shares memory with x, in the search function it does not"),
        (lambda x: x.view(-1).clone(), lambda x: x.view(-1), "in the replacement output 0 shares memory with x"),
        (lambda x: x.view(-1), lambda x: x.view(-1).clone(), "in the search function output 0 shares memory with x"),
        (
            lambda x: (x.sin(), x.sin().view(-1).clone()),
            lambda x: (lambda s: (s, s.view(-1)))(x.sin()),
            "output 1 shares memory with output 0",
        ),
        (lambda x: x, lambda x: x, "nothing to replace"),
        (lambda x: x * 2, lambda x: x.mul_(2), "writes to its arguments (aten.copy_.default)"),
        (lambda x: x.mul_(2), lambda x: x * 2, "writes to its arguments (aten.copy_.default)"),
        (lambda x: x * 2, lambda x: x * 2 + 0 * torch.rand_like(x), "draws random numbers (aten.rand"),
    ],
)
def test_what_the_graphs_show_is_refused_without_being_run(search, replace, words):
    assert words in refused(RegistrationError, search, replace, A)


def test_a_gradient_that_is_passed_on_stays_what_it_is():
    example = tuple(t.clone().requires_grad_() for t in (A, B))
    fusebackend.register_replacement(lambda x, y: torch.tanh(x) + y, lambda x, y: y + torch.tanh(x), example, name="test_passed_on")
    try:
        fn = lambda x, y: torch.tanh(x.sin()) + y.cos()  # noqa: E731
        (made,) = assert_pattern(fn, *example, pattern="test_passed_on", count=1, training=True).substitutions
        assert made.graph == "joint" and len(made.outputs) == 2, "the result and the gradient of x"
    finally:
        fusebackend.unregister("test_passed_on")


def test_a_declared_mutation_of_an_argument_is_refused():
    op = operator("zero_after", lambda x: (2 * x, x.zero_())[0], schema="(Tensor(a!) x) -> Tensor")
    assert "writes to its arguments" in refused(RegistrationError, lambda x: x * 2, lambda x: op(x), A)


def test_a_secret_mutation_is_refused():
    op = operator("secret", lambda x: (2 * x, x.zero_())[0])
    assert "secret.default: it writes to its argument 'x', which its schema does not say" in refused(
        VerificationError, lambda x: x * 2, lambda x: op(x), A
    )


def test_a_mutation_between_an_arguments_elements_is_refused():
    """Only memory that a slice leaves out is written."""

    def kernel(x):
        whole = torch.empty(0).set_(x.untyped_storage())
        if whole.numel() > x.numel() > 0:
            whole[1] += 1
        return 2 * x

    op = operator("beside", kernel, lambda x: 2 * x)
    assert "sliced storage" in refused(VerificationError, lambda x: x * 2, lambda x: op(x), A)


def test_an_output_buffer_may_be_written():
    """The usual form of a kernel that writes to a tensor it is given."""
    op = operator("double_into", lambda x, out: (out.copy_(2 * x), None)[1], lambda x, out: None, "(Tensor x, Tensor(a!) out) -> ()")

    def replacement(x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        op(x, out)
        return out

    fusebackend.register_replacement(lambda x: (2 * x).contiguous(), replacement, (A,), name="test_buffer")
    try:
        assert_pattern(lambda x: 2 * x.sin(), A, pattern="test_buffer", count=1)
    finally:
        fusebackend.unregister("test_buffer")


def test_an_operator_that_returns_its_argument_for_some_inputs_is_refused():
    op = operator("lazy_contiguous", lambda x: x.contiguous(), lambda x: x.new_empty(x.shape))
    words = refused(VerificationError, lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: op(x), A.t())
    assert "shares memory with its argument 'x', which its schema does not say" in words


def test_results_that_depend_on_the_order_in_memory_are_refused():
    """The kernel takes its first argument's order for that of the second."""

    def kernel(x, y):
        if y.stride() == x.stride() or not x.mT.is_contiguous():
            return x + y
        return x + y.reshape(-1).view(x.mT.shape).mT

    op = operator("same_order", kernel, lambda x, y: x + y, "(Tensor x, Tensor y) -> Tensor")
    assert "transposed storage of x alone: output 0" in refused(VerificationError, lambda x, y: x + y, lambda x, y: op(x, y), A, B)


@pytest.mark.parametrize("kind", ["counts", "one buffer"])
def test_results_that_depend_on_earlier_calls_are_refused(kind):
    calls, buffers = [None], {}  # so that the first of the two calls that are compared is right

    def counts(x):
        calls.append(x)
        return 2 * x + (len(calls) % 2 - 1)

    def one_buffer(x):
        return torch.mul(x, 2, out=buffers.setdefault(x.shape, torch.empty(x.shape)))

    op = operator(kind.replace(" ", "_"), counts if kind == "counts" else one_buffer, lambda x: x.new_empty(x.shape))
    words = refused(VerificationError, lambda x: (x * 2).contiguous(), lambda x: op(x), A)
    assert ("only the first call is right" if kind == "counts" else "a second call returns the memory that the first returned") in words


@pytest.mark.parametrize(
    ("name", "kernel", "what"),
    [
        ("shape", lambda x: (2 * x).t(), "shape torch.Size([4, 8]), the kernel torch.Size([8, 4])"),
        ("dtype", lambda x: 2 * x.double(), "dtype torch.float32, the kernel torch.float64"),
        ("strides", lambda x: (2 * x).t().contiguous().t(), "strides (8, 1), the kernel (1, 4)"),
        ("device", lambda x: (2 * x).to("meta"), "device cpu, the kernel meta"),
        ("transposed_strides", lambda x: (2 * x).contiguous(), "strides (1, 7), the kernel (13, 1)"),
    ],
)
def test_a_fake_that_promises_something_else_is_refused(name, kernel, what):
    op = operator(f"wrong_{name}", kernel, lambda x: 2 * x)
    assert f"its fake gives {what}" in refused(VerificationError, lambda x: 2 * x, lambda x: op(x), A)


def test_zero_is_not_nan():
    words = refused(VerificationError, lambda x: x * 2, lambda x: torch.where(x.isnan(), 0.0, x * 2), A)
    assert "inf or nan are at different positions" in words


@pytest.mark.parametrize("training", [False, True])
def test_what_is_not_finite_may_be_as_inductors_decomposition_gives_it(monkeypatch, training):
    """Eager's ``hardtanh`` is one kernel. Here it is decomposed into operations that make something else of nan, as a replacement does."""
    # Inductor decomposes into operations that have no gradient of their own, like this one.
    single = functools.partial(torch.ops.prims.convert_element_type.default, dtype=torch.float32)
    where = torch.where
    table = {torch.ops.aten.hardtanh.default: lambda x, low=-1.0, high=1.0: where(x > low, where(x < high, single(x), high), low)}
    example = (A.clone().requires_grad_(training),)

    def search(x):
        return torch.nn.functional.hardtanh(x)

    def replacement(x):
        return torch.where(x > -1, torch.where(x < 1, x, 1.0), -1.0)

    assert "inf or nan are at different positions" in refused(VerificationError, search, replacement, *example)
    monkeypatch.setattr(decomposition, "select_decomp_table", lambda: table)
    fusebackend.register_replacement(search, replacement, example, name="test_decomposed")
    fusebackend.unregister("test_decomposed")


def test_complex_results_are_compared_as_numbers():
    x = torch.randn(4, 8, dtype=torch.complex64)
    fusebackend.register_replacement(lambda x: x * x * x, lambda x: (x * x).mul(x), (x,), name="test_complex")
    fusebackend.unregister("test_complex")
    assert "largest error" in refused(VerificationError, lambda x: x * x, lambda x: x * x * 1.001, x)


def test_an_assertion_sees_what_a_replacement_writes_to():
    op = operator("secret_for_assertion", lambda x: (2 * x, x.zero_())[0])
    fusebackend.register_replacement(lambda x: x * 2, lambda x: op(x), (A,), name="test_writes", verify=False)
    try:
        with pytest.raises(PatternAssertion, match="leaves other values in its arguments"):
            assert_pattern(lambda x: x * 2, A, pattern="test_writes", count=1)
    finally:
        fusebackend.unregister("test_writes")
