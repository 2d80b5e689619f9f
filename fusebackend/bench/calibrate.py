"""``python -m fusebackend calibrate``: how long each kind of work takes on this machine, from random sites."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusebackend import __version__
from fusebackend.bench import calibration_sites, fit_times
from fusebackend.bench.calibration_sites import HOST, Failure, Measured
from fusebackend.bench.environment import clocks
from fusebackend.log import log
from fusebackend.native import loader
from fusebackend.profitability import calibration, estimating
from fusebackend.profitability.calibration import Calibration
from fusebackend.profitability.region_timing import MARGIN
from fusebackend.profitability.unfit import Unfit
from fusebackend.progress import progress_line
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.registry import families
from fusebackend.tools.command_line import check_file_to_write
from fusebackend.tools.object_reference import CommandError, UsageError

#: The ratios to Inductor's speed below which judged sites are counted.
_BELOW = (0.95, 0.98)


def calibrate(
    chosen: Sequence[str],
    minutes: float,
    seed: int,
    device_type: str,
    output: Path | None,
    check: bool,
    sites: Path | None,
    timed: Sequence[Path] | None,
) -> int:
    """Times random sites, fits models of their times and writes them to a file; or judges the calibration in use by such sites.

    Args:
        chosen: names of families; all if empty. What a file already says of others stays.
        device_type: ``"cuda"`` or ``"cpu"``.
        output: the file; by default that of this device in the cache folder, which is in use from then on.
        check: judge, and write no calibration.
        sites: only time, and write that to this file.
        timed: such files, to be used instead of timing.

    Raises:
        UsageError: an argument can't be used.
        CommandError: a package of the extra ``calibrate`` is missing, or too few sites were timed.
    """
    unknown = sorted(set(chosen) - set(families()))
    if unknown:
        raise UsageError(f"--family takes {', '.join(families())}; got {', '.join(unknown)}")
    if not timed and device_type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device takes cpu here: torch sees no GPU")
    for path, argument in ((output, "--output"), (sites, "--sites")):
        if path is not None:
            check_file_to_write(path, argument)
    if not check and sites is None:
        fit_times.check_extras()
    provenance, measured = read_sites(timed) if timed else _time(chosen, minutes, seed, torch.device(device_type), sites)
    if sites is not None:
        if timed:
            write_sites(sites, provenance, measured)
        print(f"{_count(measured)} sites: {sites}")
    elif check:
        used = calibration.for_device(provenance["type"], provenance["device"])
        if used is None:
            raise CommandError("there is no calibration for this device to check")
        print(f"calibration {used}\n{judgement(measured, used)}")
    else:
        _write(provenance, measured, bool(chosen), output)
    return 0


def _time(
    chosen: Sequence[str], minutes: float, seed: int, device: torch.device, sites: Path | None
) -> tuple[dict[str, Any], list[Measured]]:
    """Times sites, and writes each to the file as it comes: what was timed before an interruption is not lost."""
    loader.load()  # builds it, which is no part of the time
    provenance = {
        "format": calibration.FORMAT,
        "type": device.type,
        "device": calibration.device_name(device),
        "torch_version": torch.__version__,
        "fusebackend_version": __version__,
        "date": datetime.date.today().isoformat(),
        "minutes": minutes,
        "seed": seed,
        "clocks": clocks(device),
        "properties": calibration.device_properties(device),
        "architecture": calibration.architecture(device.type),
    }
    measured: list[Measured] = []
    failures: collections.Counter[str] = collections.Counter()
    with contextlib.ExitStack() as stack:
        file = None if sites is None else stack.enter_context(sites.open("w", buffering=1))
        if file is not None:
            file.write(_line(provenance))
        progress = stack.enter_context(progress_line("calibrating"))
        for found in calibration_sites.measure(list(chosen) or list(families()), minutes, seed, device, progress):
            if isinstance(found, Failure):
                failures[found.reason] += 1
                continue
            measured.append(found)
            if file is not None:
                file.write(_line(dataclasses.asdict(found)))
    for reason, count in failures.most_common(3):
        log.warning("%d sites could not be timed: %s", count, reason)
    return provenance, measured


def _write(provenance: Mapping[str, Any], measured: Sequence[Measured], is_part: bool, output: Path | None) -> None:
    host = {way: [m.us for m in measured if m.family == HOST and m.way == way] for way in ("ours", "inductor")}
    call = round(max(0.0, min(host["ours"], default=0.0) - min(host["inductor"], default=0.0)), 2)
    device = {n: provenance[n] for n in ("device", "torch_version", "properties")}
    shipped = calibration.shipped(provenance["type"], **device, running=provenance.get("architecture", ""))
    known = [c.models_here() for c in shipped]
    # None that is two deep itself: files would hold one in another, deeper with each calibration.
    bases = [{k: m for k, m in models.items() if m.bases < 2} for models in known]
    before = known[0] if shipped and shipped[0].is_own else {}
    fitted = fit_times.fit_all([m for m in measured if m.family != HOST], bases=bases, before=before)
    models = {k: dataclasses.asdict(m) for k, m in fitted.items()}
    if not models:
        raise CommandError(f"too few sites were timed to fit anything ({_count(measured)}): give it more --minutes")
    print(table(models))
    path = output or calibration.own_file(provenance["device"], provenance["torch_version"])
    if is_part and path.is_file():
        models = json.loads(path.read_text())["models"] | models
    # Kinds of which too few sites were drawn.
    models |= {k: dataclasses.asdict(m) for k, m in collections.ChainMap(*known).items() if k not in models}
    path.write_text(json.dumps({**provenance, "sites": _count(measured), "call": call, "models": models}, indent=1) + "\n")
    calibration.forget()
    print(f"{_count(measured)} sites of {provenance['device']}, torch {provenance['torch_version']}: {path}")


def _count(measured: Iterable[Measured]) -> int:
    return len({(m.family, m.site) for m in measured if m.family != HOST})


def write_sites(path: Path, provenance: Mapping[str, Any], measured: Iterable[Measured]) -> None:
    """A line of provenance, then a line a form of a site."""
    path.write_text("".join(map(_line, (provenance, *map(dataclasses.asdict, measured)))))


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data) + "\n"


def read_sites(paths: Sequence[Path]) -> tuple[dict[str, Any], list[Measured]]:
    """What :func:`write_sites` wrote to these files, taken together.

    Raises:
        UsageError: one is another kind of file, or they are of different devices or versions of torch.
    """
    files = [_read_sites(path) for path in paths]
    provenance = files[0][0]
    for name in ("type", "device", "torch_version"):
        if len({other[name] for other, _ in files}) > 1:
            raise UsageError(f"--from takes files of one {name}, got {', '.join(sorted({str(other[name]) for other, _ in files}))}")
    return {**provenance, "minutes": sum(other["minutes"] for other, _ in files)}, [m for _, measured in files for m in measured]


def _read_sites(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    try:
        provenance, *lines = map(json.loads, path.read_text().splitlines())
        if provenance["format"] != calibration.FORMAT:
            raise ValueError(f"format {provenance['format']}")
        measured = [Measured(**{**line, "kernels": [[_work(w) for w in ways] for ways in line["kernels"]]}) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--from takes a file that --sites wrote, got {str(path)!r}: {type(error).__name__}: {error}") from error
    return provenance, measured


def _work(data: Mapping[str, Any]) -> Work:
    otherwise = data["otherwise"]
    return Work(**{**data, "otherwise": None if otherwise is None else _work(otherwise)})


def table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """The error of each model on sites that it was not fitted to."""
    rows = [f"{'work':28} {'sites':>6} {'mean error':>11} {'interval':>9}"]
    for kind, m in models.items():
        interval = f"+-{100 * math.expm1(m['spread'] * m['noise']):.0f} %"
        rows.append(f"{kind:28} {m['count']:6} {100 * math.expm1(m['error']):9.1f} % {interval:>9}")
    return "\n".join(rows)


@dataclasses.dataclass
class Judged:
    """One site, and what a calibration would have decided.

    Attributes:
        ours, inductor: the times of both forms, in microseconds.
        applied: whether it would have been rewritten; None where the estimate does not tell.
        applied_by_default: the same with what the default gate times in a short compile: of regions only those whose compiling
            pays for itself soon.
    """

    site: str
    ours: float
    inductor: float
    applied: bool | None
    applied_by_default: bool

    @property
    def chosen(self) -> float:
        return self.ours if self.applied else self.inductor

    @property
    def chosen_by_default(self) -> float:
        return self.ours if self.applied_by_default else self.inductor


def judged(measured: Iterable[Measured], by: Calibration) -> dict[str, list[Judged]]:
    """By family, the sites that were timed both ways."""
    both: dict[tuple[str, str], dict[str, Measured]] = {}
    for m in measured:
        both.setdefault((m.family, m.site), {})[m.way] = m
    found: dict[str, list[Judged]] = {}
    for (family, site), ways in both.items():
        if set(ways) != {"ours", "inductor"} or family == HOST:
            continue
        found.setdefault(family, []).append(_judge(site, ways["ours"], ways["inductor"], by))
    return found


def _judge(site: str, ours: Measured, inductor: Measured, by: Calibration) -> Judged:
    is_faster = ours.us * MARGIN <= inductor.us
    try:
        estimates = estimating.replacement(by, _as_known(by, ours)), estimating.total(by, _as_known(by, inductor))
    except Unfit:
        return Judged(site, ours.us, inductor.us, None, ours.is_called and is_faster)
    applied = estimating.pays(*estimates)
    by_default = applied is True
    if ours.is_called:
        if applied is not False and not estimating.clearly_pays(*estimates):
            by_default = is_faster
    elif applied is None:
        alone, theirs = estimating.measured(by, ours.us / 1e3, math.log(MARGIN)), estimates[1]
        if estimating.ours_decides(*estimates) and estimating.pays(alone, theirs) is True:
            by_default = True
        elif estimating.inductor_decides(alone, theirs):
            seconds = estimating.COMPILE_SECONDS + estimating.calling_seconds(alone, theirs)
            by_default = is_faster and estimating.pays_soon(alone, theirs, seconds)  # compiled both ways
    return Judged(site, ours.us, inductor.us, applied, by_default)


def _as_known(by: Calibration, m: Measured) -> list[list[Work]]:
    return [[estimating.as_known(by, work) for work in ways] for ways in m.kernels]


def judgement(measured: Iterable[Measured], by: Calibration) -> str:
    """A table: how much time is lost by what the calibration would decide, against the better of both forms of each site; and by what the
    default gate would, which times what the estimate leaves open."""
    rows = [
        f"{'family':16} {'sites':>6} {'applied':>8} {'regret':>7} {'of the gain':>12}"
        + "".join(f" {f'< {b}':>7}" for b in _BELOW)
        + "  worst  by default:  regret"
    ]
    for family, sites in judged(measured, by).items():
        best, chosen, timed = (sum(of) for of in zip(*((min(s.ours, s.inductor), s.chosen, s.chosen_by_default) for s in sites)))
        whole = sum(s.inductor for s in sites)
        ratios = [s.inductor / s.chosen for s in sites]
        share = (whole - chosen) / (whole - best) if whole > best else 1.0
        below = "".join(f" {sum(r < b for r in ratios):7}" for b in _BELOW)
        applied, by_default = sum(bool(s.applied) for s in sites), sum(s.applied_by_default for s in sites)
        rows.append(
            f"{family:16} {len(sites):6} {applied:8} {chosen / best:7.3f} {100 * share:10.0f} %{below}  {min(ratios):.2f}"
            f"  {by_default:11}  {timed / best:6.3f}"
        )
    return "\n".join(rows)
