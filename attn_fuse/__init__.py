"""attn_fuse: ``torch.compile(model, backend="attn_fuse")`` runs hand-written attention on fused kernels.

Names load on first use, which keeps ``import attn_fuse`` light.
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

_NAMES = {
    "doors.export": ["export"],
    "doors.install": ["install", "uninstall"],
    "errors": ["AttnFuseError", "NotFusedError", "OptionError"],
    "options": ["Options", "use_kernels"],
    "report": ["GraphReport", "SiteReport", "last_report", "reports"],
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("attn_fuse.report").version()
    if name == "explain":  # the module can be called like the function in it
        return importlib.import_module("attn_fuse.explain")
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"attn_fuse.{module}"), name)
    raise AttributeError(f"module 'attn_fuse' has no attribute {name!r}")
