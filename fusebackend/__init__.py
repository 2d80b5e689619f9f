"""A torch.compile backend that rewrites FX subgraphs into better compiled kernels and leaves the rest to Inductor.

    model = torch.compile(model, backend="fuse")     # needs no import
    print(fusebackend.explain(model, *inputs))       # what was rewritten, and why the rest was not

Names are imported when they are first used, so that importing the package costs nothing. See README.md for the families and their
measured ratios, and :mod:`fusebackend.options` for the options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fusebackend import backend as backend
    from fusebackend import options as options
    from fusebackend import passes as passes
    from fusebackend import testing as testing
    from fusebackend.backend import inductor_configs, last_report, load_operators, reports
    from fusebackend.declarative.register import RegistrationError, register_pattern, register_replacement
    from fusebackend.declarative.replace_module import replace_module
    from fusebackend.declarative.verify import VerificationError
    from fusebackend.native.hub_kernels import load_hub_kernel
    from fusebackend.native.user_kernels import load_kernel
    from fusebackend.report.model import Report
    from fusebackend.rewriting.numeric_check import numeric_errors
    from fusebackend.rewriting.pattern import Estimate, Match, Pattern, Reject
    from fusebackend.rewriting.registry import prioritize, register, unregister
    from fusebackend.rewriting.switches import disable, enable
    from fusebackend.tools.explain import explain
    from fusebackend.tools.verify import verify

_MODULE_OF = {
    "Estimate": "rewriting.pattern",
    "Match": "rewriting.pattern",
    "Pattern": "rewriting.pattern",
    "RegistrationError": "declarative.register",
    "Reject": "rewriting.pattern",
    "Report": "report.model",
    "VerificationError": "declarative.verify",
    "disable": "rewriting.switches",
    "enable": "rewriting.switches",
    "explain": "tools.explain",
    "inductor_configs": "backend",
    "last_report": "backend",
    "load_hub_kernel": "native.hub_kernels",
    "load_kernel": "native.user_kernels",
    "load_operators": "backend",
    "numeric_errors": "rewriting.numeric_check",
    "prioritize": "rewriting.registry",
    "register": "rewriting.registry",
    "register_pattern": "declarative.register",
    "register_replacement": "declarative.register",
    "replace_module": "declarative.replace_module",
    "reports": "backend",
    "unregister": "rewriting.registry",
    "verify": "tools.verify",
}
_SUBMODULES = frozenset(
    "backend bench declarative fuzz fx_utils native options passes patterns profitability report rewriting testing tools".split()
)
_DEPRECATED = {"check": "rewriting.numeric_check", "graph": "fx_utils"}

__all__ = [
    "Estimate",
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
    "load_hub_kernel",
    "load_kernel",
    "load_operators",
    "numeric_errors",
    "prioritize",
    "register",
    "register_pattern",
    "register_replacement",
    "replace_module",
    "reports",
    "unregister",
    "verify",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULE_OF:
        value: Any = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _DEPRECATED:
        import warnings

        successor = f"{__name__}.{_DEPRECATED[name]}"
        warnings.warn(f"{__name__}.{name} is deprecated: use {successor}", DeprecationWarning, stacklevel=2)
        return importlib.import_module(successor)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBMODULES})
