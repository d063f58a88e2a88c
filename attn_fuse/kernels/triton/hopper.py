"""triton_flash_hopper: flash attention for Hopper GPUs, over tensor descriptors.

Taken: 16-bit operands, head_dim and value_dim up to 256, any score function whose tensors need no gradient; blocks that
causal masks and windows hide are skipped. Declined: dropout, sinks, factors on the weights, and rows whose log-sum-exp
would lose what it is needed for. The picker takes it only on a device on which it was measured.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from attn_fuse import expression as ex
from attn_fuse.attention import Attention, Causal, Window
from attn_fuse.builder import NotEmitted, tensor
from attn_fuse.expression import Expr
from attn_fuse.facts import Facts
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.kernels.triton.packed import packed_operands
from attn_fuse.kernels.writer import written

if TYPE_CHECKING:
    from attn_fuse.call import Call

WIDEST = 256
HOPPER = (9, 0)

# Triton's interpreter runs kernels on CPU tensors; it is chosen before Triton is imported, or not at all.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def limits(attention: Attention, facts: Facts) -> Iterator[str]:
    if facts.device.type == "cuda" and torch.cuda.get_device_capability(facts.device) != HOPPER:
        yield "runs on GPUs of compute capability 9.0 only"
    if not _has_triton():
        yield "Triton is not installed"
    for name in ("head_dim", "value_dim"):
        size = getattr(facts, name)
        if name in facts.symbolic:
            yield f"takes a {name} of at most {WIDEST}, and it may change from call to call"
        elif size > WIDEST or size * facts.dtype.itemsize % 16:
            yield f"takes a {name} of at most {WIDEST} and of a multiple of 16 bytes, not {size}"
    if attention.dropout_p is not None:
        yield "has no dropout"
    if attention.sink is not None:
        yield "takes no sink"
    if attention.factor is not None:
        yield "takes no factor on the weights that differs from key to key"
    if facts.training:
        if attention.mask.empty_rows == "mean" or facts.bias_may_hide:
            # exp(score - lse) at a score like -1e9: the lse has lost the number of keys.
            yield "a query that sees no key would get a wrong gradient"
        if facts.bias_needs_grad or _may_learn(attention):
            yield "gives a gradient to query, key and value only"


def _may_learn(attention: Attention) -> bool:
    """Whether the scores read a tensor, other than in a mask or bias, that may need a gradient."""
    parts = [attention.scale, *([attention.score_mod] if attention.score_mod is not None else [])]
    return any(isinstance(x, (ex.Load, ex.Gather)) for part in parts for x in ex.walk(part))


def emit(call: Call) -> Node:
    from attn_fuse.kernels.triton.hopper_op import hopper
    from attn_fuse.kernels.triton.packed_op import hopper_packed

    score = written(call)
    if call.facts.training and any(tensor(node).requires_grad for node in score.inputs):
        raise NotEmitted("gives a gradient to query, key and value only")
    rest = (score.inputs, score.numbers, score.program.dumps(), _only_scale(call.attention))
    packed = packed_operands(call)
    if packed is not None:
        results = call.node(hopper_packed, *packed, *rest)
    else:
        results = call.node(hopper, call.query(scaled=False), call.key(), call.value(), *rest)
    return call.node(operator.getitem, results, 0)


def _only_scale(attention: Attention) -> float:
    """The scale, if it is greater than 0 and all that is done within the bounds of the mask; else 0."""
    parts = attention.mask.parts
    bounded = [sum(isinstance(part, kind) for part in parts) for kind in (Causal, Window)]
    plain = attention.score_mod is None and attention.softcap is None and not attention.biases
    hides = sum(bounded) == len(parts) and max(bounded) <= 1 and attention.mask.empty_rows != "mean"
    scale: Expr = attention.scale
    return max(float(scale.value), 0.0) if plain and hides and isinstance(scale, ex.Const) else 0.0


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


_HALF = {torch.float16, torch.bfloat16}
TRITON_FLASH_HOPPER = Kernel(
    name="triton_flash_hopper",
    devices=frozenset({"cuda", "cpu"} if _INTERPRETED else {"cuda"}),
    dtypes=frozenset(_HALF | {torch.float32} if _INTERPRETED else _HALF),
    limits=limits,
    emit=emit,
    needs_evidence=True,
)
