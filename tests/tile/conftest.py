"""The tile engine is tested below the patterns: its operators on tensors of any strides."""

import pytest
import torch

from fusebackend import native, ops
from fusebackend.patterns import transpose_add as _  # noqa: F401  defines fusebackend::transpose_add


def _define(schema, fake):
    if not hasattr(torch.ops.fusebackend, schema.split("(")[0]):
        ops.define(schema, fake=fake)


_define(
    "permute_copy(Tensor x, int[] order) -> Tensor",
    lambda x, order: torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device),
)
_define("tile_route(Tensor x, Tensor? y, int[] order) -> int", lambda x, y, order: 0)


@pytest.fixture(scope="session", autouse=True)
def library():
    loaded = native.load()
    if loaded.path is None:
        pytest.skip(f"no native library: {loaded.reason}")
    return loaded
