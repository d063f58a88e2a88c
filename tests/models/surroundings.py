"""What is around an attention: outputs, weights that are wanted too, caches, loops, torch's own modules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

from tests.models import modules
from tests.models.spelling import Inputs, function, given, heads, hidden, joined, module, noise, square

# ---- outputs


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))


def output_viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = scores_of(q, k).softmax(-1) @ v
    return y.transpose(1, 2).contiguous().view(q.shape[0], q.shape[2], -1)


def output_reshaped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores_of(q, k).softmax(-1) @ v).permute(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], q.shape[1] * 16)


def output_flattened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores_of(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)


def output_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written into a part of a larger tensor."""
    out = q.new_zeros(q.shape[0], q.shape[1], q.shape[2] + 1, q.shape[3])
    out[:, :, 1:] = scores_of(q, k).softmax(-1) @ v
    return out


def with_residual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = scores_of(q, k).softmax(-1) @ v
    out += q
    return out


def key_and_value_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    return (scores_of(q, k).softmax(dim=-1) @ v), k, v


class OutputEinsum(nn.Module):
    """ALBERT: heads and the output projection in one einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(48, 48)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = torch.matmul(scores_of(q, k).softmax(-1), v).transpose(2, 1)
        weight = self.dense.weight.t().view(3, 16, 48).to(context.dtype)
        return torch.einsum("bfnd,ndh->bfh", context, weight) + self.dense.bias


# ---- the weights are wanted as well


def weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    attn_weights = F.softmax(scores_of(q, k), dim=-1)
    return torch.matmul(attn_weights, v), attn_weights


def weights_averaged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scores_of(q, k).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(5).bool(), -1e9).softmax(-1)
    return weights @ v, weights.mean(dim=1)


def weights_penalised(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """An auxiliary loss of the weights' entropy."""
    weights = scores_of(q, k).softmax(-1)
    entropy = -(weights * (weights + 1e-9).log()).sum(-1).mean()
    return weights @ v, 0.01 * entropy


class WeightsKept(nn.Module):
    """For pictures of the attention, later."""

    weights: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attn = scores_of(q, k).softmax(dim=-1)
        self.weights = attn.detach()
        return attn @ v


class WeightsKeptWithGraph(WeightsKept):
    """The annotated transformer: self.attn, with its history."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.weights = scores_of(q, k).softmax(dim=-1)
        return torch.matmul(self.weights, v)


# ---- torch's own modules


class SelfAttention(nn.Module):
    """nn.MultiheadAttention as most call it: the weights come back and are thrown away."""

    def __init__(self, **how) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x)[0]


class SelfAttentionWeights(SelfAttention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attn(x, x, x, need_weights=True)


class SelfAttentionWithoutWeights(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class SelfAttentionMasked(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attn(x, x, x, attn_mask=mask)[0]


class SelfAttentionPadded(SelfAttention):
    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        return self.attn(x, x, x, key_padding_mask=padded)[0]


class SelfAttentionMaskedAndPadded(SelfAttention):
    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attn(x, x, x, attn_mask=mask, key_padding_mask=padded, need_weights=False)[0]


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 3, kdim=16, vdim=16, batch_first=True)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.attn(x, context, context, average_attn_weights=False)[0]


class BiasKeyValue(SelfAttention):
    """One learned key and one of zeros beside those of the sequence; the length comes first."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.attn = nn.MultiheadAttention(24, 3, add_bias_kv=True, add_zero_attn=True)


def EncoderLayer() -> nn.Module:
    return nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True)


class CausalEncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, src_mask=mask, is_causal=True)


def DecoderLayer() -> nn.Module:
    return nn.TransformerDecoderLayer(24, 3, 32, dropout=0.0, batch_first=True)


# ---- F.scaled_dot_product_attention, called by hand


def sdpa_with_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=False)


def sdpa_with_repeated_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


# ---- caches


