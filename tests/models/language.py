"""Language models' attention, whole: projections, positions, masks. Small, and otherwise as they are published."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import modules
from tests.models.masks import both, causal_of, mapped
from tests.models.spelling import given, hidden, joined, module, noise

WIDTH, HEADS, DIM = 24, 3, 8


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().view(x.shape[0], x.shape[2], -1)


def below(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).tril()


class Projected(nn.Module):
    """Query, key and value out of one hidden state."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, self.kv_heads * DIM, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(self.q_proj(x)), split(self.k_proj(x), self.kv_heads), split(self.v_proj(x), self.kv_heads)


# ---- positions relative to each other


class T5(Projected):
    """Buckets of distance, a bias of each bucket and head, no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.relative_attention_bias = nn.Embedding(8, HEADS)

    def buckets(self, distance: Tensor, buckets: int = 8, most: int = 16) -> Tensor:
        buckets //= 2
        bucket = (distance > 0).to(torch.long) * buckets
        distance = torch.abs(distance)
        exact = buckets // 2
        large = exact + (torch.log(distance.float() / exact) / math.log(most / exact) * (buckets - exact)).to(
            torch.long
        )
        large = torch.min(large, torch.full_like(large, buckets - 1))
        return bucket + torch.where(distance < exact, distance, large)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        position = torch.arange(x.shape[1], dtype=torch.long)
        bias = self.relative_attention_bias(self.buckets(position[None, :] - position[:, None]))
        position_bias = bias.permute([2, 0, 1]).unsqueeze(0)
        position_bias = position_bias + (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += position_bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o_proj(merged(torch.matmul(weights, v)))


class TransformerXL(Projected):
    """Scores of positions by the shift that turns [query, distance] into [query, key]."""

    def __init__(self) -> None:
        super().__init__()
        self.r_net = nn.Linear(WIDTH, WIDTH, bias=False)
        self.r_w_bias, self.r_r_bias = (nn.Parameter(torch.zeros(HEADS, DIM)) for _ in range(2))

    def rel_shift(self, x: Tensor) -> Tensor:
        b, h, q, k = x.shape
        x = F.pad(x, (1, 0)).view(b, h, k + 1, q)
        return x[:, :, 1:].view(b, h, q, k)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        s = x.shape[1]
        q, k, v = self.qkv(x)
        r = self.r_net(position).view(s, HEADS, DIM)
        ac = torch.einsum("bhid,bhjd->bhij", q + self.r_w_bias[:, None], k)
        bd = self.rel_shift(torch.einsum("bhid,jhd->bhij", q + self.r_r_bias[:, None], r))
        scores = (ac + bd) * (1 / DIM**0.5)
        scores = scores.masked_fill(~below(s)[None, None], -1e30)
        return self.o_proj(merged(torch.einsum("bhij,bhjd->bhid", F.softmax(scores, dim=3), v)))


class RelativeKey(Projected):
    """BERT with relative_key: the query times an embedding of the distance."""

    both = False

    def __init__(self) -> None:
        super().__init__()
        self.distance_embedding = nn.Embedding(2 * 16 - 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        s = x.shape[1]
        left, right = torch.arange(s).view(-1, 1), torch.arange(s).view(1, -1)
        embedding = self.distance_embedding(left - right + 16 - 1).to(dtype=q.dtype)
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores + torch.einsum("bhld,lrd->bhlr", q, embedding)
        if self.both:
            scores = scores + torch.einsum("bhrd,lrd->bhlr", k, embedding)
        return merged(F.softmax(scores / math.sqrt(DIM), dim=-1) @ v)


class RelativeKeyQuery(RelativeKey):
    both = True


class Deberta(Projected):
    """Disentangled attention: content to position, gathered by distance, beside content to content."""

    def __init__(self) -> None:
        super().__init__()
        self.rel_embeddings = nn.Parameter(torch.zeros(2 * 16, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x)
        scale = 1 / math.sqrt(DIM * 2)
        pos_key = self.k_proj(self.rel_embeddings).view(2 * 16, HEADS, DIM).transpose(0, 1)
        c2p = torch.matmul(q, pos_key.transpose(-1, -2))
        relative = torch.arange(s)[:, None] - torch.arange(s)[None, :]
        index = torch.clamp(relative + 16, 0, 2 * 16 - 1).expand(b, HEADS, s, s)
        scores = torch.matmul(q, k.transpose(-1, -2)) * scale + torch.gather(c2p, dim=-1, index=index) * scale
        hidden_ = ~(mask.unsqueeze(1) & mask.unsqueeze(2)).unsqueeze(1)
        weights = scores.masked_fill(hidden_, torch.finfo(x.dtype).min).softmax(-1)
        return merged(torch.matmul(weights.masked_fill(hidden_, 0.0), v))


class Shaw(Projected):
    """Distances have an embedding for keys and one for values, which the weights are multiplied with as well."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = (nn.Embedding(9, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        position = torch.arange(x.shape[1])
        distance = (position[None, :] - position[:, None]).clamp(-4, 4) + 4
        scores = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, self.keys(distance))) / math.sqrt(DIM)
        weights = scores.softmax(-1)
        return merged(weights @ v + torch.einsum("bhij,ijd->bhid", weights, self.values(distance)))


