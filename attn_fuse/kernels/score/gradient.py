"""The gradient of a score program on one block, by reverse accumulation over its tree.

Autograd is not used because it records nothing in an operator that is called from below it, as compiled graphs that
hold a backward do, and the gradient would be 0 without a word. The rules are autograd's, ties and all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from attn_fuse.kernels.score.program import Block, Memo, Tree, as_tensors, nodes
from attn_fuse.torch_internals import CLAMP_PASSES_AT_ITS_EDGE

# (gradient, result, operands...) -> gradient of the operand. Where there is none, as of floor, no name.
Rule = Callable[..., Tensor]

_LN2, _LN10, _ERF = math.log(2), math.log(10), 2 / math.sqrt(math.pi)

_UNARY: Mapping[str, Rule] = {
    "neg": lambda g, y, x: -g,
    "abs": lambda g, y, x: g * x.sign(),
    "square": lambda g, y, x: g * 2 * x,
    "frac": lambda g, y, x: g,
    "relu": lambda g, y, x: g.masked_fill(x <= 0, 0.0),
    "exp": lambda g, y, x: g * y,
    "exp2": lambda g, y, x: g * y * _LN2,
    "expm1": lambda g, y, x: g * (y + 1),
    "log": lambda g, y, x: g / x,
    "log2": lambda g, y, x: g / (x * _LN2),
    "log10": lambda g, y, x: g / (x * _LN10),
    "log1p": lambda g, y, x: g / (x + 1),
    "sqrt": lambda g, y, x: g / (2 * y),
    "rsqrt": lambda g, y, x: g * -0.5 * y**3,
    "reciprocal": lambda g, y, x: -g * y * y,
    "sin": lambda g, y, x: g * x.cos(),
    "cos": lambda g, y, x: g * -x.sin(),
    "tan": lambda g, y, x: g * (1 + y * y),
    "asin": lambda g, y, x: g * (1 - x * x).rsqrt(),
    "acos": lambda g, y, x: g * -(1 - x * x).rsqrt(),
    "atan": lambda g, y, x: g / (x * x + 1),
    "sinh": lambda g, y, x: g * x.cosh(),
    "cosh": lambda g, y, x: g * x.sinh(),
    "tanh": lambda g, y, x: g * (1 - y * y),
    "asinh": lambda g, y, x: g * (x * x + 1).rsqrt(),
    "acosh": lambda g, y, x: g * (x * x - 1).rsqrt(),
    "atanh": lambda g, y, x: g / (1 - x * x),
    "erf": lambda g, y, x: g * _ERF * (-x * x).exp(),
    "erfc": lambda g, y, x: g * -_ERF * (-x * x).exp(),
    "sigmoid": lambda g, y, x: g * y * (1 - y),
    "silu": lambda g, y, x: g * x.sigmoid() * (1 + x * (1 - x.sigmoid())),
    "gelu": lambda g, y, x: g * (0.5 * torch.erfc(-x / math.sqrt(2)) + x * (-x * x / 2).exp() / math.sqrt(2 * math.pi)),
    "softplus": lambda g, y, x: g * x.sigmoid(),
    "log_sigmoid": lambda g, y, x: g * (-x).sigmoid(),
    "mish": lambda g, y, x: g * (_mish_gate(x) + x * x.sigmoid() * (1 - _mish_gate(x) ** 2)),
}

_BINARY: Mapping[str, tuple[Rule | None, Rule | None]] = {
    "add": (lambda g, y, a, b: g, lambda g, y, a, b: g),
    "sub": (lambda g, y, a, b: g, lambda g, y, a, b: -g),
    "mul": (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a),
    "div": (lambda g, y, a, b: g / b, lambda g, y, a, b: -g * y / b),
    # As of a clamp: where both are equal one has all of it. `operations` writes torch's maximum out of these.
    "maximum": (
        lambda g, y, a, b: torch.where(_leads(a, b), g, 0.0),
        lambda g, y, a, b: torch.where(_leads(a, b), 0.0, g),
    ),
    "minimum": (
        lambda g, y, a, b: torch.where(_leads(b, a), g, 0.0),
        lambda g, y, a, b: torch.where(_leads(b, a), 0.0, g),
    ),
    "pow": (
        lambda g, y, a, b: torch.where(b == 0, 0.0, g * b * a.pow(b - 1)),
        lambda g, y, a, b: torch.where((a == 0) & (b >= 0), 0.0, g * y * a.to(y.dtype).log()),
    ),
    "fmod": (lambda g, y, a, b: g, lambda g, y, a, b: -g * (a / b).trunc()),
    "remainder": (lambda g, y, a, b: g, lambda g, y, a, b: -g * (a / b).floor()),
    "mod": (lambda g, y, a, b: g, lambda g, y, a, b: -g * (a / b).floor()),
    "atan2": (lambda g, y, a, b: g * b * _per_square(a, b), lambda g, y, a, b: g * -a * _per_square(a, b)),
}

_RULES: Mapping[str, tuple[Rule | None, ...]] = {
    **{name: (rule,) for name, rule in _UNARY.items()},
    **_BINARY,
    "where": (
        None,
        lambda g, y, c, a, b: torch.where(c.bool(), g, 0.0),
        lambda g, y, c, a, b: torch.where(c.bool(), 0.0, g),
    ),
}


def differentiable(trees: Iterable[Tree], sources: Iterable[Tree]) -> list[Tree]:
    """The nodes through which `trees` depend on `sources` differentiably, children first."""
    found = {id(node): node for node in sources}
    starts = set(found)
    order: dict[int, Tree] = {}
    for node in (node for tree in trees for node in nodes(tree)):
        if id(node) in starts or any(id(child) in found for child, _ in paths(node)):
            found[id(node)] = order[id(node)] = node
    return list(order.values())


def needed(path: Iterable[Tree]) -> set[int]:
    """The nodes, by identity, whose values `gradients` reads: `evaluate` is to keep them."""
    return {id(part) for node in path for part in (node, *node[1:]) if isinstance(part, tuple)}


def gradients(
    path: Sequence[Tree],
    sources: Iterable[Tree],
    given: Iterable[tuple[Tree, Tensor]],
    numbers: Sequence[int],
    block: Block,
    memo: Memo,
) -> dict[int, Tensor]:
    """The gradients of `sources`, by identity, each as large as what the source gives; of none that is not reached.

    path: what `differentiable` gave. given: the gradient of each tree. memo: holds the values of what is `needed`.
    """
    found: dict[int, Tensor] = {}
    leaves = {id(node) for node in sources}
    on_path = {id(node) for node in path}

    def add(node: Tree, gradient: Tensor) -> None:
        value = memo[id(node)] if id(node) in on_path else None
        if value is not None:
            gradient = gradient.sum_to_size(value.shape).to(value.dtype)
            found[id(node)] = found[id(node)] + gradient if id(node) in found else gradient

    for tree, gradient in given:
        add(tree, gradient)
    for node in reversed(path):
        if id(node) in leaves or id(node) not in found:
            continue
        gradient, result = found.pop(id(node)), memo[id(node)]
        operands = as_tensors([_value(part, numbers, memo) for part in node[1:] if isinstance(part, tuple)], block)
        for child, rule in paths(node):
            if id(child) in on_path:
                add(child, rule(gradient, result, *operands))
    return found


def paths(node: Tree) -> list[tuple[Tree, Rule]]:
    """The operands that have a gradient, and how it is had."""
    if node[0] == "cast":
        floating = getattr(torch, node[1]).is_floating_point
        return [(node[2], lambda g, y, x: g)] if floating else []
    rules = _RULES.get(node[0], ())
    return [(child, rule) for child, rule in zip(node[1:], rules, strict=False) if rule is not None]


def _value(node: Tree, numbers: Sequence[int], memo: Memo) -> object:
    known = memo.get(id(node))
    if known is not None:
        return known
    return node[1] if node[0] == "const" else int(numbers[node[1]])


def _leads(greater: Tensor, other: Tensor) -> Tensor:
    """Whether the gradient is the first operand's: torch 2.15 has made a clamp's edge belong to its bound."""
    return greater >= other if CLAMP_PASSES_AT_ITS_EDGE else greater > other


def _per_square(a: Tensor, b: Tensor) -> Tensor:
    square = a * a + b * b
    return torch.where(square == 0, 0.0, 1 / square)


def _mish_gate(x: Tensor) -> Tensor:
    return torch.nn.functional.softplus(x).tanh()
