"""Kernels that run on some devices only: traced everywhere, run and verified where they can be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fusebackend
from fusebackend import VerificationError
from fusebackend.declarative import devices
from fusebackend.native.hub_kernels import load_hub_kernel
from fusebackend.native.user_kernels import KernelError
from fusebackend.testing import assert_pattern

LIBRARY = torch.library.Library("test_devices", "FRAGMENT")
X = torch.randn(4, 8)


def operator(name, kernel, key):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"test_devices::{name}", torch.empty_like, lib=LIBRARY)
    return getattr(torch.ops.test_devices, name).default


def twice_sine(x):
    return torch.sin(x) * 2


def test_which_devices_an_operator_has_a_kernel_for():
    assert devices.devices_of(operator("there", lambda x: x, "CUDA")) == {"cuda"}
    assert devices.devices_of(operator("here", lambda x: x, "CPU")) == {"cpu"}
    assert devices.devices_of(operator("anywhere", lambda x: x, "CompositeExplicitAutograd")) is None
    assert devices.devices_of(torch.ops.aten.sin.default) is None


def test_an_operator_without_a_kernel_for_this_machine_is_registered_unrun_and_refused_here(pattern, caplog):
    def never(x):
        raise AssertionError("there is no such device here")

    op = operator("for_phones", never, "MPS")
    name = pattern(twice_sine, lambda x: op(x), (X,), verify=True)
    assert "verification is postponed to the first compile on mps, where test_devices.for_phones.default runs" in caplog.text
    verification = fusebackend.verify(name)
    assert not verification.checks and "postponed to the first compile on mps" in str(verification)
    report = assert_pattern(twice_sine, X, pattern=name, rejected="test_devices.for_phones.default has kernels for mps, not for cpu")
    assert {r.code for r in report.rejections} == {"no_kernel"}


@pytest.mark.parametrize("right", [True, False])
def test_a_postponed_verification_is_made_up_for_before_the_first_use(pattern, monkeypatch, right):
    """The device is away while the pattern is registered."""
    calls = []

    def kernel(x):
        calls.append(x)
        return torch.sin(x) * (2 if right else 2.01)

    op = operator(f"away_{right}", kernel, "CPU")
    with monkeypatch.context() as patch:
        patch.setattr(devices, "available", lambda device: False)
        name = pattern(twice_sine, lambda x: op(x), (X,), verify=True)
        assert not calls, "a kernel does not run where its device is not"
    if right:
        assert_pattern(twice_sine, X, pattern=name, count=1)
    else:
        assert_pattern(twice_sine, X, pattern=name, rejected="verification failed: cpu, x f32[4, 8], as given: output 0")
    assert calls


def test_the_devices_may_be_said(pattern):
    """An operator in Python is registered for all devices, whatever it launches."""
    op = operator("says_nothing", lambda x: 1 / 0, "CompositeExplicitAutograd")
    with pytest.raises(VerificationError, match="the replacement raised ZeroDivisionError"):
        pattern(twice_sine, lambda x: op(x), (X,), verify=True)
    name = pattern(twice_sine, lambda x: op(x), (X,), verify=True, devices="cuda")
    assert_pattern(twice_sine, X, pattern=name, rejected="registered for cuda, not for cpu")


@torch.library.custom_op("test_devices::forward_only", mutates_args=())
def forward_only(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


forward_only.register_fake(torch.empty_like)


def test_what_to_do_without_a_backward(pattern):
    with pytest.raises(fusebackend.RegistrationError, match="no autograd formula .* \\(or let derive_backward=True take the search"):
        pattern(twice_sine, lambda x: forward_only(x), (X.clone().requires_grad_(),), verify=True)


def test_a_kernel_without_a_backward_is_used_in_training(pattern):
    op = operator("no_backward", lambda x: torch.sin(x) * 2, "CPU")
    x = X.clone().requires_grad_()
    with pytest.raises(fusebackend.RegistrationError, match="no gradient of x; .*derive_backward=True"):
        pattern(twice_sine, lambda x: op(x), (x,), verify=True)
    name = pattern(twice_sine, lambda x: op(x), (x,), verify=True, derive_backward=True)
    report = assert_pattern(lambda x: twice_sine(x.exp()), x, pattern=name, training=True, count=1)
    assert report.substitutions[0].graph == "joint" and len(report.substitutions[0].outputs) == 2
    assert_pattern(twice_sine, X, pattern=name, count=1)


BLOCKS = [b.split("```")[0] for b in (Path(__file__).parents[2] / "patterns" / "README.md").read_text().split("```python\n")]
TRITON = next(block for block in BLOCKS if "@triton_op" in block)
CUTE_DSL = next(block for block in BLOCKS if "@cute.kernel" in block)
FIND = """
from torch import nn
with torch.no_grad():
    print(fusebackend.explain(nn.RMSNorm(16).to(DEVICE), torch.randn(5, 16, device=DEVICE)))
