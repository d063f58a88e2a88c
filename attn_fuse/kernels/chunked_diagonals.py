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
import torch.nn.functional as F
from torch import Tensor

from attn_fuse.kernels.score_program import FRACTIONAL, Block, ScoreProgram, Tree, nodes


@dataclass(frozen=True, eq=False)
class Diagonals:
    """A score program whose input number `first` + n stands for trees[n], which is a function of j - i."""

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
                return ("input", len(varies) + numbers[id(node)])
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


def summed_along_diagonals(block: Tensor) -> Tensor:
    """[.., rows, columns] to the sums over equal (column - row), ascending: [.., 1, rows + columns - 1]."""
    rows, columns = block.shape[-2:]
    if rows % _ROWS_AT_ONCE or rows == _ROWS_AT_ONCE:
        return _skewed_sum(block)
    strips = _skewed_sum(block.unflatten(-2, (rows // _ROWS_AT_ONCE, _ROWS_AT_ONCE))).squeeze(-2)
    total = block.new_zeros(*block.shape[:-2], 1, rows + columns - 1)
    for number, strip in enumerate(strips.unbind(-2), 1):
        total.narrow(-1, rows - number * _ROWS_AT_ONCE, strip.shape[-1]).add_(strip.unsqueeze(-2))
    return total


def _skewed_sum(block: Tensor) -> Tensor:
    rows, columns = block.shape[-2:]
    # Read as rows longer by one than they are, each row is shifted against the one before it.
    padded = F.pad(block, (rows - 1, 0, 0, 1)).flatten(-2)[..., : rows * (rows + columns)]
    return padded.unflatten(-1, (rows, rows + columns)).sum(-2, keepdim=True)[..., :-1]


# What is padded for the skew is as wide as they are many.
_ROWS_AT_ONCE = 32


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
