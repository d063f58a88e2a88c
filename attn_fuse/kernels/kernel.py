"""Kernel: one way to run an attention, as a value whose fields say what it takes and how to build its call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts, may_be_nan

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to run an attention.

    name: the kernel's name for users. devices: the types of device that it runs on. dtypes: of query, key and value.
    limits: yields its other reasons against an attention, one sentence each; called on its devices only.
    emit: builds the call and returns the node of [batch, heads, q_len, value_dim].
    needs_evidence: whether it must pass a self-check on devices where it was not measured, unless a user asks for it.
    skips_hidden: whether it skips the blocks that positions hide, whatever the mask.
    block: queries and keys in a block, for a kernel that multiplies each head's by a library that settings choose.
    plan_seconds: seconds to build a plan for each new shape, forward and backward; empty for a kernel without plans.
    switch: the backend of SDPA that torch's switches turn on and off, as in `torch.backends.cuda.enable_flash_sdp`.
    nondeterministic: (facts, whether `torch.use_deterministic_algorithms` only warns) -> why its gradients are not
        deterministic; "" if they are.
    keeps_nan: whether a fully masked row stays NaN if it is NaN as written; else it is 0.
    templated: whether Inductor makes its code from a template, which can fail.
    """

    name: str
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    limits: Callable[[Attention, Facts], Iterator[str]]
    emit: Callable[[Call], Node]
    needs_evidence: bool = False
    skips_hidden: bool = False
    block: tuple[int, int] | None = None
    plan_seconds: tuple[float, ...] = ()
    switch: Literal["flash", "efficient", "cudnn", ""] = ""
    nondeterministic: Callable[[Facts, bool], str] = lambda facts, only_warns: ""
    keeps_nan: bool = False
    templated: bool = False

    def why_not(self, attention: Attention, facts: Facts) -> tuple[str, ...]:
        """Every reason why this kernel cannot run `attention`; none if it can."""
        reasons = []
        if facts.device.type not in self.devices:
            return (f"runs on {' and '.join(sorted(self.devices))}, not on {facts.device.type}",)
        if facts.dtype not in self.dtypes:
            reasons.append(f"does not take {str(facts.dtype).removeprefix('torch.')}")
        if facts.nan_read and (attention.zero_for_nan or (may_be_nan(attention, facts) and not self.keeps_nan)):
            reasons.append(f"a query that sees no key would get 0 for NaN, which {facts.nan_read} tells apart")
        return (*reasons, *self.limits(attention, facts))


def beyond_masks_and_biases(attention: Attention) -> Iterator[str]:
    """Why a kernel that takes only a scale, masks and biases cannot run `attention`."""
    if attention.unread is not None:
        yield f"takes no function of the scores: {attention.unread.reason}"
    if attention.softcap is not None:
        yield "takes no softcap"
    if attention.sink is not None:
        yield "takes no sink"
    if attention.factor is not None:
        yield "takes no factor on the weights that differs from key to key"
