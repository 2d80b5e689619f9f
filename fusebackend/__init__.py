"""A torch.compile backend that rewrites FX subgraphs into better compiled kernels and leaves the rest to Inductor.

    model = torch.compile(model, backend="fuse")     # needs no import
    print(fusebackend.explain(model, *inputs))       # what was rewritten, and why the rest was not

See README.md for the families and their measured ratios, and :mod:`fusebackend.options` for the options.
"""

__version__ = "0.2.0"

from fusebackend.backend import inductor_configs, last_report, load_operators, reports
from fusebackend.declarative.register import RegistrationError, register_pattern, register_replacement
from fusebackend.declarative.verify import VerificationError, verify
from fusebackend.native.user_kernels import load_kernel
from fusebackend.report.model import Report
from fusebackend.rewriting.pattern import Match, Pattern, Reject
from fusebackend.rewriting.registry import disable, enable, prioritize, register, unregister
from fusebackend.tools.explain import explain

__all__ = [
    "Match",
    "Pattern",
    "RegistrationError",
    "Reject",
    "Report",
    "VerificationError",
    "disable",
    "enable",
    "explain",
    "inductor_configs",
    "last_report",
    "load_kernel",
    "load_operators",
    "prioritize",
    "register",
    "register_pattern",
    "register_replacement",
    "reports",
    "unregister",
    "verify",
]
