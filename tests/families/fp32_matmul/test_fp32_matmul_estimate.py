"""Which products pay by the estimate, without a GPU."""

import pytest
from traced_products import calls, estimated, h200, ops, rewritten

from fusebackend.patterns.fp32_matmul import estimate

__all__ = ["h200"]
pytestmark = pytest.mark.usefixtures("h200")

THIN_OR_SMALL = [(512, 512, 512), (256, 256, 50176), (200704, 128, 512), (1, 8192, 8192)]


@pytest.mark.parametrize("shape", THIN_OR_SMALL)
def test_small_and_thin_products_stay_with_cublas(shape):
    m, n, k = shape
    found = estimated(m, k, n)
    assert found.pays is False and found.code == "estimated_slower" and "cuBLAS is as fast or faster" in found.reason


@pytest.mark.parametrize("shape", THIN_OR_SMALL)
def test_with_the_gate_off_they_are_replaced(shape):
    m, n, k = shape
    graph, result = rewritten(lambda a, b: a @ b, (m, k), (k, n))
    assert calls(graph, ops.matmul.default) and not result.rejections


@pytest.mark.parametrize("shape", [(1024, 1024, 1024), (8192, 768, 768), (768, 768, 8192), (8192, 50257, 768), (12544, 1536, 512)])
def test_model_sized_products_are_taken(shape):
    m, n, k = shape
    assert estimate.pays(m, k, n) and estimated(m, k, n).pays is True


@pytest.mark.parametrize("k, taken", [(256, False), (512, True)])
def test_where_the_error_would_be_larger_than_cublass_it_stays(k, taken):
    graph, result = rewritten(lambda a, b: a @ b, (8192, k), (k, 8192))
    assert bool(calls(graph, ops.matmul.default)) is taken
    assert taken or "the error may be" in result.rejections[0].reason


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_where_nothing_was_measured_cublas_stays(monkeypatch, capability):
    monkeypatch.setattr(estimate, "capability", lambda device: capability)
    found = estimated(4096, 4096, 4096)
    assert found.pays is (capability == (9, 0))
    if not found.pays:
        assert found.code == "unmeasured"
        assert f"compute capability {capability[0]}.{capability[1]}" in found.reason and "measured" in found.reason


def test_fewer_multiprocessors_make_a_product_pay_later(monkeypatch):
    assert estimated(1024, 1024, 1024).pays
    monkeypatch.setattr(estimate, "sm_count", lambda device: 66)
    assert not estimated(1024, 1024, 1024).pays
