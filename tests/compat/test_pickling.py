"""What crosses processes: compiled modules, reports and patterns are pickled, and DataLoader workers compile."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fusebackend
from fusebackend.declarative.traced_pattern import TracedPattern

OPTIONS = {"fuse.interpret": True, "fuse.gate": "off"}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y):
        return self.linear(x.t() + y)


class Compiling(Dataset):
    """Runs a compiled module in the process that asks for an item; gives the item, and how much was substituted there."""

    def __init__(self, module):
        self.module = module

    def __len__(self):
        return 3

    def __getitem__(self, i):
        item = self.module(torch.full((8, 8), float(i)), torch.ones(8, 8)).detach()
        return item, fusebackend.last_report().counts().get("transpose_add", 0)


@pytest.mark.parametrize("again", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("used", [False, True])
def test_a_compiled_module_is_copied_and_compiles_again(again, used):
    module = torch.compile(Layer(), backend="fuse", options=OPTIONS)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    if used:
        module(x, y)
    torch._dynamo.reset()
    assert torch.equal(again(module)(x, y), module._orig_mod(x, y))
    assert fusebackend.last_report().counts() == {"transpose_add": 1}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_compile(context):
    """For inference: PyTorch refuses to differentiate in a forked process once its parent did."""
    module = torch.compile(Layer().requires_grad_(False), backend="fuse", options=OPTIONS)
    expected = [module._orig_mod(torch.full((8, 8), float(i)), torch.ones(8, 8)) for i in range(3)]
    found = list(DataLoader(Compiling(module), num_workers=2, multiprocessing_context=context, batch_size=None))
    for (item, count), wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(item, wanted)
        assert count == 1


def test_reports_and_patterns_of_families_are_pickled():
    report = fusebackend.explain(Layer(), torch.randn(8, 8), torch.randn(8, 8))
    assert pickle.loads(pickle.dumps(report)) == report
    pattern = fusebackend.rewriting.registry.get("transpose_add")
    assert pickle.loads(pickle.dumps(pattern)).fingerprint() == pattern.fingerprint()


def test_a_traced_pattern_is_pickled_as_its_name():
    def pattern(name):
        return TracedPattern(name, lambda x: torch.sin(x) * 2, lambda x: 2 * torch.sin(x), (torch.randn(4),))

    registered = fusebackend.register(pattern("test_pickled"))
    data = pickle.dumps(registered)
    assert pickle.loads(data) is registered is copy.deepcopy(registered)
    fusebackend.unregister("test_pickled")
    with pytest.raises(pickle.PicklingError, match="pattern 'test_pickled' is not registered"):
        pickle.dumps(registered)
    program = f"import pickle; pickle.loads({data!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ValueError: no pattern is called 'test_pickled'" in done.stderr
