"""The backend as a whole: compiles, trains, chains with the user's passes, and never fails because of us."""

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusebackend
from fusebackend import cache_keys
from fusebackend.native import loader
from fusebackend.options import Options
from fusebackend.rewriting import registry
from fusebackend.rewriting.inductor_pass import SLOTS, Chain, FusePass, chained
from fusebackend.session import code_identity

aten = torch.ops.aten


def transposed_sum(x, y):
    return x.transpose(0, 1) + y


def inputs(device="cpu", rows=96, columns=40):
    return torch.randn(rows, columns, device=device), torch.randn(columns, rows, device=device)


def test_the_name_is_enough():
    assert "fuse" in torch._dynamo.list_backends()


def test_fullgraph_dynamic_and_grad(interpreted):
    compiled = interpreted(lambda x, y: (transposed_sum(x, y) @ x).sum(), fullgraph=True, dynamic=True)
    x, y = (t.requires_grad_() for t in inputs())
    compiled(x, y).backward()
    got = x.grad, y.grad
    x.grad = y.grad = None
    (transposed_sum(x, y) @ x).sum().backward()
    torch.testing.assert_close(got, (x.grad, y.grad))


@pytest.mark.codegen
def test_generated_code_calls_the_kernel():
    compiled = torch.compile(transposed_sum, backend="fuse", options={"fuse.gate": "off"})
    x, y = inputs()
    result, (code,) = torch._inductor.utils.run_and_get_code(compiled, x, y)
    assert "fusebackend.transpose_add" in code
    assert torch.equal(result, transposed_sum(x, y))
    assert result.stride() == transposed_sum(x, y).stride()


@pytest.mark.codegen
@pytest.mark.cuda
def test_cuda_graphs():
    options = {"mode": "reduce-overhead", "fuse.gate": "off", "fuse.patterns": ["transpose_add"]}
    compiled = torch.compile(lambda x, y: transposed_sum(x, y) @ x, backend="fuse", options=options)
    for _ in range(5):
        x, y = inputs("cuda", 1000, 900)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(x, y), transposed_sum(x, y) @ x)
    assert fusebackend.last_report().counts() == {"transpose_add": 1}


@pytest.mark.codegen
@pytest.mark.cuda
def test_a_side_stream():
    compiled = torch.compile(transposed_sum, backend="fuse")
    x, y = inputs("cuda", 4096, 2048)
    compiled(x, y)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            torch.cuda._sleep(1_000_000)
            new = x * 2  # the kernel must run behind this on the same stream
            result = compiled(new, y)
            assert torch.equal(result, transposed_sum(new, y))


class Recorder(CustomGraphPass):
    """A user's own pass."""

    def __init__(self):
        self.targets = []

    def __call__(self, graph):
        self.targets.append([n.target for n in graph.nodes])

    def uuid(self):
        return "recorder"


@pytest.mark.parametrize("through_options", [True, False])
def test_the_users_pass_runs_before_ours(interpreted, through_options):
    recorder = Recorder()
    slot = SLOTS["post_grad"]
    options = {slot: recorder} if through_options else {}
    with inductor_config.patch({} if through_options else {slot: recorder}):
        interpreted(transposed_sum, options=options)(*inputs())
    assert any(aten.add.Tensor in targets for targets in recorder.targets)
    assert fusebackend.last_report().counts() == {"transpose_add": 1}


def test_a_users_pass_without_uuid_switches_caching_off_and_ours_does_not():
    ours = FusePass("post_grad", ("all",), "ours")
    slot = SLOTS["post_grad"]
    assert chained(slot, ours, {}) is ours
    assert Chain((Recorder(), ours)).uuid() is not None
    assert Chain((lambda graph: None, ours)).uuid() is None


def test_no_library_is_plain_inductor(interpreted, monkeypatch, caplog):
    monkeypatch.setattr(loader, "_loaded", loader.Native(reason="no C++ compiler found"))
    x, y = inputs()
    assert torch.equal(interpreted(transposed_sum)(x, y), transposed_sum(x, y))
    report = fusebackend.last_report()
    assert not report.substitutions
    assert "no C++ compiler found" in report.rejections[0].reason
    assert report.notes == ["no C++ compiler found"]


