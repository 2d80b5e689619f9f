"""A user's own kernel, and the guide in patterns/README.md, which is run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusebackend
import fusebackend.patterns
from fusebackend.native import build, toolchain, user_kernels
from fusebackend.native.user_kernels import KernelError, library_key, load_kernel
from fusebackend.testing import assert_pattern

GUIDE = next(
    m[1]
    for m in re.finditer(r"```python\n(.*?)```", Path(fusebackend.patterns.__path__[0], "README.md").read_text(), re.S)
    if "load_kernel" in m[1]
)

TWICE = """
#include "common/binding.h"
using namespace fusebackend;
Tensor twice(const Tensor& x) {
  Tensor out = empty_like_sized(x, to_vector(x.sizes()));
  for (int64_t i = 0; i < x.numel(); ++i) ((float*)out.data_ptr())[i] = 2 * ((const float*)x.data_ptr())[i];
  return out;
}
STABLE_TORCH_LIBRARY_IMPL(test_kernel, CPU, m) { m.impl("NAME", TORCH_BOX(&twice)); }
"""


def load(name, sources=None, **kwargs):
    defaults = dict(schema="(Tensor x) -> Tensor", fake=torch.empty_like, reference=lambda x: 2 * x)
    return load_kernel(f"test_kernel::{name}", sources=sources or {"twice.cpp": TWICE.replace("NAME", name)}, **{**defaults, **kwargs})


def test_a_kernel_is_built_and_passes_opcheck():
    op = load("twice")
    assert torch.equal(op(torch.arange(5.0)), 2 * torch.arange(5.0))
    torch.library.opcheck(op, (torch.randn(4),))
    assert library_key(op)


def test_a_kernel_can_say_that_memory_is_out():
    """As torch's own operators do, in every version of torch: by an exception that the stable ABI does not have."""
    source = TWICE.replace("NAME", "hungry").replace("Tensor out =", 'throw_out_of_memory("no room"); Tensor out =')
    op = load("hungry", {"hungry.cpp": source})
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        op(torch.ones(3))


def test_sources_may_be_files_with_headers_beside_them(tmp_path):
    (tmp_path / "mine.h").write_text("#define FACTOR 3\n")
    (tmp_path / "thrice.cpp").write_text('#include "mine.h"\n' + TWICE.replace("NAME", "thrice").replace("2 *", "FACTOR *"))
    op = load("thrice", [tmp_path / "thrice.cpp"], reference=lambda x: 3 * x)
    assert torch.equal(op(torch.ones(3)), torch.full((3,), 3.0))


def test_without_a_compiler_the_reference_runs(monkeypatch, caplog):
    monkeypatch.setattr(toolchain.Toolchain, "find", classmethod(lambda cls: cls(None, None)))
    op = load("reference")
    assert torch.equal(op(torch.ones(3)), torch.full((3,), 2.0))
    assert "the reference implementation is used" in caplog.text


def test_sources_that_register_another_operator_are_told_of(caplog):
    op = load("misnamed", {"misnamed.cpp": TWICE.replace("NAME", "another_name")})
    assert torch.equal(op(torch.ones(3)), torch.full((3,), 2.0))
    assert "the sources register no kernel of test_kernel::misnamed; the reference is used" in caplog.text


def test_a_gpu_without_nvcc_is_told_of(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(user_kernels, "device_architectures", lambda: ("90a",))
    monkeypatch.setattr(toolchain.Toolchain, "find", classmethod(lambda cls: cls("g++", None)))
    load("for_gpus", {"twice.cpp": TWICE.replace("NAME", "for_gpus"), "twice.cu": "not compiled"})
    assert "pip install 'cuda-toolkit[" in caplog.text and "on GPUs the reference is used instead" in caplog.text
    caplog.clear()
    load("for_cpus", {"twice.cpp": TWICE.replace("NAME", "for_cpus")})
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("a::b::c", {}, "give 'namespace::operator'"),
        ("twice", {}, "give 'namespace::operator'"),
        ("aten::relu", {}, "is there already"),
        ("test_kernel::bad", {"schema": "Tensor x"}, "give arguments and results"),
        ("test_kernel::bad", {"fake": None}, "fake=None; a function is needed"),
        ("test_kernel::bad", {"sources": ["/no/such/file.cpp"]}, "no such source file: /no/such/file.cpp"),
        ("test_kernel::bad", {"sources": {"kernel.py": ""}}, ".cpp and .cu files are accepted"),
    ],
)
def test_a_wrong_argument_is_named(name, kwargs, words):
    defaults = dict(sources={"k.cpp": ""}, schema="(Tensor x) -> Tensor", fake=torch.empty_like, reference=torch.neg)
    with pytest.raises(KernelError) as error:
        load_kernel(name, **{**defaults, **kwargs})
    assert words in str(error.value)


