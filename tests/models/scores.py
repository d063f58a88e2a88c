"""Scores and their scale, in the ways not in plain.py: scales that are tensors, products spelled otherwise, layouts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import modules, plain
from tests.models.spelling import function, given, heads, heads_last, hidden, joined, module, noise, square

# ---- scale


def by_argument(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return ((q @ k.mT) * scale).softmax(-1) @ v


def divided_by_argument(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    return ((q @ k.mT) / temperature).softmax(-1) @ v


def by_sqrt_of_whole_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d_k = torch.tensor(q.shape[-1])
    return torch.matmul(F.softmax(torch.matmul(q, k.transpose(-1, -2)) / torch.sqrt(d_k), dim=-1), v)


def by_float_of_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = torch.sqrt(torch.FloatTensor([k.shape[-1]]))
    return torch.softmax(q @ k.mT / scale, -1) @ v


def by_power_of_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / torch.tensor(float(q.size(-1))) ** 0.5).softmax(-1) @ v


def by_pow_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.div(q @ k.mT, math.pow(q.size(-1), 0.5))).softmax(-1) @ v


def by_mul_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.mul(torch.matmul(q, k.mT), 1 / math.sqrt(q.shape[-1])).softmax(-1).matmul(v)


def cosine_constant(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10).softmax(-1) @ v


def cosine_by_norms(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    q = q / q.norm(dim=-1, keepdim=True)
    k = k / k.norm(dim=-1, keepdim=True)
    return ((q @ k.mT) * scale.clamp(max=4.6).exp()).softmax(-1) @ v


class ScaleParameter(nn.Module):
    """One learned temperature for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(torch.matmul(q, k.transpose(-2, -1)) * self.scale, dim=-1) @ v


class ScaleBuffer(nn.Module):
    """The root of head_dim, kept as a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.sqrt(torch.tensor(16.0)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / self.scale, dim=-1) @ v


class TemperaturePerHead(nn.Module):
    """XCiT and Restormer keep a temperature a head; here it is on ordinary scores."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * self.temperature).softmax(dim=-1) @ v


# ---- products


def softmax_positional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(F.softmax(torch.matmul(q, k.transpose(3, 2)) / math.sqrt(16), -1), v)


def softmax_by_keywords(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(input=torch.softmax(input=q @ k.mT * 0.25, dim=3), other=v)


def key_by_swapaxes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ torch.swapaxes(k, -1, -2) * 0.25).softmax(-1) @ v


def key_by_movedim(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.movedim(-1, -2) * 0.25).softmax(-1) @ v


def key_kept_transposed(q: Tensor, kt: Tensor, v: Tensor) -> Tensor:
    return (torch.matmul(q, kt) / math.sqrt(q.size(-1))).softmax(-1) @ v


def einsum_for_values_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.matmul(q, k.transpose(-1, -2)) * 0.25).softmax(-1)
    return torch.einsum("bhts,bhsd->bhtd", weights, v)


def einsum_straight_to_len_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.25).softmax(-1)
    return torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2)


def products_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q[:, :, :, None, :] * k[:, :, None, :, :]).sum(-1) / math.sqrt(q.size(-1))
    return scores.softmax(-1) @ v


def values_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.25).softmax(dim=-1)
    return (weights.unsqueeze(-1) * v.unsqueeze(2)).sum(dim=3)


def linear_as_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head, one sequence: F.linear multiplies with the transpose of its second argument."""
    return F.linear(F.softmax(F.linear(q, k) / math.sqrt(k.size(-1)), dim=-1), v.t())


def mm_of_matrices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.mm(torch.softmax(torch.mm(q, k.t()) * q.size(1) ** -0.5, dim=1), v)


def baddbmm_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    zeros = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    return torch.bmm(torch.baddbmm(zeros, q, k.transpose(1, 2), alpha=0.25).softmax(2), v)


def five_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8), dim=-1), v)


def one_tensor_for_all(x: Tensor) -> Tensor:
    return F.softmax(x @ x.transpose(-2, -1) / math.sqrt(x.size(-1)), dim=-1) @ x


def slices_of_one(x: Tensor) -> Tensor:
    q, k, v = x[..., :16], x[..., 16:32], x[..., 32:]
    return (q @ k.transpose(-2, -1) / math.sqrt(16)).softmax(-1) @ v


def past_and_new(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
    k, v = torch.cat((past_k, k), dim=-2), torch.cat((past_v, v), dim=-2)
    return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1) @ v


# ---- packed projections


class ThreeSlices(nn.Module):
    """Query, key and value as three ranges of the packed projection's columns."""

    def __init__(self) -> None:
        super().__init__()
        self.Wqkv = nn.Linear(24, 72)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv = self.Wqkv(x)
        q = qkv[:, :, :c].reshape(b, t, 3, 8).permute(0, 2, 1, 3)
        k = qkv[:, :, c : 2 * c].reshape(b, t, 3, 8).permute(0, 2, 3, 1)
        v = qkv[:, :, 2 * c :].reshape(b, t, 3, 8).permute(0, 2, 1, 3)
        weights = F.softmax(torch.matmul(q, k) / math.sqrt(8), dim=-1)
        return torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(b, t, c)


