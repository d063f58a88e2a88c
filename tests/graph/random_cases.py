"""Score programs drawn at random, beside the same computed densely by torch's own operations on whole tensors.

They read tables at positions that are computed (differences, logarithms of them, segments, other tables), as relative
position biases do, in whole numbers of several widths and over every broadcast.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.score.program import ScoreProgram
from tests.graph.chunked_cases import Case, S, Sizes, const
from tests.grid.features import At

Tree = list[Any]

# A whole number times one of these, after a logarithm, is never about whole itself: roundings choose no other bucket.
_STEEPNESS = (1.37, 2.11, 0.83)
_TABLE = 9
_DEPTH = 3


def random_case(seed: int) -> Case:
    """Equal for equal seeds."""
    draw = _Draw(random.Random(seed))
    tree = draw.score()
    kinds = tuple(draw.inputs)

    def inputs(s: Sizes) -> list[Tensor]:
        return [_tensor(*kind, s) for kind in kinds]

    def dense(scores: Tensor, at: At, *tensors: Tensor) -> Tensor:
        return _dense(tree, scores, at, tensors)

    return Case(f"random {seed}", ScoreProgram(tree), dense, inputs)


class _Draw:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.inputs: list[tuple[str, tuple[str, ...]]] = []
        self.wholes: list[Tree] = []

    def score(self) -> Tree:
        """At least one table is looked up, and the score is among the terms."""
        terms = [["mul", S, const(0.3)], self.lookup(), *(self.number(_DEPTH) for _ in range(self.rng.randrange(2)))]
        self.rng.shuffle(terms)
        tree = terms[0]
        for term in terms[1:]:
            tree = ["add", tree, term]
        if self.rng.random() < 0.3:
            tree = ["tanh", tree]
        return ["where", self.condition(1), tree, const(-4.0)] if self.rng.random() < 0.3 else tree

    def number(self, depth: int) -> Tree:
        """A fraction, with a gradient where it reads one."""
        kind = self.rng.choice(["lookup", "input", "where", "mul", "tanh", "log", "score"]) if depth else "input"
        match kind:
            case "lookup":
                return self.lookup()
            case "where":
                return ["where", self.condition(depth - 1), self.number(depth - 1), self.number(depth - 1)]
            case "mul":
                return ["mul", self.number(depth - 1), self.number(depth - 1)]
            case "tanh":
                return ["tanh", self.number(depth - 1)]
            case "log":
                return ["log1p", ["cast", "float32", ["abs", self.whole(depth - 1)]]]
            case "score":
                return ["mul", S, self.input("float", self.spread())]
        return self.input("float", self.spread())

    def lookup(self) -> Tree:
        dims = self.rng.randint(1, 3)
        positions = [self.index() for _ in range(dims)]
        if self.rng.random() < 0.5:
            positions[self.rng.randrange(dims)] = ["minimum", ["h"], const(_TABLE - 1)]
        return self.table("float", positions)

    def index(self) -> Tree:
        """Within a table, often wrapped around."""
        whole = self.whole(_DEPTH)
        if self.rng.random() < 0.5:
            return ["remainder", whole, const(_TABLE)]
        return ["minimum", ["maximum", whole, const(0)], const(_TABLE - 1)]

    def whole(self, depth: int) -> Tree:
        """A whole number below a few hundred; sometimes one that stands elsewhere, too."""
        if self.wholes and self.rng.random() < 0.2:
            return self.rng.choice(self.wholes)
        self.wholes.append(self._whole(depth))
        return self.wholes[-1]

    def _whole(self, depth: int) -> Tree:
        kinds = ["difference", "difference", "input", "position"]
        deeper = ["log", "where", "add", "floor_divide", "narrow", "table", "floor", "less"]
        match self.rng.choice(kinds + deeper * 2 if depth else kinds):
            case "difference":
                return self.rng.choice([["sub", ["j"], ["i"]], ["sub", ["i"], ["j"]]])
            case "position":
                return [self.rng.choice("ijbh")]
            case "log":
                distance = ["add", ["abs", self.whole(depth - 1)], const(1)]
                steep = ["mul", ["log", ["cast", "float32", distance]], const(self.rng.choice(_STEEPNESS))]
                return ["cast", self.rng.choice(["int32", "int64"]), steep]
            case "floor":
                half = ["mul", ["cast", "float32", self.whole(depth - 1)], const(0.5)]
                return ["cast", "int64", ["floor", half]]
            case "where":
                return ["where", self.condition(depth - 1), self.whole(depth - 1), self.whole(depth - 1)]
            case "add":
                return [self.rng.choice(["add", "sub"]), self.whole(depth - 1), self.whole(depth - 1)]
            case "less":
                return [self.rng.choice(["minimum", "maximum"]), self.whole(depth - 1), const(self.rng.randint(-4, 4))]
            case "floor_divide":
                return ["floor_divide", self.whole(depth - 1), const(self.rng.randint(2, 5))]
            case "narrow":
                return ["cast", "int32", self.whole(depth - 1)]
            case "table":
                return self.table(
                    self.rng.choice(["int32", "int64"]), [["remainder", self.whole(depth - 1), const(_TABLE)]]
                )
        return self.input(self.rng.choice(["int32", "int64"]), self.spread())

    def condition(self, depth: int) -> Tree:
        if self.rng.random() < 0.3:
            rows, columns = (self.input("segments", along) for along in (("b", "i"), ("b", "j")))
            return [self.rng.choice(["eq", "ne"]), rows, columns]
        return [self.rng.choice(["lt", "ge", "eq"]), self.whole(depth), const(self.rng.randint(-3, 9))]

    def spread(self) -> tuple[str, ...]:
        return tuple(name for name in "bhij" if self.rng.random() < 0.5)

    def input(self, kind: str, along: tuple[str, ...]) -> Tree:
        self.inputs.append((kind, along))
        return ["input", len(self.inputs) - 1]

    def table(self, kind: str, positions: list[Tree]) -> Tree:
        self.inputs.append((kind, ("table",) * len(positions)))
        return ["gather", len(self.inputs) - 1, *positions]


def _tensor(kind: str, along: tuple[str, ...], s: Sizes) -> Tensor:
    sizes = {"b": s.batch, "h": s.heads, "i": s.q_len, "j": s.kv_len}
    shape = [_TABLE] * len(along) if "table" in along else [sizes[n] if n in along else 1 for n in "bhij"]
    match kind:
        case "float":
            return torch.randn(shape)
        case "segments":
            return torch.randint(0, 2, shape, dtype=torch.int32)
    return torch.randint(-5, 12, shape, dtype=getattr(torch, kind))


def _dense(tree: Tree, scores: Tensor, at: At, tensors: tuple[Tensor, ...]) -> Any:
    """By plain torch: a table is read with one index for each score, and autograd finds the gradients."""
    name, *parts = tree
    match name:
        case "score":
            return scores
        case "const":
            return parts[0]
        case "b" | "h" | "i" | "j":
            return getattr(at, name).expand(scores.shape)
        case "input":
            return tensors[parts[0]].expand(scores.shape)
    operands = [_dense(part, scores, at, tensors) for part in parts if isinstance(part, list)]
    match name:
        case "gather":
            return tensors[parts[0]][tuple(x.long() for x in operands)]
        case "cast":
            return operands[0].to(getattr(torch, parts[0]))
        case "where":
            return torch.where(*operands)
        case "floor_divide" | "remainder":
            return (torch.floor_divide if name == "floor_divide" else torch.remainder)(*operands)
        case "minimum" | "maximum":
            x, bound = operands
            return x.clamp(max=bound) if name == "minimum" else x.clamp(min=bound)
    return getattr(torch, name)(*operands)
