"""Hoisted: parts of a score program that are no functions of both positions, computed before the blocks.

A relative position bias is a function of the difference. It is computed once for each, q_len + kv_len - 1 of them, and
read along the diagonals of every block; its gradient is summed along them before it goes into the table. The region of
an image that a query or a key stands in is a function of one position, and is computed once for each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_fuse.kernels.score_program import FRACTIONAL, POSITIONS, Block, ScoreProgram, Tree, nodes


@dataclass(frozen=True, eq=False)
class HoistedPart:
    """A part that is hoisted. of: what it is a function of, "j - i", "i" or "j"."""

    tree: Tree
    of: str

    def block(self, q_len: int, kv_len: int, batch: int, heads: int, device: torch.device, dtype: torch.dtype) -> Block:
        """The block on which the part has each of its values once; of a difference, query 0, keys from 1 - q_len."""
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
    """A score program that reads parts[n] as its input `first + n`; a function of j - i as a "diagonal" of it."""

    program: ScoreProgram
    parts: tuple[HoistedPart, ...]
    first: int


def hoisted(text: str, shapes: Sequence[Sequence[int]]) -> Hoisted:
    """The program that `text` is, less the parts worth it, given the shapes of its inputs.

    Worth it are, of the difference of positions, lookups and transcendentals, and of one position, longer formulas.
    """
    return _hoisted(text, tuple(tuple(n != 1 for n in shape[2:4]) for shape in shapes))


@functools.cache
def _hoisted(text: str, varies: tuple[tuple[bool, ...], ...]) -> Hoisted:
    program = ScoreProgram.loads(text)
    known: dict[int, Tree] = {}
    parts: list[HoistedPart] = []

    def rewritten(tree: Tree) -> Tree:
        alone, dependence = _of_difference(tree, varies), _dependence(tree, varies)

        def of(node: Tree) -> str:
            if id(node) in alone and _is_costly(node):
                return "j - i"
            return min(dependence[id(node)] or "i") if _is_long(node, dependence) else ""

        def replaced(node: Tree) -> Tree:
            if id(node) not in known:
                known[id(node)] = changed(node)
            return known[id(node)]

        def changed(node: Tree) -> Tree:
            if not of(node):
                return tuple(replaced(part) if isinstance(part, tuple) else part for part in node)
            parts.append(HoistedPart(node, of(node)))
            return ("diagonal" if of(node) == "j - i" else "input", len(varies) + len(parts) - 1)

        return replaced(tree)

    score = rewritten(program.score)
    factor = None if program.factor is None else rewritten(program.factor)
    if parts:
        program = dataclasses.replace(program, score=score, factor=factor)
    return Hoisted(program, tuple(parts), len(varies))


@dataclass(frozen=True)
class Skewed:
    """Memory for a block that is summed along its diagonals.

    Between its rows lie zeros, as many as a strip has rows: read as rows longer by one than they are, each row of a
    strip is shifted against the one before it. The sums of the strips, so shifted again, are added up.

    block: [.., rows, columns], to be written. strips: [.., count, rows of one, width], the same memory. total: [..,
    count, rows + columns - 1]; shifted: [.., count, width], where the sum of each strip goes in it.
    """

    block: Tensor
    strips: Tensor
    shifted: Tensor
    total: Tensor

    def sums(self) -> Tensor:
        """The sums over equal (column - row), ascending: [.., 1, rows + columns - 1]."""
        torch.sum(self.strips, -2, out=self.shifted)
        return self.total.sum(-2, keepdim=True)[..., 1 - sum(self.block.shape[-2:]) :]


def skewed(like: Tensor) -> Skewed:
    """Memory for a block of the shape, dtype and device of `like`."""
    (*planes, rows, columns), n = like.shape, _ROWS_OF_A_STRIP
    count = -(-rows // n)
    width, step, length = n + columns - 1, n + columns, count * n + columns - 1
    memory = like.new_zeros(*planes, count * n * step + n)
    total = like.new_zeros(*planes, count, length)
    outer, outer_total = memory.stride()[:-1], total.stride()[:-2]
    return Skewed(
        memory.as_strided((*planes, rows, columns), (*outer, step, 1), n),
        memory.as_strided((*planes, count, n, width), (*outer, n * step, step + 1, 1), 1),
        total.as_strided((*planes, count, width), (*outer_total, length - n, 1), (count - 1) * n),
        total,
    )


_ROWS_OF_A_STRIP = 16


def _is_costly(node: Tree) -> bool:
    names = {part[0] for part in nodes(node)}
    return bool(names & {"i", "j"}) and bool(names & {"gather", *FRACTIONAL})


# Operations from which on it is worth a pass of its own to have the result instead.
_LONG = 8


def _is_long(node: Tree, dependence: dict[int, frozenset[str]]) -> bool:
    """Whether it takes many operations to compute `node`, from one position at most."""
    if len(dependence[id(node)]) > 1 or "score" in dependence[id(node)]:
        return False
    return sum(part[0] not in ("const", "number", "input", *POSITIONS) for part in nodes(node)) >= _LONG


def _dependence(tree: Tree, varies: tuple[tuple[bool, ...], ...]) -> dict[int, frozenset[str]]:
    """Of each node below `tree`, by identity: which of "i", "j" and "score" its value depends on."""
    found: dict[int, frozenset[str]] = {}
    for node in nodes(tree):
        own = {node[0]} & {"i", "j", "score"}
        if node[0] == "input":
            own = {name for name, along in zip("ij", varies[node[1]], strict=True) if along}
        found[id(node)] = frozenset(own).union(*(found[id(part)] for part in node[1:] if isinstance(part, tuple)))
    return found


def _of_difference(tree: Tree, varies: tuple[tuple[bool, ...], ...]) -> frozenset[int]:
    """The nodes below `tree`, by identity, whose value depends on the positions through j - i alone, or not at all."""
    slopes: dict[int, tuple[int, int] | None] = {}
    found: set[int] = set()
    for node in nodes(tree):
        children = [part for part in node[1:] if isinstance(part, tuple)]
        slopes[id(node)] = slope = _slope(node, [slopes[id(part)] for part in children])
        if slope is not None:
            alone = slope[0] == -slope[1]
        elif node[0] == "input":
            alone = not any(varies[node[1]])
        else:
            alone = node[0] != "score" and all(id(part) in found for part in children)
        if alone:
            found.add(id(node))
    return frozenset(found)


def _slope(node: Tree, children: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """How an exact linear function of the positions grows with i and with j; None for what is none."""
    match node[0]:
        case "i":
            return 1, 0
        case "j":
            return 0, 1
        case "b" | "h" | "number":
            return 0, 0
        case "const" if type(node[1]) is int:
            return 0, 0
        case "cast" if node[1] == "int64":
            return children[0]
    known = [slope for slope in children if slope is not None]
    if len(known) < len(children):
        return None
    match node:
        case ("add", _, _):
            return known[0][0] + known[1][0], known[0][1] + known[1][1]
        case ("sub", _, _):
            return known[0][0] - known[1][0], known[0][1] - known[1][1]
        case ("neg", _):
            return -known[0][0], -known[0][1]
        case ("mul", ("const", int(c)), _):
            return c * known[1][0], c * known[1][1]
        case ("mul", _, ("const", int(c))):
            return c * known[0][0], c * known[0][1]
    return None
