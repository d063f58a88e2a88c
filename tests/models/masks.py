"""Boolean masks, in the ways not in causal.py and masked.py: windows, documents, spans, grids, caches, predicates.

Each takes query, key and value as [batch, heads, len, head_dim], then what the mask is made from.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import causal, masked, modules
from tests.models.spelling import Inputs, Spelling, function, given, heads, hidden, joined, module, square


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]


# ---- triangles


def triangle_filled_with(fill: float):
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[-2]
        return scores_of(q, k).masked_fill(torch.triu(torch.ones(s, s), diagonal=1).bool(), fill).softmax(-1) @ v

    return program


def made_as_clip_does(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, least = q.shape[-2], torch.finfo(q.dtype).min
    mask = torch.full((s, s), least, dtype=q.dtype)
    cond = torch.arange(mask.size(-1))
    mask.masked_fill_(cond < (cond + 1).view(mask.size(-1), 1), 0)
    return (scores_of(q, k) + mask.to(q.dtype)[None, None, :, :].expand(q.shape[0], 1, s, s)).softmax(-1) @ v


def gpt2_with_cache(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as [batch, len, heads, head_dim]; key and value are returned for the cache."""
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype)
    causal_mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return torch.matmul(torch.where(causal_mask, scores, least).softmax(-1), v), k, v


def gpt2_and_padding(q: Tensor, k: Tensor, v: Tensor, words: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype)
    least = torch.finfo(scores.dtype).min
    causal_mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    scores = torch.where(causal_mask, scores, torch.full([], least, dtype=scores.dtype))
    scores = scores + (1.0 - words[:, None, None, :].to(scores.dtype)) * least
    return F.softmax(scores, dim=-1) @ v


def offset_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    return scores_of(q, k).masked_fill(i + (k.shape[-2] - q.shape[-2]) < j, float("-inf")).softmax(-1) @ v


def by_cache_position(q: Tensor, k: Tensor, v: Tensor, cache_position: Tensor, words: Tensor) -> Tensor:
    """transformers' Llama before masking_utils."""
    least, target = torch.finfo(q.dtype).min, k.shape[-2]
    mask = torch.full((q.shape[-2], target), fill_value=least, dtype=q.dtype)
    if q.shape[-2] != 1:
        mask = torch.triu(mask, diagonal=1)
    mask *= torch.arange(target) > cache_position.reshape(-1, 1)
    mask = mask[None, None, :, :].expand(q.shape[0], 1, -1, -1).clone()
    padding = mask[:, :, :, : words.shape[-1]] + words[:, None, None, :]
    padding = padding == 0
    mask[:, :, :, : words.shape[-1]] = mask[:, :, :, : words.shape[-1]].masked_fill(padding, least)
    return F.softmax(scores_of(q, k) + mask, dim=-1) @ v


# ---- windows, prefixes, documents, blocks: what the pair of positions says


