"""What Inductor computes inside a sum over outer dims, and what has become a tensor before."""

from __future__ import annotations

import pytest
import torch
from families.traced_graphs import traced

from fusebackend.patterns.column_sum.producers import Producer, producer_of
from fusebackend.patterns.column_sum.sites import SUMS, Site, read

pytestmark = pytest.mark.usefixtures("library", "kernels_for_every_device")

bf16, i64 = torch.bfloat16, torch.int64
NODES, ROWS, COLUMNS = 500, 8000, 128
TENSOR, INDEX, ROW = (ROWS, COLUMNS, bf16), (ROWS, i64), (COLUMNS, bf16)
BYTES = ROWS * COLUMNS * 2


def found(function, *inputs) -> Producer:
    """Of the last sum over rows."""
    graph = traced(function, *inputs)
    sites = [read(n) for n in graph.nodes if n.op == "call_function" and n.target in SUMS]
    site = [s for s in sites if isinstance(s, Site)][-1]
    return producer_of(site.source)


def names(producer: Producer) -> set[str]:
    """Of the operators, without casts."""
    return {n.target._schema.name.split("::")[1] for n in producer.nodes} - {"convert_element_type"}


def test_what_is_read_by_several_nodes_of_the_sum_is_computed_there():
    """A leaky ReLU reads the sum of the gathered rows three times."""
    producer = found(lambda x, i, j, w: (torch.nn.functional.leaky_relu(x[i] + x[j]) * w).sum(0), (NODES, COLUMNS, bf16), INDEX, INDEX, ROW)
    assert producer.is_indirect and names(producer) == {"index", "add", "gt", "mul", "where"}
    assert producer.gathered == 2 * BYTES
    assert producer.read == 2 * ROWS * 8 + COLUMNS * 2


def test_what_others_read_too_is_computed_in_each_of_them():
    """As in GATv2's backward, where the other reader is the gradient of the gathered rows. Inductor walks over the edges in the sum."""

    def fn(x, i, j, w, v):
        y = x[i] + x[j]
        return (y * v).sum(1), (torch.where(y > 0, y, 0.2 * y) * w).sum(0)

    producer = found(fn, (NODES, COLUMNS, bf16), INDEX, INDEX, ROW, ROW)
    assert producer.is_indirect and producer.gathered == 2 * BYTES and "add" in names(producer)


def test_what_reads_many_tensors_is_computed_once():
    def fn(a, b, c, d, e):
        y = a + b + c + d + e
        return y.sum(1), (y * y).sum(0)

    producer = found(fn, *[TENSOR] * 5)
    assert names(producer) == {"mul"} and producer.read == BYTES
    assert found(lambda a, b, c, d: fn(a, b, c, d, 0), *[TENSOR] * 4).read == 4 * BYTES


def test_what_a_library_reads_is_a_tensor():
    def fn(a, b):
        y = a * b
        return y @ y.t(), torch.relu(y).sum(0)

    assert names(found(fn, TENSOR, TENSOR)) == {"relu"}


def test_a_sum_before_the_sum_is_one_of_its_own():
    producer = found(lambda a: (a * a.sum(1, keepdim=True)).sum(0), TENSOR)
    assert names(producer) <= {"mul", "unsqueeze"} and producer.read == BYTES + ROWS * 2


def test_what_is_scattered_is_a_tensor():
    def fn(x, i, y):
        return torch.relu(x.index_add(0, i, y)).sum(0)

    assert names(found(fn, TENSOR, INDEX, TENSOR)) == {"relu"}


def test_what_is_expanded_behind_many_reads_is_a_tensor():
    """It would be computed once for each column."""

    def fn(a, b, c, d, e, x):
        return ((a + b + c + d + e)[:, None] * x).sum(0)

    producer = found(fn, *[(ROWS, bf16)] * 5, TENSOR)
    assert names(producer) <= {"mul", "unsqueeze"} and producer.read == BYTES + ROWS * 2


def test_a_long_chain_is_followed_for_a_part_of_it():
    def fn(x, w):
        for _ in range(500):
            x = x * w
        return x.sum(1), torch.relu(x).sum(0)

    assert 1 <= len(found(fn, TENSOR, ROW).nodes) <= 64


@pytest.mark.parametrize("stride", [2, 3])
def test_the_gradient_of_a_pool_is_computed_in_the_sum_unless_its_windows_overlap(stride):
    """With the loads of four windows Inductor makes a tensor of it, also where nothing else reads it."""
    size = (31 - 1) // stride + 1

    def fn(x, y, gradient):
        of_x = torch.ops.aten.avg_pool2d_backward.default(gradient, x, [3, 3], [stride, stride], [1, 1], False, True, None)
        return (of_x * y).sum(0)

    images = (8, 16, 31, 31, torch.float32)
    computed = names(found(fn, images, images, (8, 16, size, size, torch.float32)))
    assert computed == ({"mul"} if stride == 2 else {"mul", "avg_pool2d_backward"})
