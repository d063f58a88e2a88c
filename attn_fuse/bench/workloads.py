"""Workloads: every case of the evidence as a hand-written program, and tensors to run it on.

The spelling is a usual one: a mask is computed from positions, or is an input if it has to be.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_fuse.picker.case import DTYPES, Case, visible_share

Program = Callable[..., Tensor]

_SOFTCAP, _DROPOUT, _SEEN_OF_DENSE = 30.0, 0.1, 0.8
# T5's buckets of relative positions, and the distance from which on all share a bucket (arXiv 1910.10683).
_BUCKETS, _FAR = 32, 128
# The beginnings of documents as shares of the length, off the borders of blocks.
_DOCUMENTS = (0.21, 0.34, 0.71)


def program(case: Case) -> Program:
    """The attention of `case`, softmax(query key^T / sqrt(head_dim) ...) value, on the result of `tensors`."""
    scale, groups, seen = case.head_dim**-0.5, case.heads // case.kv_heads, seen_by_position(case)

    def written(query: Tensor, key: Tensor, value: Tensor, others: dict[str, Tensor]) -> Tensor:
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query * scale) @ key.transpose(-2, -1)
        i = torch.arange(query.shape[2], device=query.device)[:, None]
        j = torch.arange(key.shape[2], device=query.device)[None, :]
        if case.table:
            scores = scores + F.embedding(bucket(j - i), others["table"]).permute(2, 0, 1)
        elif case.function:
            scores = _SOFTCAP * torch.tanh(scores / _SOFTCAP)
        if case.bias == "indexed":
            scores = scores + others["table"][others["index"]].permute(2, 0, 1)
        elif case.bias == "positions":
            slopes = torch.exp2(-8 * torch.arange(1, case.heads + 1, device=query.device) / case.heads)
            distance = j - (i + key.shape[2] - query.shape[2])
            scores = scores + (slopes[:, None, None] * distance).to(scores.dtype)
        elif case.bias != "none":
            scores = scores + others["bias"]
        if seen is not None:
            scores = scores.masked_fill(~seen(i, j), -math.inf)
        if case.mask in ("padding", "dense"):
            scores = scores.masked_fill(~others["keep"], -math.inf)
        if case.mask == "documents":
            numbers = others["documents"]
            same = numbers[:, None, :, None] == numbers[:, None, None, :]
            scores = scores.masked_fill(~same, -math.inf)
        if case.sink:
            logit = others["sink"].view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
            weights = torch.cat([scores, logit], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        if case.dropout:
            weights = F.dropout(weights, _DROPOUT)
        return weights @ value

    return written


def bucket(distance: Tensor) -> Tensor:
    """T5's bucket of key position minus query position: one for each near distance, then wider and wider ones."""
    half, far = _BUCKETS // 2, distance.abs()
    exact = half // 2
    wide = exact + (torch.log(far.float() / exact) / math.log(_FAR / exact) * (half - exact)).long()
    within = torch.where(far < exact, far, torch.min(wide, torch.full_like(wide, half - 1)))
    return within + half * (distance > 0).long()


def seen_by_position(case: Case) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Whether a query sees a key, as a function of their positions; None if positions do not decide.

    Padding and documents come with a causal mask if `visible` is below 1, as in the training of Hugging Face's models.
    """
    if case.mask == "causal" or (case.mask in ("padding", "documents") and case.visible < 1):
        return lambda i, j: j <= i
    if case.mask == "prefix":
        prefix = case.kv_len // 4
        return lambda i, j: (j <= i) | (j < prefix)
    if case.mask == "window":
        offset = case.kv_len - case.q_len
        reach = reach_of(case)
        return lambda i, j: (j <= i + offset) & (j >= i - reach)
    return None


@functools.cache
def reach_of(case: Case) -> int:
    """How far back the window from the causal diagonal reaches that leaves the share `visible`."""
    offset = case.kv_len - case.q_len
    reaches = range(-offset, case.kv_len)
    share = functools.partial(visible_share, case.q_len, case.kv_len, offset)
    return -offset + bisect.bisect_left(reaches, case.visible, key=share)


def tensors(case: Case, device: torch.device) -> tuple[Any, ...]:
    """query, key, value [batch, heads | kv_heads, len, dim], and the other tensors that the program reads, by name.

    Floating-point tensors need gradients in training, a stored bias only if `case.bias` is "gradient".
    """

    def random(*shape: int, grad: bool = case.training) -> Tensor:
        return torch.randn(shape, dtype=DTYPES[case.dtype], device=device).requires_grad_(grad)

    query = random(case.batch, case.heads, case.q_len, case.head_dim)
    key = random(case.batch, case.kv_heads, case.kv_len, case.head_dim)
    value = random(case.batch, case.kv_heads, case.kv_len, case.value_dim)
    others: dict[str, Tensor] = {}
    if case.bias == "indexed":
        others["index"] = index = window_index(case.q_len, case.kv_len, device)
        others["table"] = random(int(index.max()) + 1, case.heads)
    elif case.bias in ("constant", "gradient"):
        entries = case.batch if case.bias_by_entry else 1
        others["bias"] = random(entries, case.heads, case.q_len, case.kv_len, grad=case.bias == "gradient")
    if case.table:
        others["table"] = random(_BUCKETS, case.heads)
    if case.mask == "dense":
        keep = torch.rand(case.batch, 1, case.q_len, case.kv_len, device=device) < _SEEN_OF_DENSE
        keep[..., 0] = True  # so that no row is fully masked
        others["keep"] = keep
    if case.mask == "padding":
        lengths = torch.linspace(case.kv_len, max(1, case.kv_len // 2), case.batch, device=device).long()
        others["keep"] = (torch.arange(case.kv_len, device=device) < lengths[:, None])[:, None, None, :]
    if case.mask == "documents":
        starts = torch.tensor([int(share * case.kv_len) for share in _DOCUMENTS], device=device)
        numbers = torch.bucketize(torch.arange(case.kv_len, device=device), starts, right=True)
        others["documents"] = numbers.expand(case.batch, -1).contiguous()
    if case.sink:
        others["sink"] = random(case.heads)
    return query, key, value, others


def window_index(q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """Swin's index (arXiv 2103.14030), int64 [q_len, kv_len]: one number for each distance in rows and columns."""
    width = max(1, math.isqrt(kv_len))
    i, j = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)
    rows, columns = i // width - j // width, i % width - j % width
    index = rows * (2 * width - 1) + columns
    return index - index.min()


def runner(compiled: Callable[..., Any], case: Case, values: tuple[Any, ...]) -> Callable[[], Any]:
    """A call of `compiled` on `values` that returns the output, or in training the gradients."""
    if not case.training:

        def forward() -> Any:
            with torch.no_grad():
                return compiled(*values)

        return forward
    *operands, others = values
    wanted = [t for t in (*operands, *others.values()) if t.requires_grad]
    gradient = operands[0].new_ones(case.batch, case.heads, case.q_len, case.value_dim)
    return lambda: torch.autograd.grad(compiled(*values), wanted, gradient)