class StaticCache(nn.Module):
    """A cache of fixed length, written at cache_position; what is not written yet is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(2, 3, 16, 8))
        self.register_buffer("v_cache", torch.zeros(2, 3, 16, 8))
        self.qkv = nn.Linear(24, 72)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 3, 8).permute(2, 0, 3, 1, 4)
        self.k_cache.index_copy_(2, position, k)
        self.v_cache.index_copy_(2, position, v)
        mask = torch.arange(16)[None, :] <= position[:, None]
        scores = torch.matmul(q, self.k_cache.transpose(2, 3)) * 8**-0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return torch.matmul(scores.softmax(-1), self.v_cache).transpose(1, 2).reshape(b, s, c)


class SlicedCache(StaticCache):
    """Only the part that is written is read."""

    def forward(self, x: Tensor, start: int) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 3, 8).permute(2, 0, 3, 1, 4)
        self.k_cache[:, :, start : start + s] = k
        self.v_cache[:, :, start : start + s] = v
        keys, values = self.k_cache[:, :, : start + s], self.v_cache[:, :, : start + s]
        return torch.matmul(scores_of(q, keys).softmax(-1), values).transpose(1, 2).reshape(b, s, c)


class GrowingCache(nn.Module):
    """Past keys in front of new ones, and both handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(24, 72)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, s, c = x.shape
        q, k, v = (y.view(b, s, 3, 8).transpose(1, 2) for y in self.c_attn(x).split(24, dim=2))
        k, v = torch.cat((past[0], k), dim=-2), torch.cat((past[1], v), dim=-2)
        n = k.shape[-2]
        mask = torch.ones(n, n, dtype=torch.bool).tril()[n - s :]
        out = torch.where(mask, scores_of(q, k), torch.finfo(x.dtype).min).softmax(-1) @ v
        return out.transpose(1, 2).reshape(b, s, c), (k, v)


