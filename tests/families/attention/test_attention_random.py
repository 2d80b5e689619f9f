"""Random attentions against float64: ``FUSEBACKEND_TEST_ATTENTIONS=500`` runs so many."""

import math
import os

import pytest
import torch
from attention_programs import compiled, error, run, wide
from families.compiled_results import alike
from random_attentions import draw

COUNT = int(os.environ.get("FUSEBACKEND_TEST_ATTENTIONS", "40"))
FIRST = int(os.environ.get("FUSEBACKEND_TEST_ATTENTIONS_FROM", "0"))


@pytest.mark.usefixtures("library")
def test_random_attentions_are_found_and_no_further_from_float64_than_eager():
    """Of one case either may be nearer by chance, and the backward subtracts numbers that are nearly equal: a single error is bounded by
    twice eager's, or eight roundings. All together must be smaller than eager's."""
    found, ratios = 0, []
    for seed in range(FIRST, FIRST + COUNT):
        drawn = draw(seed)
        exact = run(drawn.fn, wide(drawn.args), drawn.training)
        eager = run(drawn.fn, drawn.args, drawn.training)
        ours, report = compiled(drawn.fn, drawn.args, drawn.training)
        found += len(report.substitutions)
        if not report.substitutions:
            continue  # what Inductor's own patterns make of it is not judged
        assert all(r.code in ("unsupported", "illegal") for r in report.rejections), (seed, drawn.says, report)
        for i, (precise, theirs, mine) in enumerate(zip(exact, eager, ours, strict=True)):
            where = f"seed {seed}, result {i}: {drawn.says}\n{report}"
            assert alike(mine, theirs), where
            bound = max(2 * error(theirs, precise), 4 * torch.finfo(drawn.args[0].dtype).eps)
            assert error(mine, precise) <= bound, (where, error(mine, precise), error(theirs, precise))
            if error(theirs, precise) > 0:
                ratios.append(math.log(max(error(mine, precise) / error(theirs, precise), 1e-3)))
    print(
        f"{found} of {COUNT} found; error over eager's, geometric mean of {len(ratios)} results: {math.exp(sum(ratios) / len(ratios)):.2f}"
    )
    assert found >= 0.9 * COUNT
    assert sum(ratios) < 0
