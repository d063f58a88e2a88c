"""Fingerprint: which regions consist of the same operations, so that layers share what is found out about one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node, map_arg

from attn_fuse.attention.facts import is_learned
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import Region


def fingerprint(region: Region, forms: Mapping[Node, object]) -> Any:
    """A value that is equal for regions with the same operations on leaves of the same kind.

    forms: what is proved of the contents of leaves.
    """
    number: dict[Node, str] = {node: f"%{i}" for i, node in enumerate((*region.leaves, *region.nodes))}

    def written(args: Any) -> str:
        return repr(map_arg(args, lambda n: _Named(number[n])))

    leaves = []
    for leaf in region.leaves:
        value = value_of(leaf)
        if isinstance(value, torch.Tensor):
            kind: Any = (str(value.shape), str(value.stride()), value.dtype, value.device, value.requires_grad)
            kind += (is_learned(value),)
        else:
            kind = (type(value), str(value))
        leaves.append((kind, forms.get(leaf), leaf in region.operands))
    nodes = tuple((n.op, n.target, written((n.args, n.kwargs))) for n in region.nodes)
    modes = region.scope.modes
    return tuple(leaves), nodes, tuple(modes[n].autocast for n in region.nodes), region.mode.grad


@dataclass(frozen=True)
class _Named:
    name: str

    def __repr__(self) -> str:
        return self.name
