"""``bench models``: a step of a model, and what is compared beside its time. No figure is judged here."""

import json
import sys
import time

import pytest
import torch
from bench_examples import CPU

import fusebackend
from fusebackend.__main__ import main
from fusebackend.bench import device_time, job, model_steps, model_zoo, workload


def small_factory():
    return torch.nn.Linear(4, 4), (torch.randn(3, 4),)


def test_a_users_own_model_is_timed_in_every_kind(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model_steps, "interleaved_ms", lambda steps, device: {way: [len(str(step()))] * 3 for way, step in steps.items()})
    file = tmp_path / "models.json"
    own = f"{__name__}:small_factory"
    arguments = ["--model", own, "--kind", "training-fp32", "--kind", "inference-bf16", "--option", "fuse.interpret=True"]
    assert main(["bench", "models", *arguments, "--patterns=-transpose_add", "--output", str(file)]) == 0
    rows = json.loads(file.read_text())["models"]
    assert [(r["model"], r["kind"]) for r in rows] == [(own, "training-fp32"), (own, "inference-bf16")]
    assert all(r["difference"] < 1e-5 and r["substitutions"] == {} for r in rows)
    assert rows[0]["near_misses"] and all(": " in sentence for r in rows for sentence in r["near_misses"])
    assert "training-fp32: geometric mean" in capsys.readouterr().out


def test_what_was_left_to_inductor_is_written_with_the_reason():
    torch.compile(lambda x: x.t().contiguous().sin(), backend="fuse", options={"fuse.patterns": "permute"})(torch.randn(9, 7))
    (left,) = workload.near_misses()
    assert left.startswith("permute in forward, ") and "by Inductor" in left


def test_losses_follow_steps_down_the_gradient_and_the_model_is_restored():
    linear = workload.Workload(f"{__name__}:small_factory", "training-fp32", CPU)
    start = {k: v.clone() for k, v in linear.model.state_dict().items()}
    losses = model_steps._results(linear, lambda: _eager_step(linear), start, steps=4)
    assert all(a > b for a, b in zip(losses, losses[1:]))
    assert all(torch.equal(v, start[k]) for k, v in linear.model.state_dict().items())


def _eager_step(linear):
    linear.model.zero_grad()
    loss = workload.loss_of(linear.model(*linear.args))
    loss.backward()
    return loss.detach()


def test_losses_start_from_the_same_weights_after_linear_out_of_memory(monkeypatch):
    monkeypatch.setattr(job.time, "sleep", lambda seconds: None)
    linear, calls = workload.Workload(f"{__name__}:small_factory", "training-fp32", CPU), []
    start = {k: v.clone() for k, v in linear.model.state_dict().items()}

    def step():
        calls.append(None)
        if len(calls) in (2, 4):  # of the first and the second attempt
            raise torch.OutOfMemoryError
        linear.model.zero_grad()
        loss = linear.model(*linear.args).square().mean()
        loss.backward()
        return loss.detach()

    disturbed = job.retry_out_of_memory(model_steps._results, linear, step, start, 3)
    assert len(calls) == 2 + 2 + 3 and disturbed == job.retry_out_of_memory(model_steps._results, linear, step, start, 3)


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["bench", "models", "--model", "swin_b", "--kind", "inference-fp32"]) == 1
    assert "timm" in (said := capsys.readouterr().out) and "pip install 'fusebackend[models]'" in said


@pytest.mark.parametrize("name", model_zoo.CPU_MODELS)
def test_the_cpu_models_have_substitutions(name):
    model, inputs = model_zoo.MODELS[name](CPU)[:2]
    assert fusebackend.explain(torch.compile(model, backend="fuse", options={"fuse.gate": "off"}), *inputs).substitutions


def test_the_devices_time_and_the_peak_memory_are_printed_where_there_are_any():
    row = {"model": "m", "kind": "training-fp32", "ms": {"inductor": 3.0, "fuse": 2.0}, "ratio": 1.5, "uncertainty": 0.01, "goal": 0.98}
    row |= {"difference": 0.0, "substitutions": {}}
    assert "device" not in model_steps.line(row)
    on_the_device = {"device_ms": {"inductor": 2.5, "fuse": 1.25}, "peak_gib": {"inductor": 4.0, "fuse": 3.5}}
    assert model_steps.line(row | on_the_device).endswith("   device 2.5 -> 1.25 ms   peak 4 -> 3.5 GiB")


@pytest.mark.cuda
def test_the_devices_time_does_not_hold_what_it_waits_for_the_host():
    x = torch.ones(8, device="cuda")

    def step():
        for _ in range(1200):  # more than CUDA's queue holds
            x.mul_(1.0)
        time.sleep(0.2)
        for _ in range(100):
            x.mul_(1.0)

    assert 0.5 < device_time.busy_ms(step, 2) < 100


def test_where_no_kernels_are_seen_the_devices_time_is_that_between_events(monkeypatch):
    seen = iter([1.5, None])
    monkeypatch.setattr(model_steps, "busy_ms", lambda call, calls: next(seen))
    monkeypatch.setattr(model_steps, "median_ms", lambda call, device, effort: 3.0)
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 2 << 30)
    prepared = object.__new__(model_steps.Prepared)
    prepared.device, prepared.workload = CPU, workload.Workload(f"{__name__}:small_factory", "training-fp32", CPU)
    prepared.steps = dict.fromkeys(("inductor", "fuse"), lambda: None)
    row = prepared._on_the_device()
    assert row == {"device_ms": {"inductor": 3.0, "fuse": 3.0}, "peak_gib": {"inductor": 2.0, "fuse": 2.0}}, "both ways alike"


def test_kernels_that_run_at_once_count_once():
    """One that is launched before its predecessor has ended waits for it, and the profiler counts that as its own time, too."""
    assert device_time.covered([(0.0, 4.0), (1.0, 6.0), (2.0, 3.0), (10.0, 12.0)]) == 8.0
    assert device_time.covered([]) == 0.0