"""


def run_guide(tmp_path, device, program=TRITON):
    (tmp_path / "guide.py").write_text(program + FIND.replace("DEVICE", repr(device)))
    return subprocess.run(
        [sys.executable, "guide.py"], cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"}
    )


def test_the_guides_triton_kernel_is_registered_without_a_gpu(tmp_path):
    pytest.importorskip("triton")
    done = run_guide(tmp_path, "cpu")
    assert done.returncode == 0, done.stderr
    assert "guide.triton_rms_norm.default has kernels for cuda and xpu, not for cpu" in done.stdout
    if not torch.cuda.is_available():
        assert "verification is postponed to the first compile on cuda and xpu" in done.stderr


@pytest.mark.cuda
def test_the_guides_triton_kernel_is_verified_and_found_on_a_gpu(tmp_path):
    done = run_guide(tmp_path, "cuda")
    assert done.returncode == 0, done.stderr
    assert "fusebackend: 1 substitution" in done.stdout and "postponed" not in done.stderr


SEVERAL_RESULTS = next(block for block in BLOCKS if "mylib.add_rms_norm" in block)


@pytest.fixture
def add_rms_norm():
    """The guide's pattern of two results, with an operator of that name."""

    @torch.library.custom_op("mylib::add_rms_norm", mutates_args=())
    def operator(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        total = (x + residual).contiguous()
        return torch.nn.functional.rms_norm(total.float(), w.shape, w.float(), eps).to(x.dtype), total

    def gradients(ctx, g, of_total):
        total, w, eps = *ctx.saved_tensors, ctx.eps
        h, g = total.float(), g.float()
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        dx = (scale * (g * w - h * scale**2 * (g * w * h).mean(-1, keepdim=True))).to(total.dtype) + of_total
        return dx, dx, (g * h * scale).flatten(0, -2).sum(0).to(w.dtype), None

    def keep(ctx, inputs, output):
        ctx.save_for_backward(output[1], inputs[2])
        ctx.eps = inputs[3]

    operator.register_fake(lambda x, *_: tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)))
    operator.register_autograd(gradients, setup_context=keep)
    exec(SEVERAL_RESULTS, {"torch": torch, "fusebackend": fusebackend})
    yield
    fusebackend.unregister("add_rms_norm")


def test_the_guides_pattern_of_two_results_is_found_in_a_llama(add_rms_norm):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes))
    with torch.no_grad():
        assert fusebackend.explain(model.eval(), torch.arange(8)[None], use_cache=False).counts()["add_rms_norm"] == 4
    # The last sum is used by its norm alone.
    assert fusebackend.explain(model.train(), torch.arange(8)[None], use_cache=False).counts()["add_rms_norm"] == 3


# For sizes that are known when it is called, by a machine that may have no such GPU.
COMPILE = """
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
rows, columns = cute.sym_int(), cute.sym_int()
matrix = [make_fake_compact_tensor(cutlass.BFloat16, (rows, columns), stride_order=(1, 0)) for _ in range(2)]
weight = make_fake_compact_tensor(cutlass.BFloat16, (columns,), stride_order=(0,))
cute.compile(launch, matrix[0], weight, matrix[1], cutlass.Float32(1e-6), make_fake_stream(), options="--gpu-arch sm_90a")
"""


def test_the_guides_cute_dsl_kernel_is_registered_and_compiled_without_a_gpu(tmp_path):
    pytest.importorskip("cutlass")
    done = run_guide(tmp_path, "cpu", CUTE_DSL + COMPILE)
    assert done.returncode == 0, done.stderr
    assert "guide.cute_rms_norm.default has kernels for cuda, not for cpu" in done.stdout