def window_by_or(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    return scores_of(q, k).masked_fill((i < j) | ((i - j) > 3), float("-inf")).softmax(-1) @ v


def window_less_or_equal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    hidden = torch.logical_or(j <= i - 4, j > i)
    return torch.where(hidden, torch.finfo(q.dtype).min, scores_of(q, k)).softmax(-1) @ v


def window_of_two_triangles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ones = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    return torch.where(ones.tril() & ones.triu(-2), scores_of(q, k), -torch.inf).softmax(-1) @ v


def window_both_ways(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Longformer, made dense."""
    i, j = positions(q, k)
    return scores_of(q, k).masked_fill((i - j).abs() > 2, -1e9).softmax(-1) @ v


def global_and_local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Longformer's few tokens that see all and are seen by all."""
    i, j = positions(q, k)
    near = (i - j).abs() <= 2
    return scores_of(q, k).masked_fill(~(near | (i < 2) | (j < 2)), float("-inf")).softmax(-1) @ v


def prefix_by_maximum(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor) -> Tensor:
    i, j = positions(q, k)
    return scores_of(q, k).masked_fill(j > torch.maximum(prefix[:, None, None, None] - 1, i), -1e10).softmax(-1) @ v


def prefix_or_causal(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor) -> Tensor:
    i, j = positions(q, k)
    keep = (j <= i)[None] | (j[None] < prefix[:, None, None])
    return torch.where(keep[:, None], scores_of(q, k), float("-inf")).softmax(-1) @ v


def documents_and_causal(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
    s = q.shape[-2]
    same = segments[:, :, None] == segments[:, None, :]
    keep = same & torch.ones(s, s, dtype=torch.bool).tril()
    return scores_of(q, k).masked_fill(~keep.unsqueeze(1), float("-inf")).softmax(-1) @ v


def documents_differ(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
    other = segments[:, None, :, None] != segments[:, None, None, :]
    return torch.where(other, -1e10, scores_of(q, k)).softmax(-1) @ v


def documents_from_starts(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Positions that begin again at zero tell the documents apart."""
    document = starts.cumsum(-1)
    i, j = positions(q, k)
    keep = (document[:, :, None] == document[:, None, :]) & (j <= i)
    return scores_of(q, k).masked_fill(~keep[:, None], torch.finfo(q.dtype).min).softmax(-1) @ v


def chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama 4's local layers."""
    i, j = positions(q, k)
    return scores_of(q, k).masked_fill(~((i // 4 == j // 4) & (j <= i)), float("-inf")).softmax(-1) @ v


def blocks_in_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Block diffusion: a block sees itself and those before it."""
    i, j = positions(q, k)
    return torch.where(torch.div(i, 3, rounding_mode="floor") >= j // 3, scores_of(q, k), -torch.inf).softmax(-1) @ v


def dilated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    return scores_of(q, k).masked_fill(((i - j) % 2 != 0) | (j > i), float("-inf")).softmax(-1) @ v


def strided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sparse transformers: the nearest few, and every fourth before."""
    i, j = positions(q, k)
    keep = (j <= i) & ((i - j < 3) | (j % 4 == 3))
    return torch.where(keep, scores_of(q, k), torch.finfo(q.dtype).min).softmax(-1) @ v


def neighbourhood(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Positions are those of a grid three wide; near in both directions."""
    i, j = positions(q, k)
    near = ((i // 3 - j // 3).abs() <= 1) & ((i % 3 - j % 3).abs() <= 1)
    return scores_of(q, k).masked_fill(~near, float("-inf")).softmax(-1) @ v


# ---- what the caller says of each position


def latest_media(q: Tensor, k: Tensor, v: Tensor, text_time: Tensor, media_time: Tensor) -> Tensor:
    """Flamingo: a word sees the picture before it."""
    mask = text_time[:, None, :, None] == media_time[None, None, None, :]
    return scores_of(q, k).masked_fill(~mask, -torch.finfo(q.dtype).max).softmax(dim=-1) @ v


def pictures_inside_text(q: Tensor, k: Tensor, v: Tensor, picture: Tensor) -> Tensor:
    """Causal, but tokens of one picture see each other; 0 is text."""
    i, j = positions(q, k)
    same = (picture[:, :, None] == picture[:, None, :]) & (picture[:, :, None] > 0)
    keep = (j <= i) | same
    return scores_of(q, k).masked_fill(~keep[:, None], torch.finfo(q.dtype).min).softmax(-1) @ v


def from_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(k.shape[-2])[None, :] < lengths[:, None]
    return scores_of(q, k).masked_fill(~mask[:, None, None, :], float("-inf")).softmax(-1) @ v


def from_lengths_both_ways(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Queries past the end see nothing but the average; what they give is thrown away later."""
    seen = torch.arange(k.shape[-2]).expand(lengths.shape[0], -1) < lengths.unsqueeze(1)
    keep = seen.unsqueeze(1) * seen.unsqueeze(2)
    return scores_of(q, k).masked_fill(keep.unsqueeze(1) == 0, -1e4).softmax(-1) @ v


def nested_choice(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    s = q.shape[-2]
    triangle = torch.ones(s, s, dtype=torch.bool).tril()
    inner = torch.where(triangle, scores_of(q, k), -torch.inf)
    return torch.where(seen[:, None, None, :], inner, -torch.inf).softmax(-1) @ v


def padding_expanded_as_bart(q: Tensor, k: Tensor, v: Tensor, words: Tensor) -> Tensor:
    expanded = words[:, None, None, :].expand(words.shape[0], 1, q.shape[-2], words.shape[1]).to(q.dtype)
    hidden = (1.0 - expanded).to(torch.bool)
    return torch.where(hidden, torch.full((), -1e9, dtype=q.dtype), scores_of(q, k)).softmax(-1) @ v


def repeated_over_heads(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """nn.MultiheadAttention's merged mask: [batch * heads, q_len, kv_len]."""
    b, h, s, d = q.shape
    mask = seen.view(b, 1, 1, -1).expand(-1, h, s, -1).reshape(b * h, s, -1)
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    scores = torch.bmm(q / math.sqrt(d), k.transpose(-2, -1)).masked_fill(~mask, float("-inf"))
    return torch.bmm(scores.softmax(-1), v).view(b, h, s, d)


def repeat_interleaved_over_heads(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    b, h, s, d = q.shape
    mask = keep.repeat_interleave(h, dim=0)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = (q @ k.transpose(1, 2) * d**-0.5).masked_fill(mask == 0, -1e9)
    return (scores.softmax(-1) @ v).unflatten(0, (b, h))


# ---- written into the scores


def assigned_by_boolean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    scores[:, :, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)] = float("-inf")
    return scores.softmax(-1) @ v


def assigned_by_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    scores[..., torch.tensor([0, 3])] = float("-inf")
    return scores.softmax(-1) @ v


def assigned_by_slice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    scores[..., -2:] = torch.finfo(q.dtype).min
    return scores.softmax(-1) @ v


# ---- predicates of positions, mapped over both as transformers' masking_utils does


def causal_of(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx <= q_idx


def both(*predicates):
    def and_mask(batch, head, q_idx, kv_idx):
        result = q_idx.new_ones((), dtype=torch.bool)
        for predicate in predicates:
            result = result & predicate(batch, head, q_idx, kv_idx)
        return result

    return and_mask


def mapped(predicate):
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        predicate = torch.vmap(predicate, in_dims=dims, out_dims=0)
    return predicate


def predicate_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = mapped(causal_of)(torch.arange(1), torch.arange(1), torch.arange(q.shape[2]), torch.arange(k.shape[2]))
    return scores_of(q, k).masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1) @ v


def predicate_sliding_and_padding(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    def sliding(batch, head, q_idx, kv_idx):
        return kv_idx > q_idx - 4

    def padding(batch, head, q_idx, kv_idx):
        return seen[batch, kv_idx]

    predicate = mapped(both(causal_of, sliding, padding))
    keep = predicate(*(torch.arange(n) for n in (q.shape[0], 1, q.shape[2], k.shape[2])))
    mask = torch.where(keep, torch.tensor(0.0, dtype=q.dtype), torch.finfo(q.dtype).min)
    return (scores_of(q, k) + mask).softmax(-1) @ v


def predicate_documents(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
    def same_document(batch, head, q_idx, kv_idx):
        return segments[batch, q_idx] == segments[batch, kv_idx]

    predicate = mapped(both(causal_of, same_document))
    keep = predicate(*(torch.arange(n) for n in (q.shape[0], 1, q.shape[2], k.shape[2])))
    return scores_of(q, k).masked_fill(keep.logical_not(), float("-inf")).softmax(-1) @ v


# ---- modules


class CrossTriangle(nn.Module):
    """The triangle of a buffer cut out between past and present: what generation with a cache sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones((32, 32), dtype=torch.bool)).view(1, 1, 32, 32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_len, kv_len = q.size(-2), k.size(-2)
        mask = self.bias[:, :, kv_len - q_len : kv_len, :kv_len]
        return torch.where(mask, scores_of(q, k), torch.finfo(q.dtype).min).softmax(dim=-1) @ v


_G = "masks"
_SEGMENTS = given(lambda: torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]]))
_PREFIX = given(lambda: torch.tensor([3, 5]))
_SEEN = given(lambda: torch.arange(7) < torch.tensor([[4], [7]]))
_TEXT = given(lambda: torch.tensor([[1, 1, 2, 2, 3, 3, 3]] * 2))
_ONE_EMPTY = given(lambda: torch.arange(11) < torch.tensor([[0], [7]]))
_SEEN_SHIFTED = given(lambda: torch.arange(11) >= torch.tensor([[4], [0]]))
_WORDS = given(lambda: (torch.arange(7) < torch.tensor([[4], [7]])).long())


def _keep(*shape: int) -> Inputs:
    def made() -> Tensor:
        keep = torch.rand(shape) > 0.4
        keep[..., 0] = True
        return keep

    return given(made)


def _padded_left(*counts: int) -> Tensor:
    return (torch.arange(11) >= torch.tensor(counts)[:, None]).long()


def _filled(fill: float, name: str) -> Spelling:
    return function(_G, triangle_filled_with(fill), square(), f"triangle_filled_with_{name}")


_FILLS = {"1e4": -1e4, "65504": -65504.0, "1e10": -1e10, "1e20": -1e20, "infinity": -torch.inf}
_BY_POSITION = (
    made_as_clip_does, window_by_or, window_less_or_equal, window_of_two_triangles, window_both_ways, global_and_local,
    chunks, blocks_in_order, dilated, strided, neighbourhood, assigned_by_boolean, assigned_by_number,
    assigned_by_slice, predicate_causal, causal.window, causal.band_of_two_triangles, causal.prefix,
    causal.one_key_further,
)  # fmt: skip
_BY_DOCUMENT = (documents_and_causal, documents_differ, predicate_documents)
_CAUSAL_MODULES = (modules.NanoGPT, modules.MinGPTBool, modules.BottomSlice, modules.NeoX)

MASKS = (
    *(function(_G, f, square()) for f in causal.CAUSAL),
    *(_filled(fill, name) for name, fill in _FILLS.items()),
    *(function(_G, f, square()) for f in _BY_POSITION),
    *(module(_G, kind, hidden()) for kind in _CAUSAL_MODULES),
    *(function(_G, f, joined(square(), _SEEN)) for f in masked.PADDING),
    *(function(_G, f, joined(heads(), _keep(2, 1, 7, 11))) for f in masked.BOOLEAN),
    *(function(_G, f, joined(square(), _SEGMENTS)) for f in _BY_DOCUMENT),
    function(_G, documents_from_starts, joined(square(), given(lambda: torch.tensor([[1, 0, 0, 1, 0, 0, 0]] * 2)))),
    function(_G, gpt2_with_cache, heads(heads=7, q_len=3, kv_len=3)),
    function(_G, gpt2_and_padding, joined(square(), _WORDS)),
    function(_G, offset_triangle, heads()),
    function(_G, causal.bottom_right, heads()),
    module(_G, CrossTriangle, heads()),
    function(_G, by_cache_position, joined(heads(), given(lambda: torch.arange(4, 11), lambda: _padded_left(2, 0)))),
    *(function(_G, f, joined(square(), _PREFIX)) for f in (prefix_by_maximum, prefix_or_causal)),
    function(
        _G, latest_media,
        joined(heads(kv_len=6), _TEXT, given(lambda: torch.tensor([1, 1, 2, 2, 3, 3]))),
    ),
    function(_G, pictures_inside_text, joined(square(), given(lambda: torch.tensor([[0, 1, 1, 1, 0, 2, 2]] * 2)))),
    function(_G, from_lengths, joined(heads(), given(lambda: torch.tensor([4, 11])))),
    function(_G, from_lengths_both_ways, joined(square(), given(lambda: torch.tensor([4, 7])))),
    function(_G, nested_choice, joined(square(), _SEEN)),
    function(_G, padding_expanded_as_bart, joined(square(), _WORDS)),
    function(_G, repeated_over_heads, joined(heads(), _SEEN_SHIFTED)),
    function(_G, repeat_interleaved_over_heads, joined(heads(), _keep(2, 7, 11))),
    function(_G, predicate_sliding_and_padding, joined(square(), _SEEN)),
    function(_G, masked.padding_filled, joined(heads(), _ONE_EMPTY), "row_of_infinities"),
    function(_G, masked.padding_viewed, joined(heads(), _ONE_EMPTY), "row_of_least"),
)  # fmt: skip
