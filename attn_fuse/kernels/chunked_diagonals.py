"""Diagonals: parts of a score program that depend on the two positions only through their difference.

A relative position bias is one. It is computed once for each difference, q_len + kv_len - 1 of them, and read along the
diagonals of every block; its gradient is summed along them before it goes into the table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_fuse.kernels.score_program import FRACTIONAL, Block, ScoreProgram, Tree, nodes


@dataclass(frozen=True, eq=False)
class Diagonals:
    """A score program whose node ["diagonal", first + n] stands for trees[n], which is a function of j - i."""

    program: ScoreProgram
    trees: tuple[Tree, ...]
    first: int


def diagonals(text: str, shapes: Sequence[Sequence[int]]) -> Diagonals:
    """Those worth it in the program that `text` is, given the shapes of its inputs: lookups and transcendentals."""
    return _diagonals(text, tuple(tuple(n != 1 for n in shape[2:4]) for shape in shapes))


@functools.cache
def _diagonals(text: str, varies: tuple[tuple[bool, ...], ...]) -> Diagonals:
    program = ScoreProgram.loads(text)
    numbers: dict[int, int] = {}
    trees: list[Tree] = []

    def rewritten(tree: Tree) -> Tree:
        alone = _of_difference(tree, varies)

        def replaced(node: Tree) -> Tree:
            if id(node) in alone and _is_costly(node):
                if id(node) not in numbers:
                    numbers[id(node)] = len(trees)
                    trees.append(node)
                return ("diagonal", len(varies) + numbers[id(node)])
            return tuple(replaced(part) if isinstance(part, tuple) else part for part in node)

        return replaced(tree)

    score = rewritten(program.score)
    factor = None if program.factor is None else rewritten(program.factor)
    if trees:
        program = dataclasses.replace(program, score=score, factor=factor)
    return Diagonals(program, tuple(trees), len(varies))


def differences(q_len: int, kv_len: int, batch: int, heads: int, device: torch.device, dtype: torch.dtype) -> Block:
    """The block on which a tree that depends on j - i has each of its values once: query 0, keys from 1 - q_len."""
    return Block(batch, heads, (0, 1), (1 - q_len, kv_len), device, dtype)


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
