"""Picker: which kernel runs an attention, with every reason why the others do not.

"As written" is a candidate like the kernels: it wins where no kernel was measured faster than what Inductor makes of
the program, unless the caller asks for kernels by name or for everything to be fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from attn_fuse.attention import Attention
from attn_fuse.facts import Facts
from attn_fuse.kernels import CHUNKED, KERNELS
from attn_fuse.kernels.evidence import compare
from attn_fuse.kernels.kernel import Kernel

WhyNot: TypeAlias = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Choice:
    """The kernel, or None to leave the site as written; why each other one was not chosen; what it rests on."""

    kernel: Kernel | None
    why_not: WhyNot
    because: str


def pick(attention: Attention, facts: Facts, allowed: tuple[str, ...] | None, fuse_all: bool) -> Choice:
    """allowed: kernels by name, in order of preference, or None for all. fuse_all: do not ask what is faster."""
    order = KERNELS if allowed is None else tuple(k for name in allowed for k in KERNELS if k.name == name)
    why_not: WhyNot = {k.name: ("not among the kernels allowed",) for k in KERNELS if k not in order}
    able: list[Kernel] = []
    for kernel in order:
        reasons = kernel.why_not(attention, facts)
        if reasons:
            why_not[kernel.name] = reasons
        else:
            able.append(kernel)
    if not able:
        return Choice(None, why_not, _no_kernel(why_not, facts, allowed))
    if fuse_all or allowed is not None:
        return _chosen(able[0], able, why_not, "asked for")
    if facts.weights_used:
        because = "the weights are also used outside the attention, so nothing is saved"
        return Choice(None, why_not | {k.name: (because,) for k in able}, because)
    measured = [(kernel, compare(kernel.name, attention, facts)) for kernel in able]
    known = [(kernel, found) for kernel, found in measured if found is not None]
    if not known:
        if able == [CHUNKED]:
            because = f"only {CHUNKED.name} can run it, and it was not measured on {facts.device.type}"
            return Choice(None, why_not | {CHUNKED.name: ("not measured here",)}, because)
        return _chosen(able[0], able, why_not, f"no measurement on {facts.device.type}; stores no score matrix")
    best, found = min(known, key=lambda pair: pair[1].ratio)
    measure = f"{found.ratio:.2f} of the time as written, measured at {found.where}"
    if found.ratio < 1:
        return _chosen(best, able, why_not, measure)
    for kernel, other in known:
        why_not[kernel.name] = (f"{other.ratio:.2f} of the time as written, measured at {other.where}",)
    return Choice(None, why_not, f"no kernel is faster than the program as written: {best.name} takes {measure}")


def _chosen(best: Kernel, able: list[Kernel], why_not: WhyNot, because: str) -> Choice:
    others = {k.name: (f"{best.name} is preferred",) for k in able if k is not best}
    return Choice(best, why_not | others, because)


def _no_kernel(why_not: WhyNot, facts: Facts, allowed: tuple[str, ...] | None) -> str:
    here = [k.name for k in KERNELS if facts.device.type in k.devices and (allowed is None or k.name in allowed)]
    said = [f"{name}: {'; '.join(why_not[name])}" for name in here]
    return "no kernel can run it: " + (", ".join(said) if said else f"none is allowed on {facts.device.type}")
