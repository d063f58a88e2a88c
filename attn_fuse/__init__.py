"""attn_fuse: ``torch.compile(model, backend="attn_fuse")`` runs hand-written attention on fused kernels."""

from attn_fuse.errors import AttnFuseError, NotFusedError, OptionError
from attn_fuse.options import Options, use_kernels
from attn_fuse.report import GraphReport, SiteReport, reports

__all__ = [
    "AttnFuseError",
    "GraphReport",
    "NotFusedError",
    "OptionError",
    "Options",
    "SiteReport",
    "reports",
    "use_kernels",
]
