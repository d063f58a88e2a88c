"""Attention without a mask, in the ways people write scores, scale, softmax and the product with the value.

Each takes query, key and value as [batch, heads, len, head_dim] unless its tuple says otherwise. Names follow the
programs that they were found in, not this project.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- scale


def divided_by_sqrt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1)), dim=-1) @ v


def times_power(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) * k.shape[-1] ** -0.5).softmax(dim=-1) @ v


def number_on_the_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (0.25 * (q @ k.mT)).softmax(-1) @ v


def on_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * q.shape[-1] ** -0.5
    return (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v


def query_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q / math.sqrt(q.shape[-1])
    return nn.Softmax(dim=-1)(torch.matmul(q, k.transpose(2, 3))) @ v


def on_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ (k * 0.3).permute(0, 1, 3, 2), dim=3) @ v


def on_transposed_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ (k.mT * 0.3), dim=3) @ v


def on_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = q.shape[-1] ** -0.25
    return ((q * scale) @ (k * scale).transpose(-1, -2)).softmax(-1) @ v


def both_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    root = math.sqrt(math.sqrt(q.shape[-1]))
    return ((q / root) @ (k / root).mT).softmax(-1) @ v


def absent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def on_query_then_on_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (((q * 0.5) @ k.mT) * 0.4).softmax(-1) @ v


def divided_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.size(-1)) / 3).softmax(-1) @ v


def by_tensor_made_in_graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = torch.full([], v.size(-1) ** 0.5, dtype=v.dtype, device=v.device)
    return (q @ k.mT / scale).softmax(-1) @ v


def by_sqrt_of_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / torch.sqrt(torch.tensor(float(q.shape[-1])))).softmax(-1) @ v


def by_rsqrt_of_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * torch.rsqrt(torch.tensor(16.0))).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = q @ k.transpose(-2, -1)
    att *= 0.25
    att = att.softmax(-1)
    return att @ v


def divided_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).div_(math.sqrt(q.size(-1))).softmax(-1) @ v


def zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.0).softmax(-1) @ v


def negative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * -0.25).softmax(-1) @ v


SCALES = (
    divided_by_sqrt, times_power, number_on_the_left, on_query, query_divided, on_key, on_transposed_key, on_both,
    both_divided, absent, on_query_then_on_scores, divided_twice, by_tensor_made_in_graph, by_sqrt_of_tensor,
    by_rsqrt_of_tensor, in_place, divided_in_place, zero, negative,
)  # fmt: skip


# ---- scores and products


def einsum_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bhkd->bhqd", att.softmax(-1), v)


def einsum_other_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.einsum("...qd,...kd->...qk", q * 0.25, k)
    return torch.einsum("...ij,...jd->...id", att.softmax(-1), v)


def einsum_for_scores_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.einsum("nhld,nhsd->nhls", q, k) * 0.25).softmax(-1) @ v


def einsum_key_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.einsum("bhkd,bhqd->bhqk", k, q) * 0.25
    return torch.einsum("bhkd,bhqk->bhqd", v, att.softmax(-1))


def scores_transposed_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((k @ q.mT).mT * 0.25).softmax(-1) @ v


def softmax_over_rows_of_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT * 0.25).softmax(-2).mT @ v


def scores_transposed_for_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).transpose(2, 3).softmax(2).transpose(2, 3) @ v


def value_on_the_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.mT @ (q @ k.mT * 0.25).softmax(-1).mT).mT


def key_made_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1).contiguous() / math.sqrt(q.size(-1))).softmax(-1) @ v


def through_three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    att = torch.bmm(q * d**-0.5, k.transpose(1, 2))
    out = torch.bmm(F.softmax(att, dim=-1), v)
    return out.view(b, h, s, d)


def key_through_three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, d = k.shape
    kt = k.reshape(b * h, s, d).transpose(1, 2).reshape(b, h, d, s)
    return (q @ kt * 0.25).softmax(-1) @ v


def softmax_in_three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, d = q.shape
    att = torch.matmul(q, k.transpose(-2, -1)).view(b * h, s, -1)
    att = nn.functional.softmax(att / math.sqrt(d), dim=-1)
    return torch.bmm(att, v.reshape(b * h, -1, d)).view(b, h, s, d)


def baddbmm_empty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    empty = torch.empty(b * h, s, k.shape[1], dtype=q.dtype, device=q.device)
    att = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=d**-0.5)
    return torch.bmm(att.softmax(dim=-1), v).reshape(b, h, s, d)


PRODUCTS = (
    einsum_letters, einsum_other_letters, einsum_for_scores_only, einsum_key_first, scores_transposed_back,
    softmax_over_rows_of_transposed, scores_transposed_for_softmax, value_on_the_left, key_made_contiguous,
    through_three_dimensions, key_through_three_dimensions, softmax_in_three_dimensions, baddbmm_empty,
)  # fmt: skip


# ---- softmax and what follows it


def in_float32_and_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.matmul(q, k.transpose(2, 3)) * 0.25
    return torch.matmul(nn.functional.softmax(att, dim=-1, dtype=torch.float32).to(q.dtype), v)


def float_and_type_as(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = q @ k.mT * 0.25
    return F.softmax(att.float(), dim=-1).type_as(att) @ v


def operands_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = q.float() @ k.float().mT * 0.25
    return att.softmax(-1).to(v.dtype) @ v


def module_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.Softmax(dim=3)(q @ k.mT * 0.25) @ v


def dropout_that_is_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = F.dropout((q @ k.mT * 0.25).softmax(-1), p=0.3, training=False)
    return nn.Dropout(0.0)(att) @ v


def softmax_in_place_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores = scores * 0.25
    scores = scores.softmax(dim=-1)
    return torch.matmul(scores, v).contiguous()


def halves_of_the_batch_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As labml's Stable Diffusion spares memory."""
    scores = q @ k.mT * 0.25
    half = scores.shape[0] // 2
    scores[half:] = scores[half:].softmax(dim=-1)
    scores[:half] = scores[:half].softmax(dim=-1)
    return scores @ v


