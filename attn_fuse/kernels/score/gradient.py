"""Gradient: reverse mode for a score program, with the rules of `expression.functions`.

Autograd would silently give 0: it records nothing in an operator that is called from below it, as compiled graphs with
a backward call ours. The rules are autograd's, also at ties.

One walk has two uses: `gradients` computes on a block, `gradient_exprs` gives expressions to generate code from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from attn_fuse.expression.functions import FUNCTIONS, Rule
from attn_fuse.expression.nodes import (
    Cast,
    Const,
    Expr,
    Gather,
    Given,
    Input,
    Number,
    Select,
    children,
    distinct,
    name_of,
)
from attn_fuse.kernels.score.program import Block, Memo, accumulate, as_tensors, evaluate, gathered

T = TypeVar("T")


def differentiable(exprs: Iterable[Expr], sources: Iterable[Expr]) -> list[Expr]:
    """The nodes of `exprs` that are among `sources` or depend differentiably on one, children first."""
    found = {id(node): node for node in sources}
    starts = set(found)
    order: dict[int, Expr] = {}
    for node in (node for expr in exprs for node in distinct(expr)):
        if id(node) in starts or any(id(child) in found for child, _ in _paths(node)):
            found[id(node)] = order[id(node)] = node
    return list(order.values())


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
    """The gradients of `sources`, by identity, in the shape and dtype of their values; a source out of reach has none.

    path: what `differentiable` gave. given: expressions, each with its gradient. memo: the values of `needed` nodes.
    """

    def fitted(node: Expr, gradient: Tensor) -> Tensor | None:
        value = memo[id(node)]
        return None if value is None else gradient.sum_to_size(value.shape).to(value.dtype)

    def through(node: Expr, rule: Rule, gradient: Tensor) -> Tensor:
        operands = as_tensors([_value(part, numbers, memo) for part in children(node)], block)
        holders, expr = _rule_of(rule, len(operands))
        values = dict(zip(map(id, holders), (gradient, memo[id(node)], *operands), strict=True))
        return evaluate(expr, None, (), (), block, values)

    return _backwards(path, sources, given, fitted, through, lambda a, b: a + b)


def pull_back(
    expr: Expr,
    gradient: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    block: Block,
    sums: Mapping[int, Tensor],
) -> None:
    """Add the gradients of the inputs that `expr`, which reads no score, reads on a block to `sums`, by their indices.

    gradient: that of `expr`.
    """
    sources = [node for node in distinct(expr) if isinstance(node, (Input, Gather)) and node.leaf in sums]
    path = differentiable([expr], sources)
    memo: Memo = dict.fromkeys(needed(path))
    evaluate(expr, None, inputs, numbers, block, memo)
    found = gradients(path, sources, [(expr, gradient)], numbers, block, memo)
    for node in sources:
        if id(node) in found:
            indices = gathered(node, inputs, numbers, block, memo)
            accumulate(node, found[id(node)], sums[node.leaf], indices, block)


def gradient_exprs(given: Sequence[tuple[Expr, Expr]], sources: Iterable[Expr]) -> dict[int, Expr]:
    """The gradients of `sources`, by identity, as expressions for one score; a source out of reach has none.

    given: expressions, each with its gradient. The caller sums over the scores that share an element of a source.
    """

    def through(node: Expr, rule: Rule, gradient: Expr) -> Expr:
        return gradient if _hides(node) else rule(gradient, node, *children(node))

    path = differentiable([expr for expr, _ in given], sources)
    return _backwards(path, sources, given, lambda node, gradient: gradient, through, lambda a, b: a + b)


def _backwards(
    path: Sequence[Expr],
    sources: Iterable[Expr],
    given: Iterable[tuple[Expr, T]],
    fitted: Callable[[Expr, T], T | None],
    through: Callable[[Expr, Rule, T], T],
    added: Callable[[T, T], T],
) -> dict[int, T]:
    """The gradients of `sources` by identity, carried from `given` back along `path`.

    fitted: a gradient in the size of its node's value; None drops it. through: takes a gradient through a node.
    """
    found: dict[int, T] = {}
    leaves, on_path = {id(node) for node in sources}, {id(node) for node in path}

    def add(node: Expr, gradient: T) -> None:
        if id(node) in on_path and (fits := fitted(node, gradient)) is not None:
            found[id(node)] = added(found[id(node)], fits) if id(node) in found else fits

    for expr, gradient in given:
        add(expr, gradient)
    for node in reversed(path):
        if id(node) in leaves or id(node) not in found:
            continue
        gradient = found.pop(id(node))
        for child, rule in _paths(node):
            if id(child) in on_path:
                add(child, through(node, rule, gradient))
    return {leaf: gradient for leaf, gradient in found.items() if leaf in leaves}


def _paths(node: Expr) -> list[tuple[Expr, Rule]]:
    """The operands that have a gradient, each with its rule."""
    match node:
        case Cast(dtype, x):
            return [(x, _pass_on)] if dtype.is_floating_point else []
        case Select(_, a, b):
            return [(a, _where_held), (b, _where_not)]
    row = FUNCTIONS.get(name_of(node))
    rules = () if row is None else row.gradients
    return (
        [(child, rule) for child, rule in zip(children(node), rules, strict=True) if rule is not None] if rules else []
    )


def _pass_on(g: Expr, y: Expr, x: Expr) -> Expr:
    return g


def _where_held(g: Expr, y: Expr, condition: Expr, a: Expr, b: Expr) -> Expr:
    return Select(condition, g, Const(0.0))


def _where_not(g: Expr, y: Expr, condition: Expr, a: Expr, b: Expr) -> Expr:
    return Select(condition, Const(0.0), g)


@functools.cache
def _rule_of(rule: Rule, operands: int) -> tuple[tuple[Given, ...], Expr]:
    """Placeholders for gradient, result and operands, and what `rule` gives for them."""
    holders = tuple(map(Given, range(2 + operands)))
    return holders, rule(*holders)


def _hides(node: Expr) -> bool:
    """Whether `node` selects between a part and -inf, which makes the weight, and so the incoming gradient, 0."""
    return isinstance(node, Select) and any(part == Const(-math.inf) for part in (node.a, node.b))


def _value(node: Expr, numbers: Sequence[int], memo: Memo) -> object:
    known = memo.get(id(node))
    if known is not None:
        return known
    match node:
        case Const(value):
            return value
        case Number(n):
            return int(numbers[n])
    raise AssertionError("the values of all other operands are kept")
