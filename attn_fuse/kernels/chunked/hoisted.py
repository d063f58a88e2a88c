"""Hoisted: parts of a score program that depend only on j - i or on one position, computed before the blocks.

A relative position bias depends on j - i. It is computed once for each of the q_len + kv_len - 1 differences and read
along the diagonals of every block; its gradient is summed along the diagonals before it goes into the table. The image
region of a query or key depends on one position.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import gives_fraction
from attn_fuse.expression.nodes import Expr, children, distinct
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.dependence import dependences, of_difference
from attn_fuse.kernels.score.program import Block, ScoreProgram


@dataclass(frozen=True, eq=False)
class HoistedPart:
    """A hoisted part. of: the one thing that its value depends on, "j - i", "i" (or no position) or "j"."""

    expr: Expr
    of: str

    def block(self, given: Operands, dtype: torch.dtype) -> Block:
        """The block that has each value of the part once: for j - i, query 0 and keys from 1 - q_len on."""
        batch, heads, q_len, kv_len = given.sizes
        queries, keys = (0, q_len if self.of == "i" else 1), (0, 1 if self.of == "i" else kv_len)
        if self.of == "j - i":
            keys = (1 - q_len, kv_len)
        return Block(batch, heads, queries, keys, given.query.device, dtype)


@dataclass(frozen=True, eq=False)
class Hoisted:
    """A program that reads the hoisted parts as inputs after its own, by `Diagonal` if they depend on j - i."""

    program: ScoreProgram
    parts: tuple[HoistedPart, ...]


@functools.cache
def hoisted(text: str, varies: tuple[frozenset[str], ...]) -> Hoisted:
    """The score program of `text` with its costly parts hoisted. varies: as for `dependences`.

    These are lookups and transcendental functions that depend on j - i, and long formulas of one position.
    """
    program = ScoreProgram.loads(text)
    alone, dependence = set[int](), dict[int, frozenset[str]]()
    for expr in program.weighing:
        alone |= of_difference(expr, varies)
        dependence |= dependences(expr, varies)
    parts: list[HoistedPart] = []
    made: dict[int, Expr] = {}

    def rewritten(node: Expr) -> Expr:
        if id(node) not in made:
            made[id(node)] = changed(node)
        return made[id(node)]

    def changed(node: Expr) -> Expr:
        if id(node) in alone and _is_costly(node):
            parts.append(HoistedPart(node, "j - i"))
            return ex.Diagonal(len(varies) + len(parts) - 1)
        if _is_long(node, dependence[id(node)]):
            parts.append(HoistedPart(node, min(dependence[id(node)] & {"i", "j"} or "i")))
            return ex.Input(len(varies) + len(parts) - 1)
        return ex.remade(node, list(map(rewritten, children(node))))

    exprs: dict[str, Any] = dict(zip(("score", "factor"), map(rewritten, program.weighing), strict=False))
    return Hoisted(replace(program, **exprs) if parts else program, tuple(parts))


def _is_costly(node: Expr) -> bool:
    found = list(distinct(node))
    costly = any(isinstance(x, ex.Gather) or (isinstance(x, ex.Unary) and gives_fraction(x.name)) for x in found)
    return costly and any(x in (ex.Position("i"), ex.Position("j")) for x in found)


# The least operations of a formula that is worth a pass of its own.
_LONG = 8


def _is_long(node: Expr, depends: frozenset[str]) -> bool:
    """Whether `node` takes many operations and depends on at most one of i and j, but not on the score."""
    if {"i", "j"} <= depends or "score" in depends:
        return False
    return sum(not isinstance(part, (ex.Const, ex.Number, ex.Input, ex.Position)) for part in distinct(node)) >= _LONG
