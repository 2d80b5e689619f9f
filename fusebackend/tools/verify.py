"""``verify``: compares patterns with what they replace."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence

import torch

from fusebackend.declarative.traced_pattern import TracedPattern
from fusebackend.declarative.verify import Check, Verification, verify_traced
from fusebackend.rewriting import registry
from fusebackend.rewriting.pattern import Pattern
from fusebackend.testing import PatternAssertion, assert_pattern
from fusebackend.tools.object_reference import UsageError, import_module


def verify(pattern: Pattern | str, *, seed: int = 0) -> Verification:
    """Verifies a pattern, given itself or by name.

    A pattern that is given as PyTorch is compared with its search function on random inputs. For a structural pattern its own
    ``examples()`` are compiled and compared with eager, and must be substituted.

    Args:
        seed: of the random inputs.

    Raises:
        ValueError: no pattern of that name, or something else than a pattern.
    """
    if not isinstance(pattern, Pattern):
        pattern = registry.get(pattern)
    if isinstance(pattern, TracedPattern):
        return verify_traced(pattern, seed=seed)
    result = Verification(pattern.name)
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        for device in pattern.devices:
            if device == "cpu" or torch.cuda.is_available():
                result.checks += [dataclasses.replace(c, what=f"{device}, {c.what}") for c in _examples(pattern, device)]
            elif len(pattern.devices) == 1:
                result.notes.append(f"not verified: its examples run on {device}, of which there is none here")
    return result


def _examples(pattern: Pattern, device: str) -> Iterator[Check]:
    for fn, arguments in pattern.examples():
        given = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        what = f"example {', '.join(str(tuple(a.shape)) for a in given if isinstance(a, torch.Tensor))}"
        try:
            assert_pattern(fn, *given, pattern=pattern.name)
            yield Check(what, True)
        except PatternAssertion as error:
            yield Check(what, False, str(error))


def print_verifications(names: Sequence[str], module: str | None) -> int:
    """``python -m fusebackend verify``. Returns 0 if all checks passed. Those of devices that are not here count only by name.

    Args:
        names: of patterns; none means all.
        module: imported first, since it registers patterns.

    Raises:
        UsageError: there is no such module, or no pattern of one of the names.
        UsersCodeError: the module raises.
    """
    if module:
        import_module(module, "--import")
    try:
        patterns = [registry.get(name) for name in names] or registry.all_patterns()
    except ValueError as error:
        raise UsageError(str(error)) from error
    results = [verify(pattern) for pattern in patterns]
    print("\n".join(map(str, results)))
    for result in results:
        if not result.checks and not result.notes:
            print(f"fusebackend: {result.pattern}: nothing was compared, since the pattern has no examples", file=sys.stderr)
    elsewhere = set() if names or torch.cuda.is_available() else {p.name for p in patterns if "cpu" not in p.devices}
    return 0 if all(r.ok and (r.checks or r.pattern in elsewhere) for r in results) else 1