def test_five_shapes_one_compile(interpreted, device):
    compiled = interpreted(transposed_sum, dynamic=True)
    for rows, columns in [(64, 40), (65, 41), (128, 7), (33, 200), (1000, 31)]:
        x, y = inputs(device, rows, columns)
        assert torch.equal(compiled(x, y), transposed_sum(x, y))
        assert compiled(x, y).stride() == transposed_sum(x, y).stride()
    assert len(fusebackend.reports()) == 1
    assert fusebackend.last_report().counts() == {"transpose_add": 1}


def test_fuel_limits_the_number_of_substitutions(interpreted):
    def two(x, y, z):
        return transposed_sum(x, y), transposed_sum(x, z)

    for fuel, expected in [(0, 0), (1, 1), (5, 2)]:
        torch._dynamo.reset()
        interpreted(two, options={"fuse.fuel": fuel})(*inputs(), inputs()[1])
        report = fusebackend.last_report()
        assert len(report.substitutions) == expected
        assert len([r for r in report.rejections if "out of fuel" in r.reason]) == 2 - expected


def test_a_pattern_can_be_left_out(interpreted):
    interpreted(transposed_sum, options={"fuse.patterns": "-transpose_add"})(*inputs())
    report = fusebackend.last_report()
    assert not report.substitutions and not report.rejections


@pytest.fixture
def precisions():
    """The settings of fp32 matrix products, each of a backend, as they are set one by one; restored at the end."""
    settings = [backend.matmul for backend in (torch.backends.cuda, torch.backends.mkldnn)]
    was = [s.fp32_precision for s in settings]
    yield settings
    for setting, precision in zip(settings, was):
        setting.fp32_precision = precision


@pytest.mark.codegen
@pytest.mark.parametrize("which", [0, 1], ids=["cuda", "mkldnn"])
def test_a_precision_that_is_set_for_one_backend_alone(precisions, caplog, which):
    """``torch.get_float32_matmul_precision()`` raises then."""
    precisions[which].fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    compiled = torch.compile(transposed_sum, backend="fuse", options={"fuse.strict": True, "fuse.gate": "measure"})
    x, y = inputs()
    assert torch.equal(compiled(x, y), transposed_sum(x, y))
    assert fusebackend.last_report().verdicts
    assert not [r for r in caplog.records if r.name.startswith("fusebackend") and r.levelname == "WARNING"]


def test_the_precision_of_products_on_cpus_is_in_the_key(precisions):
    """Inductor's key has that of CUDA alone: a sum of products in fp32 that was compiled to a matrix product came from the cache where
    matrix products are computed in bf16."""
    keys = set()
    for precision in ("ieee", "bf16"):
        precisions[1].fp32_precision = precision
        keys.add(code_identity(Options(), loader.load()))
    assert len(keys) == 2


def test_whether_a_backward_may_overwrite_what_was_saved_is_in_the_key():
    """Inductor's key does not have it: a backward that was compiled to run once was served to a program that runs it twice."""
    keys = {code_identity(Options(), loader.load())}
    with functorch_config.patch(donated_buffer=not functorch_config.donated_buffer):
        keys.add(code_identity(Options(), loader.load()))
    assert len(keys) == 2


def test_any_edit_of_the_package_makes_another_key(tmp_path, monkeypatch):
    """A guard's helper in another file decides as much as the pattern's own file does."""
    from fusebackend import patterns

    registry.all_patterns()  # the real ones, before their folder is another
    monkeypatch.setattr(patterns, "__path__", [str(tmp_path)])
    keys = set()
    for content in ("LIMIT = 1", "LIMIT = 2"):
        (tmp_path / "helper.py").write_text(content)
        cache_keys.python_sources.cache_clear()
        keys.add(code_identity(Options(), loader.load()))
    cache_keys.python_sources.cache_clear()
    assert len(keys) == 2
