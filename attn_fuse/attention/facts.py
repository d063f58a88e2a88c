"""Facts: what kernels and the picker need to know about an attention besides its mathematics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from attn_fuse.attention.attention import Attention
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.nodes import Expr
from attn_fuse.expression.ranges import least, stays_within

# Beyond this score a float32 lse loses the log of the number of keys.
_ORDINARY = 1e6


@dataclass(frozen=True)
class Facts:
    """Where and on what an attention runs. Symbolic sizes have their value on the first call.

    dtype: in which a kernel receives query, key and value. symbolic: the names of the symbolic sizes.
    training: whether anything that the attention reads needs a gradient. bias_needs_grad: whether a bias does.
    bias_may_hide: whether a bias, or a term or fill in `score_mod`, could lower all scores of a query by much, as a
        padding mask does.
    bias_may_be_infinite: whether the biases or `score_mod` could make all scores of a query minus infinity.
    bias_dtype: the widest floating-point dtype of the tensors that the biases read; None without one.
    weights_used: whether the program also uses the scores or weights elsewhere, which computes them anyway.
    compiled: whether Inductor compiles the rewritten graph.
    checkpointed: whether the attention is in a subgraph, such as a checkpoint's, of a graph that `is_frozen`.
    nan_read: the operation, in words, that can tell a NaN in the output from 0; "" for none.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    symbolic: frozenset[str]
    training: bool
    bias_needs_grad: bool
    bias_may_hide: bool
    bias_dtype: torch.dtype | None
    weights_used: bool = False
    compiled: bool = True
    checkpointed: bool = False
    bias_may_be_infinite: bool = False
    nan_read: str = ""

    @property
    def score_bytes(self) -> int:
        """The bytes of the score matrix [batch, heads, q_len, kv_len] in `dtype`."""
        return self.batch * self.heads * self.q_len * self.kv_len * self.dtype.itemsize


def may_be_nan(attention: Attention, facts: Facts) -> bool:
    """Whether there may be a fully masked row that is NaN as written."""
    rows = attention.mask.empty_rows
    return rows == "nan" or (rows != "zero" and facts.bias_may_be_infinite)


def is_learned(value: object) -> bool:
    """Whether `value` is a parameter in training, assumed to lie in [-100, 100]."""
    return isinstance(value, torch.nn.Parameter) and value.requires_grad


def facts_of(attention: Attention, leaves: Sequence[object]) -> Facts:
    """The facts that follow from `attention` and the `leaves` that it reads, fake tensors and numbers."""

    def read(*expressions: Expr | None) -> list[torch.Tensor]:
        parts = (part for x in expressions if x is not None for part in ex.walk(x))
        numbers = {part.leaf for part in parts if isinstance(part, (ex.Load, ex.Gather, ex.Scalar))}
        return [leaf for n in sorted(numbers) if isinstance(leaf := leaves[n], torch.Tensor)]

    axes = attention.axes
    sizes = {
        "batch": attention.length(attention.axes.batch),
        "heads": attention.length(attention.head_axes),
        "kv_heads": attention.length(attention.axes.kv_heads),
        "q_len": attention.length(axes.query),
        "kv_len": attention.length(axes.key),
        "head_dim": attention.length(axes.inner),
        "value_dim": attention.length(axes.value),
    }
    operands = read(attention.query, attention.key, attention.value, attention.scale)
    added = read(*attention.biases)
    others = read(attention.score, attention.sink, attention.factor, attention.out_scale)
    learned = {n for n, leaf in enumerate(leaves) if is_learned(leaf)}
    dtype = kernel_dtype(attention)
    limit = min(_ORDINARY, torch.finfo(dtype).max / 4)
    lowest = least(sum(attention.biases, ex.Const(0.0)), attention.space, learned)
    wanting = torch.is_grad_enabled()
    widths = [t.dtype for t in added if t.dtype.is_floating_point]
    first: dict[str, Any] = {name: _on_first_call(size, leaves) for name, size in sizes.items()}
    return Facts(
        device=operands[0].device,
        dtype=dtype,
        symbolic=frozenset(name for name, size in sizes.items() if not size.is_Integer),
        training=wanting and any(t.requires_grad for t in operands + others),
        bias_needs_grad=wanting and any(t.requires_grad for t in added),
        bias_may_hide=not all(stays_within(x, limit, attention.space, learned, [dtype]) for x in _added(attention)),
        bias_may_be_infinite=attention.score_mod is not None or lowest < torch.finfo(dtype).min,
        bias_dtype=max(widths, key=lambda d: torch.finfo(d).bits) if widths else None,
        **first,
    )


def _added(attention: Attention) -> Iterator[Expr]:
    """The terms added to the scores and the values that replace them, other than minus infinity."""
    yield from attention.biases
    waiting = [] if attention.score_mod is None else [attention.score_mod]
    while waiting:
        match waiting.pop():
            case ex.Add(a, b) | ex.Select(_, a, b) | ex.Binary(_, a, b):
                waiting += [x for x in (a, b) if ex.has_product(x)]
                yield from (x for x in (a, b) if not ex.has_product(x) and x != ex.Const(-math.inf))
            case ex.Mul(a, b) | ex.Div(a, b):
                waiting += [x for x in (a, b) if ex.has_product(x)]
            case ex.Unary(_, x) | ex.Cast(_, x):
                waiting.append(x)


def kernel_dtype(attention: Attention) -> torch.dtype:
    """The dtype for query, key and value: at least that of either product, and float64 if the scores have it.

    Between the products every kernel computes in at least float32.
    """
    carried = [part.dtype for part in ex.walk(attention.score) if isinstance(part, ex.Cast) and ex.has_product(part)]
    if torch.float64 in (attention.softmax_dtype, *carried):
        return torch.float64
    return torch.promote_types(attention.query_dtype, attention.value_dtype)


def _on_first_call(size: sympy.Expr, leaves: Sequence[object]) -> int:
    if size.is_Integer:
        return int(size)
    lengths = [n for leaf in leaves for n in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]
    hints = {n.node.expr: n.node.hint for n in lengths if isinstance(n, torch.SymInt) and n.node.hint is not None}
    found = size.subs(hints)
    return int(found) if found.is_Integer else 1
