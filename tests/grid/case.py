"""The grid: its axes, and the attention that a row of it stands for, as written, as a program and as tensors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.score.program import ScoreProgram
from tests.grid import features
from tests.grid.cover import Row
from tests.grid.features import At, Part, Sizes, const

_PARTS: Mapping[str, Mapping[str, Part | None]] = {
    "positions": features.POSITIONS,
    "visible": features.VISIBLE,
    "bias": features.BIASES,
    "function": features.FUNCTIONS,
    "sink": features.SINKS,
    "factor": features.FACTORS,
}
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
AXES: Mapping[str, tuple[str, ...]] = {
    **{axis: tuple(parts) for axis, parts in _PARTS.items()},
    "empty rows": tuple(features.FILLS),
    "dropout": ("none", "0.25"),
    "heads": ("4 of 4", "4 of 2", "4 of 1"),
    "dims": ("24, 24", "8, 8", "40, 40", "80, 80", "128, 128", "24, 40", "64, 8"),
    "lengths": ("17, 17", "1, 17", "13, 29", "29, 13", "37, 53"),
    "batch": ("3", "1"),
    "layout": ("dense", "heads last", "packed", "transposed", "one for all"),
    "gradient": ("random", "of one number", "zero", "none"),
    "dtype": tuple(DTYPES),
}
# Each axis at its plainest.
PLAIN: Row = {axis: values[0] for axis, values in AXES.items()}
# In place of these, where kernels work on larger blocks; and where the least thing takes long.
LONGER = {"lengths": ("128, 128", "1, 333", "127, 251", "251, 127", "257, 515")}
SMALLER = {"heads": ("2 of 2", "2 of 1"), "batch": ("2", "1"), "dims": ("24, 24", "8, 8", "80, 80", "24, 40")}


@dataclass(frozen=True)
class Case:
    """A row of the grid."""

    row: tuple[tuple[str, str], ...]

    @staticmethod
    def of(row: Row) -> Case:
        return Case(tuple(row.items()))

    def __getitem__(self, axis: str) -> str:
        return dict(self.row)[axis]

    def __str__(self) -> str:
        """What differs from the plainest."""
        return ", ".join(f"{axis}: {v}" for axis, v in self.row if v != PLAIN[axis]) or "plain"

    @property
    def sizes(self) -> Sizes:
        heads, kv_heads = map(int, self["heads"].split(" of "))
        q_len, kv_len = map(int, self["lengths"].split(", "))
        head_dim, value_dim = map(int, self["dims"].split(", "))
        return Sizes(int(self["batch"]), heads, kv_heads, q_len, kv_len, head_dim, value_dim)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self["dtype"]]

    @property
    def dropout_p(self) -> float:
        return 0.0 if self["dropout"] == "none" else float(self["dropout"])

    @property
    def training(self) -> bool:
        return self["gradient"] != "none"

    @property
    def scale(self) -> float:
        return self.sizes.head_dim**-0.5

    def parts(self) -> Iterator[tuple[str, Part]]:
        """The parts that there are, by axis; their tensors come in this order."""
        for axis, parts in _PARTS.items():
            part = parts[self[axis]]
            if part is not None:
                yield axis, part


@dataclass(frozen=True)
class Operands:
    """query, key, value and the tensors of the parts, by name; which have a gradient; the gradient of the output."""

    tensors: list[Tensor]
    names: list[str]
    learned: list[bool]
    grad_out: Tensor

    def leaves(self, training: bool) -> list[Tensor]:
        """Tensors of their own, of the same strides."""
        return [
            t.detach().requires_grad_(training and learned)
            for t, learned in zip(self.tensors, self.learned, strict=True)
        ]


def operands(c: Case, device: torch.device) -> Operands:
    """Always the same for the same case."""
    torch.manual_seed(zlib.crc32(repr(c.row).encode()))
    s = c.sizes
    tensors, names, learned = [*_query_key_value(c)], ["query", "key", "value"], [True] * 3
    for axis, part in c.parts():
        for number, tensor in enumerate(part.tensors(s)):
            tensors.append(tensor)
            names.append(f"{axis} {number}")
            learned.append(part.learned)
    shape = (s.batch, s.heads, s.q_len, s.value_dim)
    match c["gradient"]:
        case "zero":
            grad_out = torch.zeros(()).expand(shape)
        case "of one number":
            grad_out = torch.full((), 0.7).expand(shape)
        case _:
            grad_out = torch.randn(shape)
    moved = [_moved(t, c.dtype, device) for t in (*tensors, grad_out)]
    return Operands(moved[:-1], names, learned, moved[-1])


def _query_key_value(c: Case) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, heads, len, dim] each, in the memory layout of the case."""
    s = c.sizes
    shapes = [
        (s.batch, s.heads, s.q_len, s.head_dim),
        (s.batch, s.kv_heads, s.kv_len, s.head_dim),
        (s.batch, s.kv_heads, s.kv_len, s.value_dim),
    ]
    query, key, value = map(torch.randn, shapes)
    match c["layout"]:
        case "heads last":
            query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
        case "packed":
            # One tensor [batch, len, everything]: of all three where their lengths are equal, else of key and value.
            together = [query, key, value] if s.q_len == s.kv_len else [key, value]
            widths = [x.shape[1] * x.shape[3] for x in together]
            packed = torch.cat([x.transpose(1, 2).flatten(2) for x in together], -1).split(widths, -1)
            views = [
                p.unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2) for p, x in zip(packed, together, strict=True)
            ]
            query, key, value = views if len(views) == 3 else (query, *views)
        case "transposed":
            query, key, value = query, key.mT.contiguous().mT, value.mT.contiguous().mT
        case "one for all":
            key, value = (x[:1, :1].expand(x.shape) for x in (key, value))
    return query, key, value


