"""Case: the properties of an attention that its speed depends on. Evidence is a table of times by case."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import sympy
import torch

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.attention.mask import KINDS
from attn_fuse.expression.nodes import Expr, Gather, Load, walk

# The kinds of bias, in words. "constant": a tensor with an element for each query or key. "positions": computed from
# positions without such a tensor, like ALiBi's. "gradient": needs its gradient. "indexed": a table, learned or not,
# read by an index tensor with an element for each query and key.
BIASES = {
    "none": "", "constant": "bias", "positions": "bias by positions", "gradient": "bias with gradient",
    "indexed": "bias with indexed",
}  # fmt: skip
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

# A symbolic length counts as at least this: the first call may be short, but long calls take the time.
TYPICAL_LENGTH = 1024
# Tensors of the size of the scores that the program as written keeps, by whether it trains: a training step keeps the
# scores, the weights, their gradients and what dropout kept.
SCORES_ALIVE = {False: 3, True: 6}
_ROWS_COUNTED = 1024
_SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")


@dataclass(frozen=True)
class Case:
    """The properties of an attention that its speed depends on.

    dtype: a key of DTYPES. training: whether the backward runs, too.
    kv_heads, value_dim: 0 stands for `heads` and for `head_dim`.
    mask: one of `attention.mask.KINDS`. visible: the share of the scores that the mask keeps, by positions alone.
    bias: one of BIASES. bias_by_entry: whether each batch entry has a stored bias of its own.
    table: whether a learned bias is looked up in a table.
    function: whether a softcap, another function or a looked-up bias changes the scores, or a factor the weights.
    dropout, sink: whether there is dropout of the weights, and a sink.

    Raises ValueError if a field has the wrong type or an impossible value.
    """

    dtype: str
    training: bool
    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    kv_heads: int = 0
    value_dim: int = 0
    mask: str = "none"
    visible: float = 1.0
    bias: str = "none"
    function: bool = False
    dropout: bool = False
    sink: bool = False
    table: bool = False
    bias_by_entry: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        for field in fields(self):
            value, kind = getattr(self, field.name), _KINDS[str(field.type)]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{field.name} {value!r} is no {field.type}")
        for name, known in (("dtype", DTYPES), ("mask", KINDS), ("bias", BIASES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {', '.join(known)}")
        if min(getattr(self, name) for name in _SIZES) < 1 or not 0 < self.visible <= 1:
            raise ValueError("sizes are 1 or more, and visible is above 0 and at most 1")

    @property
    def scores(self) -> int:
        """The number of scores, hidden ones included."""
        return self.batch * self.heads * self.q_len * self.kv_len

    @property
    def itemsize(self) -> int:
        """Bytes of one element of `dtype`."""
        dtype: torch.dtype = DTYPES[self.dtype]
        return dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        """The arguments of `Case`, without those that have their default value."""
        usual = {f.name: f.default for f in fields(self)} | {"kv_heads": self.heads, "value_dim": self.head_dim}
        return {name: value for name, value in asdict(self).items() if usual.get(name) != value}

    def __str__(self) -> str:
        mask = "no mask" if self.mask == "none" else f"{self.mask} mask"
        words = [f"{mask} ({self.visible:.0%} seen)" if self.mask == "window" else mask]
        words += [BIASES[self.bias] + " for each batch entry" * self.bias_by_entry]
        words += ["a bias from a table" if self.table else "a function of the scores"] if self.function else []
        words += [name for name in ("dropout", "sink") if getattr(self, name)]
        words += ["training" if self.training else "inference", self.dtype, f"{self.batch} x {self.heads} heads"]
        words += [f"{self.kv_heads} kv_heads"] if self.kv_heads != self.heads else []
        words += [f"head_dim {self.head_dim}"]
        words += [f"value_dim {self.value_dim}"] if self.value_dim != self.head_dim else []
        return ", ".join([*filter(None, words), f"q_len {self.q_len}, kv_len {self.kv_len}"])


_KINDS: dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": (int, float)}


def at_typical_lengths(facts: Facts) -> Facts:
    """`facts` with every size 1 or more, and symbolic lengths TYPICAL_LENGTH or more."""
    lengths = facts.symbolic & {"q_len", "kv_len"}
    return replace(
        facts, **{name: max(getattr(facts, name), TYPICAL_LENGTH if name in lengths else 1) for name in _SIZES}
    )


def symbols_of(attention: Attention, facts: Facts) -> dict[sympy.Symbol, int]:
    """The lengths of `facts` by their symbols, for lengths that are symbols."""
    axes = attention.axes
    lengths = {attention.length(axes.query): facts.q_len, attention.length(axes.key): facts.kv_len}
    return {symbol: length for symbol, length in lengths.items() if symbol.is_Symbol}


def case_of(attention: Attention, facts: Facts) -> Case:
    """The case of `attention`, at typical lengths."""
    facts = at_typical_lengths(facts)
    mask, visible = _mask(attention, facts)
    # A learned bias that is looked up costs as much as a function of the scores, not as much as a stored bias.
    looked_up = facts.bias_needs_grad and not any(_is_stored(term, attention) for term in attention.biases)
    beyond = (attention.score_mod, attention.softcap, attention.factor)
    return Case(
        dtype=str(facts.dtype).removeprefix("torch."),
        training=facts.training or facts.bias_needs_grad,
        **{name: getattr(facts, name) for name in _SIZES},
        mask=mask,
        visible=visible,
        bias="none" if looked_up else _bias(attention, facts),
        bias_by_entry=facts.batch > 1
        and any(_is_stored(term, attention, {*attention.axes.batch}) for term in attention.biases),
        function=looked_up or any(x is not None for x in beyond),
        dropout=attention.dropout_p is not None,
        sink=attention.sink is not None,
        table=looked_up,
    )


def _bias(attention: Attention, facts: Facts) -> str:
    """The kind of everything added to the scores together."""
    terms = [x for term in attention.biases for x in walk(term)]
    if any(_is_stored(place, attention) for x in terms if isinstance(x, Gather) for place in x.index):
        return "indexed"
    if facts.bias_needs_grad:
        return "gradient"
    positions = {*attention.axes.query, *attention.axes.key}
    read = [x for x in terms if isinstance(x, (Load, Gather))]
    if any(isinstance(x, Gather) or positions & set().union(*(i.free_symbols for i in x.index)) for x in read):
        return "constant"
    return "positions" if attention.biases else "none"


def _is_stored(bias: Expr, attention: Attention, beside: Set[sympy.Symbol] = frozenset()) -> bool:
    """Whether `bias` reads a tensor with an element for each query and key, and for each value of one of `beside`."""
    query, key = {*attention.axes.query}, {*attention.axes.key}
    symbols = [set().union(*(i.free_symbols for i in x.index)) for x in walk(bias) if isinstance(x, Load)]
    return any(found & query and found & key and (not beside or found & beside) for found in symbols)


def _mask(attention: Attention, facts: Facts) -> tuple[str, float]:
    """The kind of the costliest part of the mask, and the share of the scores that positions leave visible."""
    parts = attention.mask.parts or attention.mask.parts_if_others_seen
    symbols, kv_len = symbols_of(attention, facts), facts.kv_len

    def number(value: sympy.Expr) -> int | None:
        found = value.subs(symbols)
        return int(found) if found.is_Integer else None

    bands = [part.band for part in parts]
    upper = next((number(band.upper) for band in bands if band.upper is not None), None)
    lower = next((number(band.lower) for band in bands if band.lower is not None), None)
    first = int(kv_len * max((band.first for band in bands), default=0.0))
    visible = visible_share(facts.q_len, kv_len, upper, None if lower is None else -lower, first)
    kind = max((part.kind for part in parts), key=KINDS.index, default="none")
    return ("window" if kind == "causal" and upper != 0 else kind), visible if parts else 1.0


def visible_share(q_len: int, kv_len: int, offset: int | None, reach: int | None, prefix: int = 0) -> float:
    """The share of scores with i - reach <= j <= max(i + offset, prefix - 1), counted on 1024 queries at most.

    offset, reach: None for no bound.
    """
    queries = range(0, q_len, max(1, math.ceil(q_len / _ROWS_COUNTED)))
    seen = 0
    for i in queries:
        first = 0 if reach is None else max(0, i - reach)
        last = kv_len - 1 if offset is None else min(kv_len - 1, max(i + offset, prefix - 1))
        seen += max(0, last - first + 1)
    return max(round(seen / (len(queries) * kv_len), 4), 1e-4)
