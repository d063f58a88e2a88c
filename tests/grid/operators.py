"""Our own kernels as operators: each row of the grid as a score program, straight into them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Gather, Input, Or, distinct
from attn_fuse.kernels import operands as operands_of_kernels
from attn_fuse.kernels.chunked.op import chunked
from attn_fuse.kernels.score.program import ScoreProgram
from tests.grid import cover
from tests.grid.case import AXES, Case, Operands, operands, program
from tests.grid.cover import Row
from tests.grid.oracle import complaint, results

SEED = 2**40 + 7


class Call(operands_of_kernels.Operands):
    """What an operator is called with."""

    @property
    def is_bounded(self) -> bool:
        """Whether what the mask hides is no more than what is out of the program's bounds."""
        program = ScoreProgram.loads(self.program)
        reads = [node for node in distinct(program.visible) if isinstance(node, (Input, Gather, Or))]
        return program.visible is None or (not reads and (program.lower or program.upper) is not None)


@dataclass(frozen=True)
class Operator:
    """bind: prepares what layers share, and gives the call itself.

    only: the values of an axis that it takes, where these are not all.
    """

    name: str
    bind: Callable[[Call], Callable[[], Tensor]]
    only: Mapping[str, Sequence[str]]

    def rows(self, strength: int = 2, other: cover.Axes | None = None) -> list[Row]:
        """Each value alone, then in every combination of `strength`. other: values in place of those of the grid."""
        axes = {**AXES, **(other or {}), **self.only}
        base = {axis: values[0] for axis, values in axes.items()}
        return [*cover.distinct([*cover.alone(axes, base), *cover.covering(axes, strength)])]


def _chunked(c: Call) -> Callable[[], Tensor]:
    return lambda: chunked(c.query, c.key, c.value, c.inputs, c.numbers, c.seed, c.dropout_p, c.program, False)[0]


def _flash(c: Call) -> Callable[[], Tensor]:
    from attn_fuse.kernels.triton.flash.op import triton_flash
    from attn_fuse.kernels.triton.flash.spans import spans

    found: tuple[Any, Any] = (None, None)
    if not c.is_bounded:
        sizes = (*c.query.shape[:3], c.key.shape[2])
        found = spans([x.detach() for x in c.inputs], c.numbers, *sizes, c.program, c.query.device, True)
    return lambda: triton_flash(
        c.query, c.key, c.value, c.inputs, c.numbers, c.seed, *found, c.dropout_p, c.program, False
    )[0]


CHUNKED = Operator("chunked", _chunked, {})
FLASH = Operator("triton_flash", _flash, {"dtype": ("float32", "bfloat16", "float16")})


def operators(device: torch.device) -> dict[str, Operator]:
    """Those that run on the device, by name: on a CPU those in Triton run only under its interpreter."""
    found = [CHUNKED]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is not None and (interpreted or device.type == "cuda"):
        found.append(FLASH)
    return {operator.name: operator for operator in found}


def check(operator: Operator, c: Case, device: torch.device) -> str:
    """What is wrong with the operator's output and gradients; empty where nothing is."""
    o = operands(c, device)
    what, numbers = program(c)
    seed = torch.tensor([SEED], device=device) if c.dropout_p else None

    def run(query: Tensor, key: Tensor, value: Tensor, *inputs: Tensor) -> Tensor:
        return operator.bind(Call(query, key, value, [*inputs], numbers, seed, c.dropout_p, what.dumps()))()

    with torch.set_grad_enabled(c.training):
        got = results(run, o, c.training)
    return complaint(got, c, o, kept_weights(run, c, o) if c.dropout_p else None)


def kept_weights(run: Callable[..., Tensor], c: Case, o: Operands) -> Tensor:
    """What dropout multiplies each weight with, read off the output for values that are columns of the identity.

    The values keep their shape, so that nothing about the kernel changes but them.
    """
    s = c.sizes
    query, key, value, *rest = (t.detach() for t in o.tensors)
    columns = []
    with torch.no_grad():
        for start in range(0, s.kv_len, s.value_dim):
            part = torch.eye(s.kv_len, device=value.device)[:, start : start + s.value_dim]
            part = torch.nn.functional.pad(part, (0, s.value_dim - part.shape[1])).to(value.dtype)
            columns.append(run(query, key, part.expand(value.shape).contiguous(), *rest))
    found = torch.cat(columns, -1)[..., : s.kv_len]
    return (found != 0).double() / (1 - c.dropout_p)
