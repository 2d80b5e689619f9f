"""Programs as text: what is accepted, what it means, and what is said of the rest."""

import pytest
import torch

from fusebackend.patterns.computed_sums.program import FUNCTIONS, MOST_INPUTS, Writer, check_types, evaluate, parse


def test_a_program_is_evaluated():
    x, mean, g = torch.randn(5, 3), torch.randn(3), torch.randn(5, 3, dtype=torch.bfloat16)
    first, second = evaluate("t0=sub(i0,i1);t1=mul(i2,t0);out(i2);out(t1)", [x, mean, g], 2)
    assert torch.equal(first, g.float()) and torch.equal(second, g.float() * (x - mean))


def test_what_is_written_twice_is_computed_once():
    writer = Writer()
    names = [writer.call("mul", "i0", "2.0") for _ in range(2)]
    writer.out(writer.call("add", *names))
    assert str(writer) == "t0=mul(i0,2.0);t1=add(t0,t0);out(t1)" and len(writer) == 2


@pytest.mark.parametrize("number", ["0.5", "1e-05", "-1.0", "1e+30", "inf", "-inf", "nan", "3"])
def test_numbers(number):
    (found,) = evaluate(f"t0=add(i0,{number});out(t0)", [torch.zeros(1, 2)], 1)
    torch.testing.assert_close(found, torch.full((1, 2), float(number)), equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_as_many_arguments_as_they_say(name):
    count = FUNCTIONS[name][0]
    is_logical = name in ("and", "or", "not")
    inputs = [torch.rand(2, 2) + 0.5 if not is_logical else torch.rand(2, 2) > 0.5 for _ in range(count)]
    if name == "where":
        inputs[0] = inputs[0] > 1
    (found,) = evaluate(f"t0={name}({','.join(f'i{k}' for k in range(count))});out(t0)", inputs, 1)
    assert found.dtype is torch.float32 and found.shape == (2, 2)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("", "tK=name"),
        ("out(i0);", "tK=name"),
        ("t0 = sub(i0,i1);out(t0)", "tK=name"),
        ("t0=sinh(i0);out(t0)", "no function 'sinh'"),
        ("t0=sub(i0);out(t0)", "takes 2 arguments, not 1"),
        ("t1=neg(i0);out(t1)", "in order"),
        ("neg(i0);out(i0)", "in order"),
        ("t0=out(i0)", "in order"),
        ("t0=neg(t0);out(t0)", "'t0' is no number"),
        ("t0=neg(i2);out(t0)", "none of 2 inputs"),
        ("t0=neg(1.);out(t0)", "'1.' is no number"),
        ("t0=neg(__trap());out(t0)", "tK=name"),
        ("t0=neg(i0)", "0 sums for 1 types"),
        ("out(i0);out(i1)", "2 sums for 1 types"),
    ],
)
def test_what_is_malformed_is_named(program, said):
    with pytest.raises(ValueError, match="in a program|types") as raised:
        parse(program, 2, 1)
    assert said in str(raised.value)


@pytest.mark.parametrize("program", ["t0=add(i0,i1);out(t0)", "t0=and(i0,i1);out(t0)", "t0=where(i0,i0,i0);out(t0)", "out(i1)"])
def test_truth_values_are_no_numbers(program):
    """As the kernels, which the reference stands for on CPUs."""
    with pytest.raises(ValueError, match="is a truth value|is a number"):
        check_types(program, [torch.float32, torch.bool], 1)


def test_a_writer_turns_one_into_the_other():
    writer = Writer()
    writer.truths.add("i1")
    writer.out(writer.call("mul", "i0", "i1"))
    writer.out(writer.call("and", "i0", "i1"))
    check_types(str(writer), [torch.float32, torch.bool], 2)


def test_how_many_there_may_be():
    with pytest.raises(ValueError, match=f"1 to {MOST_INPUTS} inputs"):
        parse("out(i0)", MOST_INPUTS + 1, 1)