def eight_bit_cache(q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    """Keys and values of 8 bits, with a scale for each token."""
    k, v = k.to(q.dtype) * k_scale, v.to(q.dtype) * v_scale
    return F.softmax(scores_of(q, k), dim=-1) @ v


def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every operand of both products in 8 bits, as when a model is prepared for them."""

    def eight_bits(x: Tensor, step: float) -> Tensor:
        return (x / step).round().clamp(-128, 127) * step

    scores = torch.matmul(eight_bits(q, 0.03), eight_bits(k, 0.03).transpose(-1, -2)) / math.sqrt(q.size(-1))
    return torch.matmul(eight_bits(scores.softmax(-1), 1 / 127), eight_bits(v, 0.03))


# ---- in parts


def head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for head in range(q.shape[1]):
        outs.append(scores_of(q[:, head], k[:, head]).softmax(dim=-1) @ v[:, head])
    return torch.stack(outs, dim=1)


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """diffusers' SlicedAttnProcessor: heads folded into the batch, a few at a time into a tensor of zeros."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype)
    for start in range(0, q.shape[0], 2):
        part = slice(start, start + 2)
        empty = torch.empty(2, q.shape[1], k.shape[1], dtype=q.dtype)
        scores = torch.baddbmm(empty, q[part], k[part].transpose(-1, -2), beta=0, alpha=0.25)
        out[part] = torch.bmm(scores.softmax(dim=-1), v[part])
    return out


def queries_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([(part @ k.mT * 0.25).softmax(-1) @ v for part in q.split(4, dim=2)], dim=2)


def rounds_of_one_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same attention again and again (a Hopfield network, a shared layer)."""
    for _ in range(3):
        q = F.softmax(scores_of(q, k), dim=-1) @ v
    return q


def while_it_lasts(q: Tensor, k: Tensor, v: Tensor, rounds: Tensor) -> Tensor:
    """As many rounds as a tensor says."""

    def more(left: Tensor, q: Tensor) -> Tensor:
        return left > 0

    def once(left: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return left - 1, (F.softmax(scores_of(q, k), dim=-1) @ v).clone()

    return while_loop(more, once, (rounds, q))[1]


class LearnedMemory(nn.Module):
    """Persistent keys and values beside those of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.mem_k, self.mem_v = (nn.Parameter(torch.zeros(3, 4, 16)) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.cat((self.mem_k.expand(q.shape[0], -1, -1, -1), k), dim=2)
        v = torch.cat((self.mem_v.expand(q.shape[0], -1, -1, -1), v), dim=2)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.25
        causal = torch.ones(q.shape[2], k.shape[2] - 4, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(F.pad(causal, (4, 0), value=False), -torch.finfo(scores.dtype).max)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


_G = "outputs and surroundings"
_PADDED = given(lambda: torch.arange(11) >= torch.tensor([[11], [6]]))
_X = hidden()


def _bytes(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randint(-100, 100, (2, 3, 11, 16), dtype=torch.int8) for _ in range(2))


def _scales(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.rand(2, 3, 11, 1).to(dtype) / 64 for _ in range(2))


def _past(dtype: torch.dtype) -> tuple[tuple[Tensor, ...]]:
    return (tuple(torch.randn(2, 2, 3, 5, 8).to(dtype).unbind(0)),)


_QUERY: Inputs = noise((2, 3, 7, 16))
_OUTPUTS = (output_viewed, output_reshaped, output_flattened, output_in_place, with_residual)
_WEIGHTS = (weights_returned, weights_averaged, weights_penalised)

SURROUNDINGS = (
    *(function(_G, f, heads()) for f in (*_OUTPUTS, *_WEIGHTS)),
    function(_G, key_and_value_returned, noise((2, 7, 3, 16), (2, 11, 3, 16), (2, 11, 3, 16))),
    module(_G, OutputEinsum, heads()),
    module(_G, WeightsKept, heads()),
    module(_G, WeightsKeptWithGraph, heads(), training=False),
    *(module(_G, kind, _X) for kind in (SelfAttention, SelfAttentionWeights, SelfAttentionWithoutWeights)),
    module(_G, SelfAttentionMasked, _X),
    *(module(_G, kind, joined(_X, _PADDED)) for kind in (SelfAttentionPadded, SelfAttentionMaskedAndPadded)),
    module(_G, CrossAttention, noise((2, 7, 24), (2, 11, 16))),
    module(_G, BiasKeyValue, noise((11, 2, 24))),
    *(module(_G, kind, _X) for kind in (EncoderLayer, CausalEncoderLayer)),
    module(_G, DecoderLayer, noise((2, 7, 24), (2, 11, 24)), sites=2),
    function(_G, sdpa_plain, heads()),
    function(_G, sdpa_with_triangle, square()),
    function(_G, sdpa_with_repeated_keys, square(heads=6, kv_heads=2)),
    module(_G, StaticCache, joined(noise((2, 3, 24)), given(lambda: torch.arange(5, 8))), training=False),
    module(_G, SlicedCache, joined(noise((2, 3, 24)), given(lambda: 5)), training=False),
    module(_G, GrowingCache, joined(noise((2, 4, 24)), _past)),
    function(_G, eight_bit_cache, joined(_QUERY, _bytes, _scales)),
    function(
        _G,
        rounded,
        heads(),
        exception="round(127 p) / 127 needs p itself, once its row's sum is known, and the rounded weights of a row do "
        "not sum to 1; a kernel that keeps p times an unknown factor until the end cannot round it",
    ),
    function(_G, while_it_lasts, joined(heads(), given(lambda: torch.tensor(2))), training=False),
    function(_G, head_by_head, heads(), sites=3),
    module(_G, modules.HeadByHead, _X, sites=3),
    function(_G, sliced, noise((6, 7, 16), (6, 11, 16), (6, 11, 16)), sites=3),
    function(_G, queries_in_chunks, heads(), sites=2),
    function(_G, rounds_of_one_layer, heads(), sites=3),
    module(_G, LearnedMemory, square()),
    module(_G, modules.Cross, hidden(14)),
    module(_G, modules.Checkpointed, _X, sites=2),
)
