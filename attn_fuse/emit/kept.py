"""kept: a copy of a tensor that will be written into, as an operator that Inductor neither removes nor repeats.

A kernel keeps what it reads for its backward. Inductor may take `x.clone()` for x itself, or clone x only in the
backward, even where the program has written into x in between (torch 2.13: wrong gradients, without a warning).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("attn_fuse", "FRAGMENT")
_LIBRARY.define("kept(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))


def _copied(x: Tensor) -> Tensor:
    return x.clone()


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    return grad


_LIBRARY.impl("kept", _copied, "CompositeExplicitAutograd")
torch.library.register_fake("attn_fuse::kept", _copied, lib=_LIBRARY)
torch.library.register_autograd("attn_fuse::kept", _gradient, lib=_LIBRARY)

kept = torch.ops.attn_fuse.kept.default
