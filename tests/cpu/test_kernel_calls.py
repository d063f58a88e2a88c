"""Fused attentions that a program calls itself, as reports name them; and operators that only sound like one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import attn_fuse
from attn_fuse.report import collecting
from tests.harness import tensors

S = 16
OPTIONS = {"inner_backend": "eager", "pick": "fused", "strict": True}


@torch.library.custom_op("a_library::attention_forward", mutates_args=())
def of_a_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@torch.library.custom_op("a_library::attention_bias", mutates_args=())
def bias_of_a_library(q_pos: Tensor, k_pos: Tensor, slopes: Tensor) -> Tensor:
    return (k_pos - q_pos) * slopes


@of_a_library.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@bias_of_a_library.register_fake
def _(q_pos: Tensor, k_pos: Tensor, slopes: Tensor) -> Tensor:
    return torch.empty(torch.broadcast_shapes(q_pos.shape, k_pos.shape, slopes.shape))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(48, 144)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (j - i))


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def beside_a_written_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return of_a_library(q, k, v) + written(q, k, v)


def under_a_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(S, dtype=q.dtype)
    bias = bias_of_a_library(i.view(1, S, 1), i.view(1, 1, S), torch.ones(3, 1, 1))
    return (q @ k.transpose(-2, -1) / 4 + bias).softmax(-1) @ v


@torch.no_grad()
def test_flex_attention_is_named() -> None:
    explanation = attn_fuse.explain(Packed().eval(), torch.randn(2, S, 48))
    (site,) = explanation.sites
    assert site.status == "already fused" and site.fused_by == "flex_attention"
    assert site.location.code == "return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (j - i))"
    assert "1 fused already in the program (flex_attention)" in str(explanation)
    assert "ALREADY FUSED in the program (flex_attention)" in str(explanation)
    assert "<tr><th>calls<td>flex_attention</tr>" in explanation.html()


def test_an_operator_of_a_library_is_named_beside_what_is_written() -> None:
    found = attn_fuse.explain(beside_a_written_one, *tensors(2, 3, S, 16)).sites
    assert [site.fused_by for site in found if site.status == "already fused"] == ["a_library::attention_forward"]
    assert [site.attention["heads"] for site in found if site.status != "already fused"] == ["3"]


@pytest.mark.parametrize("program", [written, under_a_bias])
def test_what_only_sounds_like_one_is_none(program) -> None:
    (site,) = attn_fuse.explain(program, *tensors(2, 3, S, 16)).sites
    assert site.status != "already fused" and not site.fused_by


@torch.no_grad()
def test_the_backend_reports_it_too() -> None:
    args = tensors(2, 3, S, 16)
    compiled = torch.compile(beside_a_written_one, backend="attn_fuse", options=OPTIONS)
    with collecting() as graphs:
        torch.testing.assert_close(compiled(*args), beside_a_written_one(*args))
    (graph,) = graphs
    assert [(site.fused, site.fused_by) for site in graph.sites] == [
        (True, ""),
        (False, "a_library::attention_forward"),
    ]
