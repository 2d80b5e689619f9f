"""Runs one family's kernels: ``python -m fusebackend.tools.sanitizer.worker FAMILY``, a process that a tool watches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fusebackend.native import loader
from fusebackend.rewriting.registry import families


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the names of the kernels that were launched")
    chosen = parser.parse_args()
    launch = families()[chosen.family].sanitizer.launch_every_kernel
    reason = loader.load().why_not(torch.device("cuda", 0))
    if reason:
        sys.exit(f"{chosen.family}: {reason}")
    torch.manual_seed(0)
    if chosen.record:
        chosen.record.write_text("\n".join(_launched(launch)))
    else:
        launch()
        torch.cuda.synchronize()
    return 0


def _launched(launch: Callable[[], None]) -> list[str]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        launch()
        torch.cuda.synchronize()
    return sorted({event.name for event in profiled.events()})


if __name__ == "__main__":
    sys.exit(main())
