"""Compiled code that is kept: AOTInductor's packages, and torch.compiler's cache artifacts."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import fusebackend
from fusebackend.native import loader

PROGRAMS = {
    "package": """
        import sys, torch, fusebackend

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(8, 1, 4))
            def forward(self, x, y):
                out = torch.nn.functional.conv1d(torch.nn.functional.pad(x, (3, 0)), self.weight, groups=8)
                return out, x.transpose(1, 2) + y

        SOONER = {"aot_inductor.compile_wrapper_opt_level": "O0"}
        model, inputs = Model(), (torch.randn(2, 8, 24), torch.randn(2, 24, 8))
        exported = torch.export.export(model, inputs)
        configs = fusebackend.inductor_configs(options={"fuse.gate": "off", **SOONER})
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[1] + "/model.pt2", inductor_configs=configs)
            torch.save((inputs, model(*inputs)), sys.argv[1] + "/results.pt")
        print(fusebackend.last_report().counts())
    """,
    "run": """
        import sys, torch, fusebackend

        fusebackend.load_operators()
        inputs, expected = torch.load(sys.argv[1] + "/results.pt")
        torch.testing.assert_close(torch._inductor.aoti_load_package(sys.argv[1] + "/model.pt2")(*inputs), expected)
    """,
    "save": """
        import sys, torch, fusebackend

        torch.compile(lambda x, y: x.t() + y, backend="fuse", options={"fuse.gate": "off"})(torch.randn(8, 6), torch.randn(6, 8))
        data, _ = torch.compiler.save_cache_artifacts()
        open(sys.argv[1] + "/artifacts", "wb").write(data)
        print(fusebackend.last_report().counts())
    """,
    "load": """
        import sys, torch

        torch.compiler.load_cache_artifacts(open(sys.argv[1] + "/artifacts", "rb").read())
        x, y = torch.randn(8, 6), torch.randn(6, 8)
        assert torch.equal(torch.compile(lambda x, y: x.t() + y, backend="fuse", options={"fuse.gate": "off"})(x, y), x.t() + y)
        from torch._dynamo.utils import counters
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1, counters
        import fusebackend
        print(fusebackend.last_report())
    """,
}


@pytest.fixture
def program(tmp_path):
    """Runs one of the programs in a process of its own; each has Inductor caches of its own. Returns what it printed."""

    def run(name):
        script = tmp_path / "program.py"  # one name: source lines are a part of what is compiled
        script.write_text(textwrap.dedent(PROGRAMS[name]))
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache-{name}")}
        done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.codegen
def test_an_aotinductor_package_runs_in_another_process(program):
    assert "{'causal_conv1d': 1, 'transpose_add': 1}" in program("package")
    program("run")


@pytest.mark.codegen
def test_cache_artifacts_are_hits_in_another_process(program):
    assert "{'transpose_add': 1}" in program("save")
    assert "from Inductor's cache" in program("load")


def test_a_package_needs_code():
    with pytest.raises(ValueError, match="fuse.interpret"):
        fusebackend.inductor_configs(options={"fuse.interpret": True})


def test_without_a_library_operators_are_not_loaded(monkeypatch):
    monkeypatch.setattr(loader, "_loaded", loader.Native(reason="no C++ compiler found"))
    with pytest.raises(RuntimeError, match="no native library: no C\\+\\+ compiler found"):
        fusebackend.load_operators()
    assert torch.ops.fusebackend.transpose_add  # defined all the same