def test_what_the_compiler_says_is_shown():
    with pytest.raises(build.BuildError, match="this is not C"):
        load("broken", {"broken.cpp": "this is not C++"})


@pytest.fixture(scope="module")
def guide():
    assert len(GUIDE.splitlines()) <= 40
    namespace = {}
    exec(GUIDE, namespace)
    yield namespace["pattern"]
    fusebackend.unregister("rms_norm")


def llama(device, layers=2):
    transformers = pytest.importorskip("transformers", reason="the models' extra is not installed")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
    )
    return transformers.LlamaForCausalLM(config).to(device), torch.randint(128, (2, 16), device=device)


def test_the_guides_pattern_verifies(guide):
    result = fusebackend.verify(guide)
    assert result.ok and any("opcheck of guide.rms_norm" in c.what for c in result.checks)
    assert any("with gradients" in c.what for c in result.checks)


def test_the_guides_pattern_is_found_in_a_llama_in_inference(guide, device):
    model, tokens = llama(device)
    with torch.no_grad():
        report = assert_pattern(
            lambda t: model.eval()(t, use_cache=False).logits, tokens, pattern="rms_norm", count=5, rtol=1e-4, atol=1e-4
        )
    assert all("modeling_llama.py" in s.source.file for s in report.substitutions)


def test_the_guides_pattern_is_found_in_a_llama_in_training(guide, device):
    model, tokens = llama(device)
    report = fusebackend.explain(model.train(), tokens, labels=tokens, use_cache=False)
    assert report.counts()["rms_norm"] == 5
    assert {s.graph for s in report.substitutions if s.pattern == "rms_norm"} == {"joint"}

    def gradients(fn):
        model.zero_grad()
        fn(tokens, labels=tokens, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    compiled = torch.compile(model, backend="fuse", options={"fuse.interpret": True, "fuse.patterns": "rms_norm"})
    torch.testing.assert_close(gradients(compiled), gradients(model), rtol=1e-3, atol=1e-5)


STALE = """
import sys, torch, fusebackend
from torch._dynamo.utils import counters
from fusebackend.native.user_kernels import load_kernel

factor, limit = sys.argv[1], int(sys.argv[2])
kernel = open(sys.argv[3]).read().replace("2 *", factor + " *").replace("NAME", "scale").replace("test_kernel", "stale")
op = load_kernel("stale::scale", sources={"k.cpp": kernel}, schema="(Tensor x) -> Tensor", fake=torch.empty_like, reference=lambda x: x)

def search(x):
    return torch.exp(torch.sin(x))

def small(candidate):
    return candidate.kwargs["x"].shape[0] < limit

fusebackend.register_replacement(search, lambda x: op(x), (torch.randn(4),), name="scale", verify=False, extra_check=small)
out = torch.compile(search, backend="fuse")(torch.ones(5))
print(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"], round(out[0].item(), 3))
"""


@pytest.mark.codegen
def test_a_changed_kernel_or_pattern_never_meets_a_stale_graph_and_an_unchanged_one_always_hits(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "script.py").write_text(STALE)
    (tmp_path / "kernel.cpp").write_text(TWICE)

    def run(*arguments):
        done = subprocess.run([sys.executable, tmp_path / "script.py", *arguments, tmp_path / "kernel.cpp"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        hits, value = done.stdout.split()
        return int(hits) > 0, float(value)

    plain = round(float(torch.exp(torch.sin(torch.ones(())))), 3)
    assert run("2", "10") == (False, 2.0)
    assert run("2", "10") == (True, 2.0)
    assert run("3", "10") == (False, 3.0)  # another kernel
    assert run("2", "4") == (False, plain)  # another number in the closure of the check
