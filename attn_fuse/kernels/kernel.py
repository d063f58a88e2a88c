"""Kernel: one way to run an attention, as a value whose fields are all that is known of it.

Its limits, every reason why it cannot run an attention, torch's settings that rule it out, the speed that an estimate
goes by, what the grid of tests expects, and how it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

# Values by axis of the test grid (tests/grid/features.py).
GridValues: TypeAlias = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Reach:
    """The share of the peak rates that a kernel reaches, forward and backward.

    sm80: whether its code is written for sm_80. skips: the masks whose hidden scores it does not compute.
    passes: how often each score goes through memory, forward and in training.
    launches: operations of a call. per_block: operations of a block of scores, for a kernel whose loop over blocks runs
        on the host; a block stays in cache.
    dropout: the time of its products with dropout, over that without.
    splits: whether several programs share the keys of few queries.
    summed: seconds for each element of a bias's gradient, where the bias is stored, and where it is looked up in a
        table.
    forward32, backward32: the shares in float32; None where they are the same.
    splits32: the max head_dim and value_dim at which a float32 product becomes three TF32 products, where a single one
        is not allowed. fixed32: whether it becomes three where a single one is allowed, too.
    """

    forward: float
    backward: float
    sm80: bool = False
    skips: Literal["any", "causal", "none"] = "any"
    passes: tuple[float, float] = (0.0, 0.0)
    launches: float = 1.0
    per_block: float = 0.0
    dropout: float = 1.0
    splits: bool = False
    summed: tuple[float, float] = (0.0, 0.0)
    forward32: float | None = None
    backward32: float | None = None
    splits32: int = 0
    fixed32: bool = False


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to run an attention.

    name: what users call the kernel by. devices: the types of device that the kernel runs on. dtypes: of query, key and
        value.
    limits: yields the reasons that the fields cannot say, one sentence each; asked only where the fields allow.
    emit: builds the call; returns the node that holds [batch, heads, q_len, value_dim].
    needs_evidence: on a device where the kernel was not measured, whether it has to pass a self-check before it is
        used, unless a user asks for it by name.
    reach: by type of device the figures that an estimate goes by; where there are none, only measurements count.
    plan_seconds: what building a plan takes for each new shape, forward and backward; empty for a kernel without plans.
    switch: the backend of SDPA that torch's switches turn on and off, as in `torch.backends.cuda.enable_flash_sdp`.
    nondeterministic: why its gradients are not deterministic, "" where they are; asked with the facts and with whether
        `torch.use_deterministic_algorithms` only warns.
    declines: what the kernel always declines, under "always", in "training", or on a type of device.
    trains: the types of device on which it gives gradients.
    """

    name: str
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    limits: Callable[[Attention, Facts], Iterator[str]]
    emit: Callable[[Call], Node]
    needs_evidence: bool = False
    reach: Mapping[str, Reach] = field(default_factory=dict)
    plan_seconds: tuple[float, ...] = ()
    switch: Literal["flash", "efficient", "cudnn", ""] = ""
    nondeterministic: Callable[[Facts, bool], str] = lambda facts, only_warns: ""
    declines: Mapping[str, GridValues] = field(default_factory=dict)
    trains: frozenset[str] = frozenset({"cpu", "cuda"})

    def why_not(self, attention: Attention, facts: Facts) -> tuple[str, ...]:
        """Every reason why this kernel cannot run `attention`; none means that it can."""
        reasons = []
        if facts.device.type not in self.devices:
            return (f"runs on {' and '.join(sorted(self.devices))}, not on {facts.device.type}",)
        if facts.dtype not in self.dtypes:
            reasons.append(f"does not take {_short(facts.dtype)}")
        return (*reasons, *self.limits(attention, facts))


def beyond_masks_and_biases(attention: Attention) -> Iterator[str]:
    """The reasons of a kernel that takes scaled scores, masks and biases, and nothing else; see `BEYOND_SDPA`."""
    if attention.unread is not None:
        yield f"takes no function of the scores: {attention.unread.reason}"
    if attention.softcap is not None:
        yield "takes no softcap"
    if attention.sink is not None:
        yield "takes no sink"
    if attention.factor is not None:
        yield "takes no factor on the weights that differs from key to key"


# What such a kernel declines of the grid.
BEYOND_SDPA: GridValues = {
    "function": ("softcap", "arbitrary"), "sink": ("of each head",), "factor": ("of the keys",),
}  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
