"""Proof: run the code of an attention and compare its output and gradients with the program's."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from attn_fuse.advice.calls import Written
from attn_fuse.advice.place import Place
from attn_fuse.emit.check import difference
from attn_fuse.errors import named
from attn_fuse.graph.modes import autocast_of
from attn_fuse.graph.region import Region
from attn_fuse.graph.replay import replay
from attn_fuse.picker.leaves import leaf_of, made


def wrong(place: Place, code: Written, values: Mapping[Node, Any], learns: bool) -> str | None:
    """The first difference between the code and the program's attention, both without dropout; None without one.

    values: of the leaves. Random numbers stand for the others. learns: whether to compare gradients.
    """
    region = place.found.region
    # What has known contents is no parameter.
    inputs = [
        _input(leaf, region, values.get(leaf), learns and leaf not in place.found.proofs) for leaf in region.leaves
    ]
    text = "\n".join((*code.setup, f"_result_ = {code.undropped}"))

    def run(*given: Any) -> Any:
        names: dict[str, Any] = {
            "torch": torch, "F": F, "flex_attention": flex_attention, "create_block_mask": lambda mask, *_, **__: mask,
        }  # fmt: skip
        for number, name in place.used.items():
            _bind(names, name.split("."), given[number])
        exec(text, names)
        return names["_result_"]

    graph = Graph()
    arguments = tuple(graph.placeholder(f"leaf_{n}") for n in range(len(inputs)))
    graph.output((graph.call_function(run, arguments),))
    with torch.set_grad_enabled(learns), autocast_of(region.mode):
        try:
            ran = replay(GraphModule({}, graph), inputs)
        except Exception as problem:
            return f"the code raises {named(problem)}"
        return difference(place.as_written(), replace(ran, facts={}, constants={}), inputs, numbers=True)


def _input(node: Node, region: Region, value: Any, learns: bool) -> Any:
    leaf = leaf_of(node, region, held=False)
    if leaf.dtype is None:
        return made(leaf) if value is None else value
    may_learn = learns and leaf.dtype.is_floating_point and node not in region.detached
    contents = value.detach() if isinstance(value, Tensor) else None
    return made(replace(leaf, contents=contents, requires_grad=may_learn, learned=False))


def _bind(names: dict[str, Any], path: list[str], value: Any) -> None:
    *owners, last = path
    if not owners:
        names[last] = value
        return
    owner = names.setdefault(owners[0], types.SimpleNamespace())
    for part in owners[1:]:
        owner.__dict__.setdefault(part, types.SimpleNamespace())
        owner = getattr(owner, part)
    setattr(owner, last, value)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """FlexAttention written out, with gradients on every device. block_mask: a `mask_mod`."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    sizes = (*query.shape[:3], key.shape[2])
    at = [
        torch.arange(n, device=query.device).view([-1 if d == place else 1 for d in range(4)])
        for place, n in enumerate(sizes)
    ]
    wide = torch.promote_types(query.dtype, torch.float32)
    score = (query @ key.mT).to(wide) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        score = score_mod(score, *at)
    if block_mask is not None:
        score = torch.where(block_mask(*at), score, -torch.inf)
    weights = torch.nan_to_num(score.softmax(-1)) if block_mask is not None else score.softmax(-1)
    out = (weights.to(value.dtype) @ value).to(query.dtype)
    return (out, score.logsumexp(-1)) if return_lse else out
