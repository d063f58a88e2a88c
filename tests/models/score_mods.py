"""What is done to scores and weights besides scale, bias and mask: caps, clamps, log-n, head masks, talking heads."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import modules
from tests.models.spelling import function, heads, hidden, joined, module, noise, square


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma 2 in transformers."""
    attn_weights = torch.matmul(q, k.transpose(2, 3)) * 0.25
    attn_weights = attn_weights / 30.0
    attn_weights = torch.tanh(attn_weights)
    attn_weights = attn_weights * 30.0
    attn_weights = attn_weights + torch.full((q.shape[2], k.shape[2]), float("-inf"), dtype=q.dtype).triu(1)
    return torch.matmul(F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype), v)


def softcap_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5.0 * F.tanh(scores_of(q, k) * 0.2)).softmax(-1) @ v


def softcap_with_scale_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grok: the scale and the cap in one constant."""
    s = q.shape[-2]
    logits = 30.0 * torch.tanh(torch.einsum("bhtd,bhTd->bhtT", q, k) * (0.0883 / 30.0))
    logits = torch.where(torch.ones(s, s).tril() == 1, logits, -1e30)
    return torch.softmax(logits, -1) @ v


def clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.clamp(scores_of(q, k), min=-2.0, max=2.0).softmax(-1) @ v


def clamped_in_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GLIP: against overflow, before and after the largest score is taken off."""
    scores = scores_of(q, k)
    scores = scores - scores.max()
    scores = torch.clamp(scores, min=-50000)
    scores = torch.clamp(scores, max=50000)
    return scores.softmax(dim=-1) @ v


def largest_off_then_clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grounding DINO, from text to picture."""
    scores = scores_of(q, k)
    scores = scores - torch.max(scores, dim=-1, keepdim=True)[0]
    return torch.clamp(scores, min=-50).softmax(dim=-1) @ v


def by_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GPT-2's scale_attn_by_inverse_layer_idx, in the fourth layer."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype)
    return (scores / float(3 + 1)).softmax(-1) @ v


def by_layer_and_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Megatron: divided by the layer's number in half precision, multiplied with it again before the softmax."""
    coefficient = 4
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    empty = torch.empty(b * h, s, k.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=1 / (math.sqrt(d) * coefficient))
    scores = scores.view(b, h, s, -1).float() * coefficient
    scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -10000.0)
    weights = torch.nn.Softmax(dim=-1)(scores).to(v.dtype)
    return torch.bmm(weights.view(b * h, s, -1), v).view(b, h, s, d)


def log_n(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Qwen: queries past the trained length grow with the logarithm of their position."""
    s = q.shape[2]
    factor = torch.tensor([math.log(n, 5) if n > 5 else 1.0 for n in range(1, s + 1)], dtype=q.dtype)
    q = q * factor[None, None, :, None]
    return scores_of(q, k).masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf")).softmax(-1) @ v


def log_n_on_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = torch.arange(1, q.shape[2] + 1, dtype=q.dtype)
    return (scores_of(q, k) * (n.log() / math.log(512)).clamp(min=1.0)[:, None]).softmax(-1) @ v


def scale_of_each_row(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    """A temperature computed for each query: [batch, heads, q_len, 1]."""
    return (scores_of(q, k) * temperature).softmax(dim=-1) @ v


class LogNBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        factors = [math.log(n, 5) if n > 5 else 1.0 for n in range(1, 33)]
        self.register_buffer("logn", torch.tensor(factors)[None, None, :, None], persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * self.logn[:, :, k.size(2) - q.size(2) : k.size(2), :].expand_as(q)
        return scores_of(q, k).softmax(-1) @ v


def upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """diffusers' upcast_softmax: scores in the model's dtype, softmax in float32."""
    scores = torch.baddbmm(torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype), q, k.mT, beta=0, alpha=0.25)
    scores = scores.float()
    return torch.bmm(scores.softmax(dim=-1).to(q.dtype), v)


def head_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """BERT in transformers: each head's weights times a number."""
    probs = scores_of(q, k).softmax(dim=-1)
    probs = probs * keep
    return torch.matmul(probs, v)


class HeadGate(nn.Module):
    """A learned gate for each head, on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (scores_of(q, k).softmax(-1) * self.gate.sigmoid()[None, :, None, None]) @ v


class TalkingBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.mix(scores_of(q, k).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return scores.softmax(-1) @ v


class TalkingAfter(TalkingBefore):
    """CaiT mixes the weights as well."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores_of(q, k).softmax(-1)
        return self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v


_G = "score functions"
_FOLDED = noise((6, 7, 16), (6, 11, 16), (6, 11, 16))

SCORE_MODS = (
    *(function(_G, f, square()) for f in (softcap, softcap_with_scale_inside, by_layer_and_back, log_n)),
    *(function(_G, f, heads()) for f in (softcap_alone, clamped, largest_off_then_clamped, by_layer, log_n_on_scores)),
    function(
        _G, clamped_in_steps, heads(),
        exception="a bound of -50000 below the largest score of all rows raises the scores of a row that lies lower, "
        "so every weight depends on the scores of other rows",
    ),
    function(_G, scale_of_each_row, joined(heads(), noise((2, 3, 7, 1)))),
    module(_G, LogNBuffer, heads()),
    function(_G, upcast, _FOLDED),
    function(_G, upcast, _FOLDED, "upcast_bfloat16", dtype=torch.bfloat16),
    module(_G, modules.Diffusers, hidden(), "upcast_attention"),
    function(_G, head_mask, joined(heads(), noise((1, 3, 1, 1)))),
    module(_G, HeadGate, heads()),
    module(
        _G, TalkingBefore, heads(), name="talking_heads_before",
        exception="s_g = sum over h of M_gh q_h k_h^T is one product only of the queries and keys of all heads side by "
        "side, each head heads times head_dim wide: that many times the multiplications that the program does",
    ),
    module(
        _G, TalkingAfter, heads(), name="talking_heads_after",
        exception="out_g = (sum over h of M_gh P_h) v_g mixes the softmaxes of all heads before one product with the "
        "values; in attentions it takes one for each pair of heads",
    ),
)  # fmt: skip