SOFTMAXES = (
    in_float32_and_back, float_and_type_as, operands_in_float32, module_softmax, dropout_that_is_off,
    softmax_in_place_of_scores, halves_of_the_batch_in_place,
)  # fmt: skip

PLAIN = SCALES + PRODUCTS + SOFTMAXES


# ---- other layouts: query, key and value as [batch, len, heads, head_dim]


def bshd_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), -1) @ v
    return out.transpose(1, 2).contiguous().flatten(2)


def bshd_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", att.softmax(-1), v)


def bshd_einsum_flash_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.einsum("bthd,bshd->bhts", q, k / math.sqrt(q.shape[-1]))
    return torch.einsum("bhts,bshd->bthd", torch.softmax(att, dim=-1), v).reshape(*q.shape[:2], -1)


def bshd_key_in_one_permute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) / math.sqrt(q.size(-1))
    return (att.softmax(-1) @ v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)


def sbhd_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fairseq and Megatron, read as [len, batch, heads, head_dim]."""
    s, b, h, d = q.shape
    q, k, v = (x.reshape(x.shape[0], b * h, d).transpose(0, 1) for x in (q, k, v))
    att = torch.bmm(q * d**-0.5, k.transpose(1, 2)).softmax(-1)
    return torch.bmm(att, v).transpose(0, 1).reshape(s, b, h * d)


LAYOUTS = (bshd_transposed, bshd_einsum, bshd_einsum_flash_letters, bshd_key_in_one_permute, sbhd_bmm)


# ---- without heads: [batch, len, head_dim]


def three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) * q.size(-1) ** -0.5, dim=-1), v)


def three_dimensions_unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(2), v)


def three_dimensions_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.einsum("b i d, b j d -> b i j", q, k) * 0.25
    return torch.einsum("b i j, b j d -> b i d", att.softmax(dim=-1), v)


def channels_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention block of a latent-diffusion autoencoder: query, key, value are [batch, channels, positions]."""
    q, k, v = q.mT, k.mT, v.mT
    att = torch.bmm(q.permute(0, 2, 1), k) * (int(q.shape[1]) ** (-0.5))
    att = att.softmax(dim=2).permute(0, 2, 1)
    return torch.bmm(v, att)


def two_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A textbook's single head on a single sequence: [len, head_dim]."""
    q, k, v = q[0], k[0], v[0]
    return (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1) @ v


WITHOUT_HEADS = (three_dimensions, three_dimensions_unscaled, three_dimensions_einsum, channels_first, two_dimensions)
