"""The table of registration errors: each row is raised by a wrong registration, and what is raised has a row."""

import ast
import re
from pathlib import Path

import pytest
from wrong_registrations import CASES

import fusebackend
from fusebackend.native import hub_kernels, user_kernels
from fusebackend.rewriting import registry

PAGE = Path(__file__).parents[2] / "patterns" / "registration_errors.md"
ROWS = [line.split(" | ")[0].removeprefix("| ").strip("`") for line in PAGE.read_text().splitlines() if line.startswith("| `")]


def matches(row: str, message: str) -> bool:
    return re.search(".*".join(map(re.escape, row.split("…"))), message, re.DOTALL) is not None


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """Each case's exception."""
    found = {}
    for what, case in CASES.items():
        arguments = [tmp_path_factory.mktemp("sources")] if getattr(case, "__name__", "") == "two_of_one_name" else []
        with pytest.raises((ValueError, RuntimeError)) as caught:
            case(*arguments)
        found[what] = caught.value
    return found


@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_what_a_wrong_registration_is_told(raised, row):
    assert any(matches(row, str(error)) for error in raised.values())


@pytest.mark.parametrize("what", CASES)
def test_each_wrong_registration_has_a_row(raised, what):
    message = str(raised[what])
    assert any(matches(row, message) for row in ROWS), message
    assert "test_wrong" not in registry.known_names()


SOURCES = [*Path(fusebackend.__file__).parent.glob("declarative/*.py"), Path(user_kernels.__file__), Path(hub_kernels.__file__)]
RAISED = {"RegistrationError", "TraceError", "KernelError"}
#: What only another thread, or another version of Dynamo, can bring about.
NOT_REACHED = ("raise RegistrationError(str(error)) from None\n    return pattern", "the function has a graph break")


def raise_statements():
    """The file and lines of each statement that raises an error of registration."""
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and getattr(node.exc.func, "id", None) in RAISED:
                statement = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno + 1])
                if not any(part in statement for part in NOT_REACHED):
                    yield path, node.lineno, node.end_lineno


def test_nothing_is_raised_that_has_no_row(raised):
    reached, seen = set(), set()
    for error in raised.values():
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            trace = error.__traceback__
            while trace is not None:
                reached.add((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
                trace = trace.tb_next
            error = error.__cause__ or getattr(error, "inner_exception", None) or error.__context__
    statements = [*raise_statements()]
    assert len(statements) > 20
    missed = [f"{p.name}:{first}" for p, first, last in statements if not any((str(p), n) in reached for n in range(first, last + 1))]
    assert not missed
