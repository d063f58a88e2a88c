"""What is added to the scores: position biases, ALiBi, additive masks, in every broadcast shape.

Each takes query, key and value as [batch, heads, len, head_dim], then what is added, unless its entry says otherwise.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import causal, masked
from tests.models.spelling import Inputs, Spelling, function, given, heads, joined, module, noise, square

# ---- masks that are added


def sliced_to_keys(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """eager_attention_forward of transformers."""
    attn_weights = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    if attention_mask is not None:
        causal_mask = attention_mask[:, :, :, : k.shape[-2]]
        attn_weights = attn_weights + causal_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)
    attn_output = torch.matmul(attn_weights, v)
    return attn_output.transpose(1, 2).contiguous()


def ten_thousand_off(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """The first BERT: 1 for a word, 0 for padding."""
    extended = attention_mask.unsqueeze(1).unsqueeze(2).to(q.dtype)
    extended = (1.0 - extended) * -10000.0
    return F.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + extended, dim=-1) @ v


def expanded_and_inverted(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """_expand_mask of transformers."""
    b, kv_len = attention_mask.size()
    expanded = attention_mask[:, None, None, :].expand(b, 1, q.shape[-2], kv_len).to(q.dtype)
    inverted = 1.0 - expanded
    mask = inverted.masked_fill(inverted.to(torch.bool), torch.finfo(q.dtype).min)
    return ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v


def kept_and_pushed_down(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Megatron: the scores times the triangle, less 10,000 elsewhere."""
    s = q.shape[-2]
    b = torch.tril(torch.ones((s, s))).view(1, 1, s, s)
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
    scores = torch.mul(scores, b) - 10000.0 * (1.0 - b)
    return nn.Softmax(dim=-1)(scores) @ v


def padding_subtracted(q: Tensor, k: Tensor, v: Tensor, padded: Tensor) -> Tensor:
    """As models ported from TensorFlow do: 1 where there is padding."""
    return (q @ k.mT / math.sqrt(q.size(-1)) - 1e9 * padded[:, None, None, :].to(q.dtype)).softmax(-1) @ v


def booleans_added(q: Tensor, k: Tensor, v: Tensor, same: Tensor) -> Tensor:
    return F.softmax(q @ k.mT / math.sqrt(q.size(-1)) + same, dim=-1) @ v


def zeros_and_infinities(q: Tensor, k: Tensor, v: Tensor, padded: Tensor) -> Tensor:
    mask = torch.zeros(padded.shape, dtype=q.dtype).masked_fill_(padded, float("-inf"))
    return (q @ k.mT * 0.25 + mask[:, None, None]).softmax(-1) @ v


# ---- biases


def two_one_by_one(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.size(-1)) + a + b).softmax(-1) @ v


def two_added_before(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.size(-1)) + (a + b)).softmax(-1) @ v


