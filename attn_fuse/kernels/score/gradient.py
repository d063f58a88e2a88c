"""Reverse mode for score programs, with the gradient rules of `expression.functions`, which are autograd's at ties too.

Autograd itself records nothing within our operators, since compiled graphs call them below it; its gradients would
silently be 0. `gradients` computes on a block, and `gradient_exprs` gives expressions to generate code from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import FUNCTIONS, Rule
from attn_fuse.expression.nodes import Expr, children, distinct
from attn_fuse.kernels.score.program import Block, Memo, accumulate, as_tensors, evaluate, gathered

T = TypeVar("T", Tensor, Expr)


def differentiable(exprs: Iterable[Expr], sources: Iterable[Expr]) -> list[Expr]:
    """The nodes of `exprs` that are among `sources` or depend differentiably on one, children first."""
    starts = {id(node) for node in sources}
    order: dict[int, Expr] = {}
    for node in (node for expr in exprs for node in distinct(expr)):
        if id(node) in starts or any(id(child) in starts or id(child) in order for child, _ in _paths(node)):
            order[id(node)] = node
    return list(order.values())


def reads(expr: Expr, wanted: Container[int]) -> list[ex.Input | ex.Gather]:
    """The nodes of `expr` that read an input whose number is in `wanted`."""
    return [node for node in distinct(expr) if isinstance(node, (ex.Input, ex.Gather)) and node.leaf in wanted]


def needed(path: Iterable[Expr]) -> set[int]:
    """The nodes, by identity, whose values `gradients` reads along `path`, so that `evaluate` can keep them."""
    return {id(part) for node in path for part in (node, *children(node))}


def gradients(
    path: Sequence[Expr],
    sources: Iterable[Expr],
    given: Iterable[tuple[Expr, Tensor]],
    numbers: Sequence[int],
    block: Block,
    memo: Memo,
) -> dict[int, Tensor]:
    """The gradients of `sources`, by identity, in the shape and dtype of their values; unreachable sources have none.

    path: the result of `differentiable`. given: expressions and their gradients. memo: the values of `needed` nodes.
    """

    def fitted(node: Expr, gradient: Tensor) -> Tensor | None:
        value = memo[id(node)]
        return None if value is None else gradient.sum_to_size(value.shape).to(value.dtype)

    def through(node: Expr, rule: Rule, gradient: Tensor) -> Tensor:
        operands = as_tensors([_value(part, numbers, memo) for part in children(node)], block)
        holders, expr = _rule_of(rule, len(operands))
        values = dict(zip(map(id, holders), (gradient, memo[id(node)], *operands), strict=True))
        return evaluate(expr, None, (), (), block, values)

    return _backwards(path, sources, given, fitted, through)


def pull_back(
    expr: Expr,
    gradient: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    block: Block,
    sums: Mapping[int, Tensor],
) -> None:
    """Add to `sums` the gradients of the inputs that `expr` reads on a block, given its own. `expr` reads no score.

    sums: for each input that needs a gradient, by its number, the gradient of the whole input.
    """
    sources = reads(expr, sums)
    path = differentiable([expr], sources)
    memo: Memo = dict.fromkeys(needed(path))
    evaluate(expr, None, inputs, numbers, block, memo)
    found = gradients(path, sources, [(expr, gradient)], numbers, block, memo)
    for node in sources:
        if id(node) in found:
            indices = gathered(node, inputs, numbers, block, memo)
            accumulate(node, found[id(node)], sums[node.leaf], indices, block)


def gradient_exprs(given: Sequence[tuple[Expr, Expr]], sources: Iterable[Expr]) -> dict[int, Expr]:
    """The gradients of `sources`, by identity, as expressions for one score; unreachable sources have none.

    given: expressions and their gradients. The caller sums over the scores that share an element of a source.
    """

    def through(node: Expr, rule: Rule, gradient: Expr) -> Expr:
        # The weight of a score that is -inf is 0, and so is the gradient that comes in.
        hides = isinstance(node, ex.Select) and ex.Const(-math.inf) in (node.a, node.b)
        return gradient if hides else rule(gradient, node, *children(node))

    path = differentiable([expr for expr, _ in given], sources)
    return _backwards(path, sources, given, lambda node, gradient: gradient, through)


def _backwards(
    path: Sequence[Expr],
    sources: Iterable[Expr],
    given: Iterable[tuple[Expr, T]],
    fitted: Callable[[Expr, T], T | None],
    through: Callable[[Expr, Rule, T], T],
) -> dict[int, T]:
    """The gradients of `sources` by identity, carried from `given` back along `path`.

    fitted: a gradient in the size of its node's value; None drops it. through: takes a gradient through a node.
    """
    found: dict[int, T] = {}
    leaves, on_path = {id(node) for node in sources}, {id(node) for node in path}

    def add(node: Expr, gradient: T) -> None:
        if id(node) in on_path and (fits := fitted(node, gradient)) is not None:
            found[id(node)] = found[id(node)] + fits if id(node) in found else fits

    for expr, gradient in given:
        add(expr, gradient)
    for node in reversed(path):
        if id(node) not in leaves and id(node) in found:
            gradient = found.pop(id(node))
            for child, rule in _paths(node):
                if id(child) in on_path:
                    add(child, through(node, rule, gradient))
    return {leaf: gradient for leaf, gradient in found.items() if leaf in leaves}


def _paths(node: Expr) -> list[tuple[Expr, Rule]]:
    """The operands that have a gradient, each with its rule."""
    if isinstance(node, ex.Cast) and not node.dtype.is_floating_point:
        return []
    rules = _RULES.get(ex.name_of(node), ())
    return [(child, rule) for child, rule in zip(children(node), rules, strict=False) if rule is not None]


_RULES: dict[str, tuple[Rule | None, ...]] = {name: row.gradients for name, row in FUNCTIONS.items()} | {
    "cast": (lambda g, y, x: g,),
    "where": (
        None,
        lambda g, y, condition, a, b: ex.Select(condition, g, ex.Const(0.0)),
        lambda g, y, condition, a, b: ex.Select(condition, ex.Const(0.0), g),
    ),
}


@functools.cache
def _rule_of(rule: Rule, operands: int) -> tuple[tuple[ex.Given, ...], Expr]:
    """Placeholders for gradient, result and operands, and the result of `rule` for them."""
    holders = tuple(map(ex.Given, range(2 + operands)))
    return holders, rule(*holders)


def _value(node: Expr, numbers: Sequence[int], memo: Memo) -> object:
    known = memo.get(id(node))
    if known is not None:
        return known
    match node:
        case ex.Const(value):
            return value
        case ex.Number(n):
            return int(numbers[n])
    raise AssertionError("the values of all other operands are kept")
