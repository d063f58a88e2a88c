"""Case: the properties of an attention that its speed depends on. Evidence is a table of times by case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, fields
from typing import Any

import sympy
import torch

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.attention.mask import KINDS
from attn_fuse.expression.nodes import Expr, Gather, Load, walk

# The kinds of bias. "positions": computed from the positions, as ALiBi's, without a tensor that has an element for each
# query or key. "gradient": one that needs its gradient. "indexed": a table read by an index tensor that has an element
# for each query and key, whether the table needs a gradient or not.
BIASES = ("none", "constant", "positions", "gradient", "indexed")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

# The min that a symbolic length counts as: the first call may be short, but later long ones take the time.
TYPICAL_LENGTH = 1024
_ROWS_COUNTED = 1024


@dataclass(frozen=True)
class Case:
    """The properties of an attention that its speed depends on.

    dtype: a key of DTYPES. training: whether the backward runs as well as the forward.
    kv_heads, value_dim: 0 stands for `heads` and for `head_dim`.
    mask: one of `attention.mask.KINDS`. visible: the share of the scores that the mask keeps, by positions alone.
    bias: one of BIASES. bias_by_entry: whether each batch entry has a stored bias of its own.
    table: whether a learned bias is looked up in a table.
    function: whether a softcap, another function or a looked-up bias changes the scores, or a factor the weights.
    dropout, sink: whether there is dropout of the weights, and a sink.

    Raises ValueError where a field has the wrong type or an impossible value.
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
        sizes = (self.batch, self.heads, self.q_len, self.kv_len, self.head_dim, self.kv_heads, self.value_dim)
        if min(sizes) < 1 or not 0 < self.visible <= 1:
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
        """The fields, without those that have their default value."""
        usual = {"kv_heads": self.heads, "value_dim": self.head_dim} | _USUAL
        return {name: value for name, value in asdict(self).items() if usual.get(name) != value}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Case:
        """The case that `as_json` wrote as `data`. Raises ValueError for data that it cannot write."""
        try:
            return Case(**data)
        except TypeError as problem:
            raise ValueError(f"not a case: {str(problem).removeprefix('Case.__init__() ')}") from problem

    def __str__(self) -> str:
        mask = "no mask" if self.mask == "none" else f"{self.mask} mask"
        words = [f"{mask} ({self.visible:.0%} seen)" if self.mask == "window" else mask]
        words += [_BIAS_IN_WORDS[self.bias] + " for each batch entry" * self.bias_by_entry]
        words += ["a bias from a table" if self.table else "a function of the scores"] if self.function else []
        words += [name for name in ("dropout", "sink") if getattr(self, name)]
        words += ["training" if self.training else "inference", self.dtype, f"{self.batch} x {self.heads} heads"]
        words += [f"{self.kv_heads} kv_heads"] if self.kv_heads != self.heads else []
        words += [f"head_dim {self.head_dim}"]
        words += [f"value_dim {self.value_dim}"] if self.value_dim != self.head_dim else []
        return ", ".join([*filter(None, words), f"q_len {self.q_len}, kv_len {self.kv_len}"])


_BIAS_IN_WORDS = {
    "none": "", "constant": "bias", "positions": "bias by positions", "gradient": "bias with gradient",
    "indexed": "bias with indexed",
}  # fmt: skip
_KINDS: dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": (int, float)}
_USUAL: dict[str, Any] = {
    field.name: field.default for field in fields(Case) if field.name not in ("kv_heads", "value_dim")
}


def case_of(attention: Attention, facts: Facts) -> Case:
    """The case of `attention`; a symbolic length counts as TYPICAL_LENGTH or more."""
    sizes = {
        name: max(getattr(facts, name), TYPICAL_LENGTH if name in facts.symbolic else 1) for name in ("q_len", "kv_len")
    }
    mask, visible = _mask(attention, facts, sizes["q_len"], sizes["kv_len"])
    stored = any(_is_stored(term, attention) for term in attention.biases)
    # A learned bias that is looked up costs as much as a function of the scores, not as much as a stored bias.
    looked_up = facts.bias_needs_grad and not stored
    beyond = (attention.score_mod, attention.softcap, attention.factor)
    return Case(
        dtype=str(facts.dtype).removeprefix("torch."),
        training=facts.training or facts.bias_needs_grad,
        **{name: max(getattr(facts, name), 1) for name in ("batch", "heads", "head_dim", "kv_heads", "value_dim")},
        **sizes,
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
    """The kind of what is added to the scores, of all terms together."""
    if any(_by_index(term, attention) for term in attention.biases):
        return "indexed"
    if facts.bias_needs_grad:
        return "gradient"
    positions = {*attention.axes.query, *attention.axes.key}
    read = [x for term in attention.biases for x in walk(term) if isinstance(x, (Load, Gather))]
    if any(isinstance(x, Gather) or positions & set().union(*(i.free_symbols for i in x.index)) for x in read):
        return "constant"
    return "positions" if attention.biases else "none"


def _by_index(bias: Expr, attention: Attention) -> bool:
    """Whether `bias` reads a table by an index tensor that has an element for each query and key."""
    return any(_is_stored(place, attention) for x in walk(bias) if isinstance(x, Gather) for place in x.index)


def _is_stored(bias: Expr, attention: Attention, beside: Set[sympy.Symbol] = frozenset()) -> bool:
    """Whether `bias` reads a tensor that has an element for each query and key, and along one of `beside` if given."""
    query, key = {*attention.axes.query}, {*attention.axes.key}
    symbols = [set().union(*(i.free_symbols for i in x.index)) for x in walk(bias) if isinstance(x, Load)]
    return any(found & query and found & key and (not beside or found & beside) for found in symbols)


def _mask(attention: Attention, facts: Facts, q_len: int, kv_len: int) -> tuple[str, float]:
    """The kind of the costliest part of the mask, and the share of the scores that positions leave visible."""
    parts = attention.mask.parts or attention.mask.parts_if_others_seen
    lengths = {
        size: length
        for size, length in (
            (attention.length(attention.axes.query), q_len), (attention.length(attention.axes.key), kv_len),
        )
        if size.is_Symbol
    }  # fmt: skip

    def number(value: sympy.Expr) -> int | None:
        found = value.subs(lengths)
        return int(found) if found.is_Integer else None

    bands = [part.band for part in parts]
    upper = next((number(band.upper) for band in bands if band.upper is not None), None)
    lower = next((number(band.lower) for band in bands if band.lower is not None), None)
    first = int(kv_len * max((band.first for band in bands), default=0.0))
    visible = visible_share(q_len, kv_len, upper, None if lower is None else -lower, first)
    kind = max((part.kind for part in parts), key=KINDS.index, default="none")
    return ("window" if kind == "causal" and upper != 0 else kind), visible if parts else 1.0


def visible_share(q_len: int, kv_len: int, offset: int | None, reach: int | None, prefix: int = 0) -> float:
    """The share of scores with i - reach <= j <= max(i + offset, prefix - 1), counted on at most 1024 of the queries.

    offset, reach: None for no bound.
    """
    queries = range(0, q_len, max(1, math.ceil(q_len / _ROWS_COUNTED)))
    seen = 0
    for i in queries:
        first = 0 if reach is None else max(0, i - reach)
        last = kv_len - 1 if offset is None else min(kv_len - 1, max(i + offset, prefix - 1))
        seen += max(0, last - first + 1)
    return max(round(seen / (len(queries) * kv_len), 4), 1e-4)