class MPT(Projected):
    """ALiBi kept for the longest sequence and sliced from its end, queries scaled by a number."""

    def __init__(self) -> None:
        super().__init__()
        slopes = 1.0 / torch.pow(2, torch.arange(1, HEADS + 1) * (8 / HEADS)).view(1, HEADS, 1, 1)
        self.register_buffer("attn_bias", torch.arange(1 - 32, 1).view(1, 1, 1, 32) * slopes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        s_q, s_k = q.size(-2), k.size(-2)
        scores = q.matmul(k.transpose(-1, -2)) * (1 / math.sqrt(DIM))
        scores = scores + self.attn_bias[:, :, :, max(0, self.attn_bias.size(-1) - s_k) :]
        s = max(s_q, s_k)
        causal_mask = x.new_ones(s, s, dtype=torch.float16).tril().to(torch.bool).logical_not()[-s_q:, -s_k:]
        scores = scores.masked_fill(causal_mask.view(1, 1, s_q, s_k), torch.finfo(q.dtype).min)
        return self.o_proj(merged(torch.softmax(scores, dim=-1).to(v.dtype).matmul(v)))


# ---- rotary positions


class RotaryBase(Projected):
    kv_heads = 1

    def __init__(self) -> None:
        super().__init__()
        frequency = 1.0 / (100 ** (torch.arange(0, DIM, 2) / DIM))
        self.register_buffer("angles", torch.outer(torch.arange(32.0), frequency))

    def repeated(self, x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, HEADS // h, s, d).reshape(b, HEADS, s, d)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, self.repeated(k).transpose(2, 3)) / math.sqrt(DIM)
        scores = scores.masked_fill(~below(q.shape[2]), float("-inf"))
        return self.o_proj(merged(torch.matmul(scores.softmax(-1), self.repeated(v))))


class Llama(RotaryBase):
    """transformers, eager: halves rotated, position ids, a 4-D mask sliced to the keys, softmax in float32."""

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    def forward(self, x: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        angles = torch.cat([self.angles[position_ids]] * 2, dim=-1)
        cos, sin = (t.unsqueeze(1) for t in (angles.cos(), angles.sin()))
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        k, v = self.repeated(k), self.repeated(v)
        weights = torch.matmul(q, k.transpose(2, 3)) * DIM**-0.5
        weights = weights + attention_mask[:, :, :, : k.shape[-2]]
        weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = nn.functional.dropout(weights, p=0.0, training=self.training)
        return self.o_proj(torch.matmul(weights, v).transpose(1, 2).contiguous().reshape(*x.shape))


class RotaryInterleaved(RotaryBase):
    """FLUX and GPT-J: neighbours rotated."""

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = (f(self.angles[: x.shape[2]])[..., None] for f in (torch.cos, torch.sin))
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).split(1, dim=-1)
        return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return self.attend(self.rotated(q), self.rotated(k), v)


class RotaryComplex(RotaryBase):
    """Llama as Meta wrote it: complex numbers."""

    def rotated(self, x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(self.angles), self.angles)[: x.shape[2]]
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turn
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return self.attend(self.rotated(q), self.rotated(k), v)


class RotaryWritten(RotaryBase):
    """Even and odd columns written into an empty tensor."""

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = self.angles[: x.shape[2]].cos(), self.angles[: x.shape[2]].sin()
        even, odd = x[..., 0::2], x[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return self.attend(self.rotated(q), self.rotated(k), v)


class NormalisedHeads(RotaryInterleaved):
    """Qwen 3: query and key normalised head by head, before they are transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, s, HEADS, DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, s, 1, DIM)).transpose(1, 2)
        return self.attend(self.rotated(q), self.rotated(k), split(self.v_proj(x), 1))


class Gemma2(RotaryInterleaved):
    """Softcap, a sliding window, and a scale that is not that of head_dim."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        s = x.shape[1]
        weights = torch.matmul(self.rotated(q), self.repeated(self.rotated(k)).transpose(2, 3)) * 20**-0.5
        weights = torch.tanh(weights / 50.0) * 50.0
        window = torch.tril(torch.ones(s, s, dtype=torch.bool), diagonal=-4)
        mask = torch.full((s, s), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        mask = torch.where(window, torch.finfo(x.dtype).min, mask)
        weights = F.softmax(weights + mask, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj(merged(torch.matmul(weights, self.repeated(v))))


class GptOss(RotaryInterleaved):
    """A sink for each head, and a sliding window through mapped predicates."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        def sliding(batch, head, q_idx, kv_idx):
            return kv_idx > q_idx - 4

        q, k, v = self.qkv(x)
        s = x.shape[1]
        keep = mapped(both(sliding, causal_of))(*(torch.arange(n) for n in (x.shape[0], 1, s, s)))
        mask = torch.where(keep, torch.tensor(0.0, dtype=x.dtype), torch.finfo(x.dtype).min)
        weights = torch.matmul(self.rotated(q), self.repeated(self.rotated(k)).transpose(2, 3)) * DIM**-0.5 + mask
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        combined = torch.cat([weights, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        probs = F.softmax(combined, dim=-1, dtype=combined.dtype)
        return self.o_proj(merged(torch.matmul(probs[..., :-1], self.repeated(v))))


# ---- two streams


class DifferentialTransformer(nn.Module):
    """As published: twice the heads in one softmax, the second of each pair taken off the first before the values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.lambda_q, self.lambda_k = (nn.Parameter(torch.zeros(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k = (f(x).view(b, s, 2 * HEADS, 4).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        v = split(self.v_proj(x))
        scores = torch.matmul(q * 4**-0.5, k.transpose(-1, -2)).masked_fill(~below(s), float("-inf"))
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores).view(b, HEADS, 2, s, s)
        factor = torch.exp(torch.sum(self.lambda_q * self.lambda_k)) + 0.2
        return merged(torch.matmul(weights[:, :, 0] - factor * weights[:, :, 1], v))


class MMDiT(Projected):
    """SD3: text and picture side by side through one attention, then apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, picture: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        added = [split(y) for y in self.text(text).chunk(3, dim=-1)]
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(self.qkv(picture), added))
        out = merged((torch.matmul(q, k.transpose(-1, -2)) * DIM**-0.5).softmax(-1) @ v)
        picture, text = out[:, : picture.shape[1]], out[:, picture.shape[1] :]
        return self.o_proj(picture), text


_G = "language models"
_X = hidden()
_WORDS = given(lambda: torch.arange(11) < torch.tensor([[11], [6]]))


def _llama(dtype: torch.dtype) -> tuple[Tensor, ...]:
    mask = torch.full((11, 13), torch.finfo(dtype).min, dtype=dtype).triu(1).expand(2, 1, 11, 13).clone()
    mask[1, ..., :3] = torch.finfo(dtype).min
    return torch.randn(2, 11, WIDTH).to(dtype), torch.arange(11)[None], mask


LANGUAGE = (
    *(module(_G, kind, joined(_X, _WORDS)) for kind in (T5, Deberta)),
    module(_G, TransformerXL, joined(_X, noise((11, WIDTH)))),
    *(module(_G, kind, _X) for kind in (RelativeKey, RelativeKeyQuery, MPT, modules.Rotary)),
    module(_G, Shaw, _X, sites=2),
    module(_G, Llama, _llama),
    *(module(_G, kind, _X) for kind in (RotaryInterleaved, RotaryComplex, RotaryWritten, NormalisedHeads)),
    *(module(_G, kind, _X) for kind in (Gemma2, GptOss)),
    module(
        _G, DifferentialTransformer, _X,
        exception="(P1 - lambda P2) v has rows that sum to 1 - lambda and may be negative, so no one softmax gives it; "
        "only P1 v - lambda P2 v, two attentions with a product each where the program has one, is the same",
    ),
    module(_G, MMDiT, noise((2, 11, WIDTH), (2, 5, WIDTH))),
)  # fmt: skip
