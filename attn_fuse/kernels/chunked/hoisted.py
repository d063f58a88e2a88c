"""Hoisted: parts of a score program that depend on j - i, or on one position, alone; we compute them before the blocks.

A relative position bias depends on j - i. It is computed once for each of the q_len + kv_len - 1 differences, and read
along the diagonals of every block; its gradient is summed along the diagonals before it goes into the table. The region
of an image that a query or a key stands in depends on one position, and is computed once for each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn_fuse.expression.functions import UNARY, gives_fraction
from attn_fuse.expression.nodes import (
    Const,
    Diagonal,
    Expr,
    Gather,
    Input,
    Number,
    Position,
    children,
    distinct,
    name_of,
    remade,
)
from attn_fuse.kernels.score.dependence import dependences, of_difference, varying
from attn_fuse.kernels.score.program import Block, ScoreProgram


@dataclass(frozen=True, eq=False)
class HoistedPart:
    """A part that is hoisted. of: what its value depends on, "j - i", "i" (or no position) or "j"."""

    expr: Expr
    of: str

    def block(self, q_len: int, kv_len: int, batch: int, heads: int, device: torch.device, dtype: torch.dtype) -> Block:
        """The block on which the part has each of its values once; for j - i, query 0 and keys from 1 - q_len on."""
        match self.of:
            case "i":
                queries, keys = (0, q_len), (0, 1)
            case "j":
                queries, keys = (0, 1), (0, kv_len)
            case _:
                queries, keys = (0, 1), (1 - q_len, kv_len)
        return Block(batch, heads, queries, keys, device, dtype)


@dataclass(frozen=True, eq=False)
class Hoisted:
    """A program that reads parts[n] as its input `first + n`, by a `Diagonal` where the part depends on j - i."""

    program: ScoreProgram
    parts: tuple[HoistedPart, ...]
    first: int


def hoisted(text: str, shapes: Sequence[Sequence[int]]) -> Hoisted:
    """The score program of `text`, with the parts hoisted that are worth it. shapes: of the program's inputs.

    Worth it are lookups and transcendental functions that depend on j - i, and long formulas of one position.
    """
    return _hoisted(text, tuple(map(varying, shapes)))


@functools.cache
def _hoisted(text: str, varies: tuple[frozenset[str], ...]) -> Hoisted:
    program = ScoreProgram.loads(text)
    known: dict[int, Expr] = {}
    parts: list[HoistedPart] = []

    def rewritten(expr: Expr) -> Expr:
        alone, dependence = of_difference(expr, varies), dependences(expr, varies)

        def of(node: Expr) -> str:
            if id(node) in alone and _is_costly(node):
                return "j - i"
            return min(dependence[id(node)] & {"i", "j"} or "i") if _is_long(node, dependence) else ""

        def replaced(node: Expr) -> Expr:
            if id(node) not in known:
                known[id(node)] = changed(node)
            return known[id(node)]

        def changed(node: Expr) -> Expr:
            if not of(node):
                return remade(node, list(map(replaced, children(node))))
            parts.append(HoistedPart(node, of(node)))
            return (Diagonal if of(node) == "j - i" else Input)(len(varies) + len(parts) - 1)

        return replaced(expr)

    score = rewritten(program.score)
    factor = None if program.factor is None else rewritten(program.factor)
    if parts:
        program = dataclasses.replace(program, score=score, factor=factor)
    return Hoisted(program, tuple(parts), len(varies))


def _is_costly(node: Expr) -> bool:
    found = list(distinct(node))
    is_costly = any(
        isinstance(part, Gather) or (gives_fraction(name_of(part)) and name_of(part) in UNARY) for part in found
    )
    return is_costly and any(part in (Position("i"), Position("j")) for part in found)


# The number of operations from which on a formula is worth a pass of its own.
_LONG = 8


def _is_long(node: Expr, dependence: dict[int, frozenset[str]]) -> bool:
    """Whether `node` takes many operations, and depends on at most one of i and j and not on the score."""
    if {"i", "j"} <= dependence[id(node)] or "score" in dependence[id(node)]:
        return False
    return sum(not isinstance(part, (Const, Number, Input, Position)) for part in distinct(node)) >= _LONG
