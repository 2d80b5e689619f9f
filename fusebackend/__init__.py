"""A torch.compile backend that rewrites FX subgraphs into better compiled kernels and leaves the rest to Inductor.

    model = torch.compile(model, backend="fuse")     # needs no import
    print(fusebackend.explain(model, *inputs))       # what was rewritten, and why the rest was not

See README.md for the families and their measured ratios, and :mod:`fusebackend.options` for the options.
"""

__version__ = "0.1.0"

from .backend import last_report, reports
from .explain import explain
from .pattern import Match, Pattern, Reject
from .registry import register
from .report import Report

__all__ = ["Match", "Pattern", "Reject", "Report", "explain", "last_report", "register", "reports"]
