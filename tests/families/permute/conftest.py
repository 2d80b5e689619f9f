"""The tile engine is tested below the patterns: its operators on tensors of any strides."""

import pytest
import torch

from fusebackend.native import loader, ops
from fusebackend.patterns.permute import match as permute  # noqa: F401  they define the operators

if not hasattr(torch.ops.fusebackend, "tile_route"):
    ops.define("tile_route(Tensor x, Tensor? y, int[] order) -> int", fake=lambda x, y, order: 0)


@pytest.fixture(scope="session", autouse=True)
def library():
    loaded = loader.load()
    if loaded.path is None:
        pytest.skip(f"no native library: {loaded.reason}")
    return loaded
