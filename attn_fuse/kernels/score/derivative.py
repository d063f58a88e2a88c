"""The derivative of a score program as more trees of the same language, by the rules of `score_gradient`.

The rules are written for tensors. Here they are run on stand-ins that write down what is done to them, so that a kernel
differentiates by the very rules that `chunked` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from attn_fuse.kernels.score.gradient import differentiable, paths
from attn_fuse.kernels.score.program import UNARY, Tree


class Trees:
    """Makes nodes, equal ones as one object. The gradient that a tree is given is the node ["given", n]."""

    def __init__(self) -> None:
        self._known: dict[Any, Tree] = {}

    def node(self, name: str, *parts: Any) -> Tree:
        key = (name, *(id(part) if isinstance(part, tuple) else repr(part) for part in parts))
        return self._known.setdefault(key, (name, *parts))


def gradient_trees(trees: Trees, given: Sequence[tuple[Tree, Tree]], sources: Iterable[Tree]) -> dict[int, Tree]:
    """The gradient of each of `sources`, by identity, element by element; of none that is not reached.

    given: trees, each with its gradient. What an element of a source broadcasts to is for the caller to add up.
    """
    leaves = {id(node) for node in sources}
    path = differentiable([tree for tree, _ in given], sources)
    on_path = {id(node) for node in path}
    found: dict[int, Tree] = {}

    def add(node: Tree, gradient: Tree) -> None:
        if id(node) in on_path:
            found[id(node)] = trees.node("add", found[id(node)], gradient) if id(node) in found else gradient

    for tree, gradient in given:
        add(tree, gradient)
    for node in reversed(path):
        if id(node) in leaves or id(node) not in found:
            continue
        incoming = found.pop(id(node))
        given_to_rule: list[Any] = [_Written(trees, tree) for tree in (incoming, node)]
        given_to_rule += [_Written(trees, part) for part in node[1:] if isinstance(part, tuple)]
        for child, rule in paths(node):
            if id(child) in on_path:
                written: Any = rule(*given_to_rule)
                add(child, incoming if _hides(node) else written.tree)
    return {leaf: tree for leaf, tree in found.items() if leaf in leaves}


def _hides(node: Tree) -> bool:
    """Whether it takes a part or gives -inf. There the weight is 0, and so is the gradient that comes in already."""
    return node[0] == "where" and any(part[0] == "const" and part[1] == -math.inf for part in node[2:])


class _Written:
    """Takes a tensor's place in a rule and writes down what is done to it."""

    dtype = None

    def __init__(self, trees: Trees, tree: Tree) -> None:
        self._trees = trees
        self.tree = tree

    def _made(self, name: str, *operands: Any) -> _Written:
        parts = [x.tree if isinstance(x, _Written) else self._trees.node("const", x) for x in operands]
        return _Written(self._trees, self._trees.node(name, *parts))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> _Written:
        some = next(x for x in args if isinstance(x, cls))
        return some._made(_FUNCTIONS[func], *args)

    def __getattr__(self, name: str) -> Callable[[], _Written]:
        if name not in UNARY:
            raise AttributeError(name)
        return lambda: self._made(name, self)

    def bool(self) -> _Written:
        return self

    def to(self, dtype: object) -> _Written:
        return self

    def pow(self, exponent: Any) -> _Written:
        return self._made("pow", self, exponent)

    def masked_fill(self, where: _Written, value: float) -> _Written:
        return self._made("where", where, value, self)

    def __neg__(self) -> _Written:
        return self._made("neg", self)


_FUNCTIONS: Mapping[Any, str] = {torch.where: "where", torch.erfc: "erfc", F.softplus: "softplus"}
_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow", "and": "and",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq",
}  # fmt: skip


def _operator(name: str) -> tuple[Callable[..., _Written], Callable[..., _Written]]:
    return lambda a, b: a._made(name, a, b), lambda a, b: a._made(name, b, a)


for _symbol, _name in _OPERATORS.items():
    _forward, _reflected = _operator(_name)
    setattr(_Written, f"__{_symbol}__", _forward)
    if _symbol not in ("lt", "le", "gt", "ge", "eq"):
        setattr(_Written, f"__r{_symbol}__", _reflected)