@pytest.mark.cuda
def test_the_guides_cute_dsl_kernel_is_verified_and_found_on_a_gpu(tmp_path):
    pytest.importorskip("cutlass")
    done = run_guide(tmp_path, "cuda", CUTE_DSL)
    assert done.returncode == 0, done.stderr
    assert "fusebackend: 1 substitution" in done.stdout and "postponed" not in done.stderr


@pytest.fixture
def hub(tmp_path):
    """A folder of the form of the Hub's kernels."""
    pytest.importorskip("kernels")
    variant = tmp_path / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text("import torch\nloaded = []\ndef twice_sine(x):\n    return torch.sin(x) * 2\n")
    metadata = '{"id": "_sines_cpu_1", "name": "sines", "version": 1, "license": "MIT", "python-depends": [], "backend": {"type": "cpu"}}'
    (variant / "metadata.json").write_text(metadata)
    return tmp_path


def test_a_kernel_of_the_hub_from_a_local_folder(pattern, hub):
    name = f"test_devices::from_hub_{os.getpid()}"
    op = load_hub_kernel(
        name, kernel=hub, schema="(Tensor x) -> Tensor", call=lambda kernel, x: kernel.twice_sine(x), fake=torch.empty_like, devices="cpu"
    )
    assert "_sines_cpu_1" not in sys.modules, "it is imported at its first call"
    found = pattern(twice_sine, lambda x: op(x), (X,), verify=True)
    assert "_sines_cpu_1" in sys.modules
    assert_pattern(nn.Sequential(nn.Linear(8, 8), Sine()), X, pattern=found, count=0)
    assert_pattern(twice_sine, X, pattern=found, count=1)


HUB = next(block for block in BLOCKS if "load_hub_kernel" in block)


def test_the_guides_kernel_of_the_hub_is_found_in_a_phi_3(tmp_path, hub):
    transformers = pytest.importorskip("transformers")
    kernel = "def silu_and_mul(out, x):\n    a, b = x.chunk(2, -1)\n    return out.copy_(torch.nn.functional.silu(a) * b)\n"
    (hub / "build" / "torch-cpu" / "__init__.py").write_text("import torch\n" + kernel)
    metadata = hub / "build" / "torch-cpu" / "metadata.json"
    metadata.write_text(metadata.read_text().replace("_sines_cpu_1", "_gates_cpu_1"))
    local = HUB.replace('kernel="kernels-community/activation", version=1', 'kernel=folder, devices="cpu"')
    assert local != HUB
    try:
        exec(local.replace("mine::", "test_hub::"), {"torch": torch, "fusebackend": fusebackend, "folder": hub})
        sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32, pad_token_id=0)
        model = transformers.Phi3Model(transformers.Phi3Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
        with torch.no_grad():
            found = fusebackend.explain(model, torch.arange(8)[None], use_cache=False).counts()
        assert found["silu_and_mul"] == 1
    finally:
        fusebackend.unregister("silu_and_mul")


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kernel": "kernels-community/activation"}, "give one of them for 'kernels-community/activation', e.g. version=1"),
        ({"kernel": Path("/no/such/folder")}, "kernel='/no/such/folder'; there is no such folder"),
        ({"kernel": "a/b", "version": 1, "devices": "gpu"}, "devices=('gpu',); some of cpu, cuda, xpu, mps are accepted"),
        ({"kernel": "a/b", "version": 1, "call": None}, "call=None; a function is needed"),
        ({"kernel": "a/b", "version": 1, "schema": "x"}, "give arguments and results"),
    ],
)
def test_a_wrong_hub_kernel_is_refused(settings, words):
    given = dict(schema="(Tensor x) -> Tensor", call=lambda kernel, x: x, fake=torch.empty_like) | settings
    with pytest.raises(KernelError) as error:
        load_hub_kernel("test_devices::wrong", **given)
    assert words in str(error.value)


def test_a_hub_kernel_that_cannot_be_had_says_so_when_it_is_called(tmp_path, monkeypatch):
    given = dict(schema="(Tensor x) -> Tensor", call=lambda kernel, x: kernel.f(x), fake=torch.empty_like, devices="cpu", kernel=tmp_path)
    op = load_hub_kernel(f"test_devices::empty_{os.getpid()}", **given)
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(KernelError, match="needs the package 'kernels': pip install 'fusebackend.kernels.'"):
        op(X)
