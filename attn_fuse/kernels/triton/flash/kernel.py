"""triton_flash: our flash attention in Triton, forward and backward, with the score function generated into it.

Taken: every mask, bias, function of the scores, sink, factor and dropout that is recognised, with the gradients of all
that is learned; grouped heads, any strides. Declined: wide heads, float64, devices before Ampere. Blocks that the
structure of the mask hides are not computed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.builder import tensor
from attn_fuse.kernels.centring import gains, restored, sums_to_one
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.kernels.score.derivative import Trees
from attn_fuse.kernels.score.program import ScoreProgram, Tree, nodes
from attn_fuse.kernels.score.simplify import inside
from attn_fuse.kernels.score.write import Written, written
from attn_fuse.kernels.triton.flash import op as flash_op
from attn_fuse.kernels.triton.flash import packed_op
from attn_fuse.kernels.triton.flash.packed import packed_operands
from attn_fuse.kernels.triton.flash.spans import spans

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

WIDEST = 256
_AMPERE = (8, 0)


def limits(attention: Attention, facts: Facts) -> Iterator[str]:
    for name in ("head_dim", "value_dim"):
        if name in facts.symbolic:
            yield f"takes a {name} of at most {WIDEST}, and it may change from call to call"
        elif getattr(facts, name) > WIDEST:
            yield f"takes a {name} of at most {WIDEST}, not {getattr(facts, name)}"
    if importlib.util.find_spec("triton") is None:
        yield "Triton is not installed"
    if facts.device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(facts.device)
        if capability < _AMPERE:
            yield f"needs compute capability 8.0, this device has {'.'.join(map(str, capability))}"


def emit(call: Call, descriptors: bool = False) -> Node:
    """descriptors: whether to read through them."""
    operators = (
        (flash_op.triton_flash_hopper, packed_op.hopper_packed)
        if descriptors
        else (flash_op.triton_flash, packed_op.flash_packed)
    )
    score = written(call)
    drops = call.attention.dropout_p is not None
    seed = call.node(torch.randint, 2**62, [1], dtype=torch.int64, device=call.facts.device) if drops else None
    of_queries, of_keys = _spans(call, score)
    packed = packed_operands(call)
    operands = (call.query(scaled=False), call.key(), call.value()) if packed is None else packed
    # In half precision, what it would gain is not worth a copy of the values, packed or not.
    centred = gains(call) and sums_to_one(call.attention) and call.facts.dtype.itemsize > 2
    results = call.node(
        operators[packed is not None],
        *operands,
        score.inputs,
        score.numbers,
        seed,
        of_queries,
        of_keys,
        call.dropout_p(),
        score.program.dumps(),
        centred,
    )
    out = call.node(operator.getitem, results, 0)
    if not centred:
        return out
    row_sum, centre = (call.node(operator.getitem, results, n) for n in (2, 3))
    whole: Node = restored(out, call.node(torch.ne, row_sum, 0), centre, call.node)
    return whole


def _spans(call: Call, score: Written) -> tuple[Node | None, Node | None]:
    """Which keys and queries see each other at all, as far as the mask's structure and not its bounds say so."""
    program = _structure(score)
    if program is None:
        return None, None
    inputs = [node for node in nodes(program.visible) if node[0] in ("input", "gather")]
    read = sorted({node[1] for node in inputs})
    program = dataclasses.replace(program, visible=_renumbered(program.visible, {n: at for at, n in enumerate(read)}))
    a = call.attention
    sizes = [call.size(a.length(axes)) for axes in (a.batch_axes, a.head_axes, a.axes.query, a.axes.key)]
    tensors = [call.node_once(torch.Tensor.detach, score.inputs[n]) for n in read]
    found = call.node_once(spans, tensors, score.numbers, *sizes, program.dumps(), call.facts.device)
    return call.node_once(operator.getitem, found, 0), call.node_once(operator.getitem, found, 1)


def _structure(score: Written) -> ScoreProgram | None:
    """The parts of the mask that say more than the bounds and that no tensor as large as the scores is read for."""
    program = score.program
    if program.visible is None:
        return None
    if program.unless_empty:
        # Of only some of the parts it could not be said which query sees no key.
        small = _is_small(program.visible, score.inputs)
        return ScoreProgram(("score",), visible=program.visible, unless_empty=True) if small else None
    left = inside(Trees(), dataclasses.replace(program, score=program.visible))
    parts = left[1:] if left[0] == "and" else (left,)
    parts = tuple(part for part in parts if part[0] != "const" and _is_small(part, score.inputs))
    if not parts:
        return None
    return ScoreProgram(("score",), visible=parts[0] if len(parts) == 1 else ("and", *parts))


def _is_small(tree: Tree, inputs: list[Node]) -> bool:
    for node in nodes(tree):
        if node[0] == "input" and 1 not in tensor(inputs[node[1]]).shape[2:]:
            return False
        names = {part[0] for part in nodes(node)} if node[0] == "gather" else set()
        if {"i", "j"} <= names:
            return False
    return True


def _renumbered(tree: Any, numbers: dict[int, int]) -> Any:
    if not isinstance(tree, tuple):
        return tree
    name, *rest = tree
    if name in ("input", "gather"):
        rest[0] = numbers[rest[0]]
    return (name, *(_renumbered(part, numbers) for part in rest))


TRITON_FLASH = Kernel(
    name="triton_flash",
    devices=frozenset({"cuda", "cpu"} if flash_op.INTERPRETED else {"cuda"}),
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
    limits=limits,
    emit=emit,
    needs_evidence=True,
)