def in_a_loop(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Evoformer: queries, keys and values of each row, [batch, rows, heads, len, head_dim], and a list of biases."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    for bias in [a, b]:
        scores += bias
    return torch.matmul(torch.softmax(scores, -1), v)


def shifted_before_scale(q: Tensor, k: Tensor, v: Tensor, pse: Tensor) -> Tensor:
    return F.softmax((torch.matmul(q, k.transpose(-2, -1)) + pse) * q.shape[-1] ** -0.5, dim=-1) @ v


def viewed_around_addition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Windows apart from the batch while the mask of each window is added."""
    b, h, n, _ = q.shape
    windows = mask.shape[0]
    attn = q @ k.transpose(-2, -1) * 0.25
    attn = attn.view(b // windows, windows, h, n, n) + mask.unsqueeze(1).unsqueeze(0)
    return attn.view(-1, h, n, n).softmax(dim=-1) @ v


def in_folded_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """fairseq: [batch * heads, q_len, kv_len] is added to scores of that shape."""
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q * d**-0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2))
    scores += mask
    return torch.bmm(F.softmax(scores, dim=-1), v).view(b, h, s, d)


def through_baddbmm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """diffusers' AttnProcessor with a mask."""
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    scores = torch.baddbmm(bias, q, k.transpose(-1, -2), beta=1, alpha=d**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(b, h, s, d)


def looked_up(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A bias for each distance and head, out of a table [2 len - 1, heads]."""
    s = q.shape[-2]
    position = torch.arange(s)
    distance = position[None, :] - position[:, None] + s - 1
    return (q @ k.mT * 0.25 + table[distance].permute(2, 0, 1).unsqueeze(0)).softmax(-1) @ v


def point_distances(q: Tensor, k: Tensor, v: Tensor, q_points: Tensor, k_points: Tensor, pair: Tensor) -> Tensor:
    """Invariant point attention: less half the squared distance of points, plus a bias of each pair."""
    content = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(3 * q.size(-1))
    offset = q_points.unsqueeze(-3) - k_points.unsqueeze(-4)
    distance = (offset**2).sum(dim=(-1, -2))
    return torch.softmax(content - 0.5 * 0.3 * distance + math.sqrt(1 / 3) * pair, dim=-1) @ v


def graph_edges(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, adjacency: Tensor) -> Tensor:
    """A graph transformer on a padded graph: a bias for each edge and head, none where there is no edge."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.25 + edges.permute(0, 3, 1, 2)
    scores = scores.masked_fill(adjacency.unsqueeze(1) == 0, float("-inf"))
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)


# ---- ALiBi


def slopes_of(heads: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([2 ** (-8 * (n + 1) / heads) for n in range(heads)], dtype=dtype)


def alibi_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    position = torch.arange(q.shape[-2])
    distance = position[None, :] - position[:, None]
    bias = slopes_of(q.shape[1], q.dtype)[:, None, None] * distance[None]
    mask = torch.triu(torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool), 1)
    return (q @ k.mT / math.sqrt(q.size(-1)) + bias).masked_fill(mask, float("-inf")).softmax(-1) @ v


def alibi_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MPT: only the key's position counts, since a row's constant cancels."""
    s = k.shape[-2]
    bias = torch.arange(1 - s, 1, dtype=q.dtype).view(1, 1, 1, s) * slopes_of(q.shape[1], q.dtype).view(1, -1, 1, 1)
    scores = q.matmul(k.transpose(-1, -2)) * 0.25 + bias
    causal_mask = torch.ones(s, s, dtype=torch.bool).tril()
    return scores.masked_fill(~causal_mask[-q.shape[-2] :], torch.finfo(q.dtype).min).softmax(-1) @ v


def alibi_exp2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    h = torch.arange(q.shape[1], dtype=q.dtype)
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    bias = torch.exp2(-((h + 1) * 8.0 / q.shape[1]))[:, None, None] * (j - i)
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


def alibi_absolute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In encoders: the distance both ways."""
    position = torch.arange(q.shape[-2], dtype=q.dtype)
    distance = (position[:, None] - position).abs()
    return (q @ k.mT * 0.25 - distance * slopes_of(q.shape[1], q.dtype).view(-1, 1, 1)).softmax(-1) @ v


class AlibiBuffer(nn.Module):
    """The bias with its triangle in it, kept for the longest sequence."""

    def __init__(self) -> None:
        super().__init__()
        position = torch.arange(32)
        bias = slopes_of(3, torch.float32)[:, None, None] * (position[None, :] - position[:, None])
        self.register_buffer("bias", bias + torch.full((32, 32), float("-inf")).triu(1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[-2]
        return (q @ k.mT * 0.25 + self.bias[:, :s, :s]).softmax(-1) @ v


class Bloom(nn.Module):
    """BLOOM: alibi.baddbmm, heads folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(24, 72)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        b, s, c = x.shape
        fused = self.query_key_value(x).view(b, s, 3, 3, c // 3)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q = q.transpose(1, 2).reshape(b * 3, s, 8)
        k = k.permute(0, 2, 3, 1).reshape(b * 3, 8, s)
        v = v.transpose(1, 2).reshape(b * 3, s, 8)
        positions = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
        alibi = (slopes_of(3, x.dtype)[..., None] * positions).reshape(b * 3, 1, s).to(x.dtype)
        scores = alibi.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=1 / math.sqrt(8)).view(b, 3, s, s)
        hidden = torch.ones(s, s, dtype=torch.bool).triu(1) | (attention_mask[:, None, None, :] == 0)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype).view(b * 3, s, s)
        context = torch.bmm(probs, v).view(b, 3, s, 8)
        return context.permute(0, 2, 1, 3).reshape(b, s, c)


class Falcon(nn.Module):
    """Falcon with ALiBi: one key head for all, the bias added before both are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(24, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q = self.q(x).view(b, s, 3, 8).transpose(1, 2)
        k, v = (y.unsqueeze(1) for y in self.kv(x).chunk(2, -1))
        scores = (q @ k.transpose(-1, -2)).view(b, 3, s, s)
        alibi = (slopes_of(3, x.dtype)[:, None, None] * torch.arange(s)).unsqueeze(0)
        mask = torch.full((s, s), float("-inf"), dtype=x.dtype).triu(1)
        logits = (scores + alibi.view(1, 3, 1, -1)) * (1 / math.sqrt(8))
        probs = F.softmax(logits + mask, dim=-1, dtype=x.dtype)
        return (probs.view(b, 3, s, s) @ v).permute(0, 2, 1, 3).reshape(b, s, c)


_G = "biases"
_FULL = joined(heads(), noise((1, 3, 7, 11)))
_SQUARE = joined(square(), noise((1, 3, 7, 7)))
_SHAPES = ((7, 11), (1, 7, 11), (3, 7, 11), (2, 1, 1, 11), (2, 1, 7, 11), (2, 3, 1, 11), (2, 3, 7, 11), (1, 1, 1, 11),
           (11,), (7, 1), (2, 3, 7, 1), (3, 1, 1))  # fmt: skip


def _of_shape(*shape: int) -> Spelling:
    name = f"bias_of_shape_{'x'.join(map(str, shape))}"
    return function(_G, masked.bias_after_scale, joined(heads(), noise(shape)), name)


def _words(*counts: int) -> Inputs:
    """1 for a word and 0 for padding, [batch, len]."""
    return given(lambda: (torch.arange(11) < torch.tensor(counts)[:, None]).long())


def _padded(*counts: int) -> Inputs:
    return given(lambda: torch.arange(11) >= torch.tensor(counts)[:, None])


BIASES = (
    *(function(_G, f, _SQUARE if f is masked.bias_and_causal else _FULL) for f in masked.BIASED),
    *(_of_shape(*shape) for shape in _SHAPES),
    function(_G, causal.added_infinities, square(), "added_triangle"),
    function(_G, sliced_to_keys, joined(heads(), noise((2, 1, 7, 13)))),
    function(_G, ten_thousand_off, joined(heads(), _words(11, 5))),
    function(_G, expanded_and_inverted, joined(heads(), _words(11, 5))),
    function(_G, kept_and_pushed_down, square()),
    function(_G, padding_subtracted, joined(heads(), _padded(11, 5))),
    function(_G, booleans_added, joined(heads(), given(lambda: torch.rand(7, 11) > 0.5))),
    function(_G, zeros_and_infinities, joined(heads(), _padded(4, 11))),
    function(_G, two_one_by_one, joined(_FULL, noise((2, 1, 1, 11)))),
    function(_G, two_added_before, joined(_FULL, noise((2, 1, 1, 11)))),
    function(_G, in_a_loop, noise(*[(2, 5, 3, 7, 8)] * 3, (2, 5, 1, 1, 7), (2, 1, 3, 7, 7))),
    function(_G, shifted_before_scale, _FULL),
    function(_G, viewed_around_addition, joined(square(batch=6), noise((2, 7, 7)))),
    function(_G, in_folded_heads, joined(heads(), noise((6, 7, 11)))),
    function(_G, through_baddbmm, joined(heads(), noise((6, 7, 11)))),
    function(_G, looked_up, joined(square(), noise((13, 3)))),
    function(_G, point_distances, joined(heads(), noise((2, 3, 7, 4, 3), (2, 3, 11, 4, 3), (2, 3, 7, 11)))),
    function(
        _G, graph_edges,
        joined(square(), noise((2, 7, 7, 3)), given(lambda: torch.eye(7) + (torch.rand(2, 7, 7) > 0.5))),
    ),
    *(function(_G, f, square()) for f in (alibi_distance, alibi_keys, alibi_exp2, alibi_absolute)),
    function(_G, causal.causal_and_alibi, square()),
    module(_G, AlibiBuffer, square()),
    module(_G, Bloom, joined(noise((2, 11, 24)), _words(11, 8))),
    module(_G, Falcon, noise((2, 11, 24))),
)  # fmt: skip