def _moved(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`x` in this dtype and on this device, with strides as they were."""
    if not x.is_floating_point():
        return x.to(device)
    if 0 in x.stride() and x.numel() > 1:
        small = x[tuple(slice(None) if stride else slice(1) for stride in x.stride())]
        return small.to(device, dtype).expand(x.shape)
    if x.numel() == x.untyped_storage().nbytes() // x.itemsize:
        return x.to(device, dtype)
    whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(device, dtype)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


Softmax = Callable[[Tensor], Tensor]


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def held_softmax(scores: Tensor) -> Tensor:
    """Its value, with the gradient of the numerator alone."""
    weights = torch.softmax(scores, -1).nan_to_num(0.0).detach()
    return weights * (1 + torch.where(scores == -math.inf, 0.0, scores - scores.detach()))


def attention(
    c: Case, empty_rows: str | None = None, kept: Tensor | None = None, softmax: Softmax = _softmax
) -> Callable[..., Tensor]:
    """The attention of `c` as people write it: (query, key, value, *tensors of the parts) -> [B, H, Lq, value_dim].

    empty_rows: in place of the case's own. kept: what to multiply the weights with in place of dropout.
    """
    parts, scale, groups = dict(c.parts()), c.scale, c.sizes.heads // c.sizes.kv_heads
    counts = {axis: len(part.tensors(c.sizes)) for axis, part in parts.items()}
    empty_rows, p = empty_rows or c["empty rows"], c.dropout_p

    def written(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        given, start = {}, 0
        for axis, count in counts.items():
            given[axis] = tensors[start : start + count]
            start += count
        at = At.scores(q, k)
        scores = q @ k.transpose(-2, -1) * scale
        for axis in ("function", "bias"):
            if axis in parts:
                scores = parts[axis].write(scores, at, *given[axis])
        keep = None
        for axis in ("positions", "visible"):
            if axis in parts:
                seen = parts[axis].write(at, *given[axis])
                keep = seen if keep is None else keep & seen
        if keep is not None:
            scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min if empty_rows == "mean" else -math.inf)
        if "sink" in parts:
            sink = parts["sink"].write(at, *given["sink"])
            weights = softmax(torch.cat([scores, sink.expand(scores.shape[0], -1, scores.shape[2], 1)], -1))[..., :-1]
        else:
            weights = softmax(scores)
        if empty_rows == "zero":
            weights = weights.nan_to_num(0.0)
        if "factor" in parts:
            weights = weights * parts["factor"].write(at, *given["factor"])
        if kept is not None:
            weights = weights * kept.to(weights.dtype)
        elif p:
            weights = torch.nn.functional.dropout(weights, p)
        return weights @ v

    return written


def program(c: Case) -> tuple[ScoreProgram, list[int]]:
    """The same as a score program, and its numbers. It reads the tensors of the parts, in their order."""
    s, numbers = c.sizes, iter(range(100))
    known = {axis: [next(numbers) for _ in part.tensors(s)] for axis, part in c.parts()}
    parts = dict(c.parts())
    score: list[Any] = ["mul", ["score"], const(c.scale)]
    for axis in ("function", "bias"):
        if axis in parts:
            score = parts[axis].tree(score, *known[axis])
    masks = [axis for axis in ("positions", "visible") if axis in parts]
    hides = c["empty rows"] != "mean"
    visible = upper = lower = None
    if masks:
        keep = ["and", *(parts[axis].tree(*known[axis]) for axis in masks)]
        score = ["where", keep, score, const(-math.inf if hides else torch.finfo(c.dtype).min)]
        if hides:
            visible = keep
            upper, lower = parts[masks[0]].upper, parts[masks[0]].lower
    found = ScoreProgram(
        score=score,
        factor=parts["factor"].tree(*known["factor"]) if "factor" in parts else None,
        sink=parts["sink"].tree(*known["sink"]) if "sink" in parts else None,
        visible=visible,
        upper=upper,
        lower=lower,
    )
    return found, [s.q_len, s.kv_len]
