"""What a kernel is: its limits as fields, every reason it cannot run an attention, what it costs, how it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call


@dataclass(frozen=True)
class Kernel:
    """One way to run an attention.

    limits: yields the reasons that the fields cannot say, one sentence each; it is asked only where these allow.
    emit: builds the call; returns the node that holds [batch, heads, q_len, value_dim].
    needs_evidence: on a device without measurements of it there, not used before it has passed a self-check, unless it
        is asked for by name.
    """

    name: str
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    limits: Callable[[Attention, Facts], Iterator[str]]
    emit: Callable[[Call], Node]
    needs_evidence: bool = False

    def why_not(self, attention: Attention, facts: Facts) -> tuple[str, ...]:
        """Every reason why this kernel cannot run `attention`; none means that it can."""
        reasons = []
        if facts.device.type not in self.devices:
            return (f"runs on {' and '.join(sorted(self.devices))}, not on {facts.device.type}",)
        if facts.dtype not in self.dtypes:
            reasons.append(f"does not take {_short(facts.dtype)}")
        return (*reasons, *self.limits(attention, facts))


def beyond_masks_and_biases(attention: Attention) -> Iterator[str]:
    """The reasons of a kernel that takes scaled scores, masks and biases, and nothing else."""
    if attention.score_mod is not None:
        yield f"takes no function of the scores: {attention.unread}"
    if attention.softcap is not None:
        yield "takes no softcap"
    if attention.sink is not None:
        yield "takes no sink"
    if attention.factor is not None:
        yield "takes no factor on the weights that differs from key to key"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
