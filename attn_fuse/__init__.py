"""attn_fuse: ``torch.compile(model, backend="attn_fuse")`` runs hand-written attention on fused kernels.

The names below are loaded when they are first used, so that importing attn_fuse brings in nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_fuse.doors.export import export
    from attn_fuse.doors.install import install, uninstall
    from attn_fuse.errors import AttnFuseError, NotFusedError, OptionError
    from attn_fuse.explain import explain
    from attn_fuse.options import Options, use_kernels
    from attn_fuse.report import GraphReport, SiteReport, last_report, reports

    __version__: str

__all__ = [
    "AttnFuseError",
    "GraphReport",
    "NotFusedError",
    "OptionError",
    "Options",
    "SiteReport",
    "__version__",
    "explain",
    "export",
    "install",
    "last_report",
    "reports",
    "uninstall",
    "use_kernels",
]

_HOME = {
    "AttnFuseError": "errors",
    "GraphReport": "report",
    "NotFusedError": "errors",
    "OptionError": "errors",
    "Options": "options",
    "SiteReport": "report",
    "export": "doors.export",
    "install": "doors.install",
    "last_report": "report",
    "reports": "report",
    "uninstall": "doors.install",
    "use_kernels": "options",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("attn_fuse.report").version()
    if name == "explain":  # the module, which can be called like the function in it
        return importlib.import_module("attn_fuse.explain")
    if name in _HOME:
        return getattr(importlib.import_module(f"attn_fuse.{_HOME[name]}"), name)
    raise AttributeError(f"module 'attn_fuse' has no attribute {name!r}")