class ChunkedHeads(nn.Module):
    """GPT-NeoX's packing without a mask: each head's query, key and value next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(24, 72)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        mixed = self.query_key_value(x).view(b, t, 3, 24)
        q, k, v = (y.transpose(1, 2) for y in mixed.chunk(3, dim=-1))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8)
        return torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(b, t, c)


class ThreeProjections(nn.Module):
    """BERT's self attention with nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(24, 24) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], 3, 8).permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = (self.split(f(hidden_states)) for f in (self.query, self.key, self.value))
        probs = nn.functional.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8), dim=-1)
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        return context.view(*context.size()[:-2], 24)


_G = "scores and scale"
_SIGNS = (plain.zero, plain.negative)  # look-alikes
_ONE_HEAD = noise((2, 7, 16), (2, 11, 16), (2, 11, 16))

SCORES = (
    *(function(_G, f, heads()) for f in plain.SCALES if f not in _SIGNS),
    *(function(_G, f, heads()) for f in plain.PRODUCTS),
    *(function(_G, f, heads_last()) for f in plain.LAYOUTS if f is not plain.sbhd_bmm),
    function(_G, plain.sbhd_bmm, noise((7, 2, 3, 16), (11, 2, 3, 16), (11, 2, 3, 16))),
    *(function(_G, f, _ONE_HEAD) for f in plain.WITHOUT_HEADS),
    function(_G, by_argument, joined(heads(), noise(())), "scale_argument"),
    function(_G, by_argument, joined(heads(), noise((3, 1, 1))), "scale_argument_per_head"),
    function(_G, divided_by_argument, joined(heads(), given(lambda: torch.tensor(3.0)))),
    function(_G, by_sqrt_of_whole_tensor, heads()),
    function(_G, by_float_of_tensor, heads()),
    function(_G, by_power_of_tensor, heads()),
    function(_G, by_pow_half, heads()),
    function(_G, by_mul_function, heads()),
    function(_G, cosine_constant, heads()),
    function(_G, cosine_by_norms, joined(heads(), noise((3, 1, 1)))),
    module(_G, ScaleParameter, heads()),
    module(_G, ScaleBuffer, heads()),
    module(_G, TemperaturePerHead, heads()),
    module(_G, modules.Learned, hidden(), "SwinV2Cosine"),
    function(_G, plain.divided_by_sqrt, heads(), "divided_by_sqrt_dynamic", dynamic=True),
    function(_G, plain.number_on_the_left, heads(), "constant_scale_dynamic", dynamic=True),
    function(_G, softmax_positional, heads()),
    function(_G, softmax_by_keywords, heads()),
    function(_G, key_by_swapaxes, heads()),
    function(_G, key_by_movedim, heads()),
    function(_G, key_kept_transposed, noise((2, 3, 7, 16), (2, 3, 16, 11), (2, 3, 11, 16))),
    function(_G, einsum_for_values_only, heads()),
    function(_G, einsum_straight_to_len_first, heads()),
    function(_G, products_summed, heads()),
    function(_G, values_summed, heads()),
    function(_G, linear_as_product, noise((7, 16), (11, 16), (11, 16))),
    function(_G, mm_of_matrices, noise((7, 16), (11, 16), (11, 16))),
    function(_G, baddbmm_zeros, _ONE_HEAD),
    function(_G, five_dimensions, noise((2, 5, 3, 7, 8), (2, 5, 3, 11, 8), (2, 5, 3, 11, 8))),
    function(_G, one_tensor_for_all, noise((2, 3, 7, 16))),
    function(_G, slices_of_one, noise((2, 3, 7, 48))),
    function(_G, past_and_new, joined(square(4), noise((2, 3, 7, 16), (2, 3, 7, 16)))),
    function(_G, plain.divided_by_sqrt, heads(value_dim=24), "other_value_dim"),
    function(_G, plain.divided_by_sqrt, heads(q_len=1), "one_query"),
    function(_G, plain.divided_by_sqrt, heads(batch=1), "batch_of_one"),
    function(_G, plain.bshd_transposed, heads_last(batch=1), "batch_of_one_len_first"),
    *(module(_G, kind, hidden()) for kind in (modules.Timm, modules.Indexed, modules.LucidViT)),
    *(module(_G, kind, hidden()) for kind in (ThreeSlices, ChunkedHeads, ThreeProjections)),
)
