"""The peers that the benchmark times compute what it times."""

import pytest
import torch

from fusebackend.patterns.attention import bench


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", [name for name, *_ in bench._TABLE])
def test_flex_attention_is_the_same_attention(name):
    (shape,) = (bench._fewer_heads(shape) for n, shape, *_ in bench._TABLE if n == name)
    inputs = [x.double() for x in shape.inputs(torch.device("cpu"))]
    torch.testing.assert_close(shape.flex_attention(*inputs), shape.attention()(*inputs))
