"""What an argument of a constructor is, by what the constructor builds with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from attn_fuse.explain.building.built_with import value_built_with
from attn_fuse.explain.building.sizes import DEPTH, KERNEL, VOCABULARY, WIDTH


class Inner(nn.Module):
    def __init__(self, these: int, n_heads: int, those: int) -> None:
        super().__init__()
        self.layer = nn.Linear(n_heads * 8, these)
        self.table = nn.Embedding(those, 8)


class Model(nn.Module):
    def __init__(self, a, b, c, d, e, f, g, h, i, j, k, m, n, o, q) -> None:
        super().__init__()
        self.first = nn.Linear(a, 2 * b)
        self.table = nn.Embedding(num_embeddings=c + 1, embedding_dim=b)
        self.layers = nn.ModuleList([nn.Linear(b, b) for _ in range(d)])
        self.more = [None] * e
        self.f = f
        self.mix = nn.Conv1d(b, self.f, g)
        self.drop = torch.nn.Dropout(h)
        self.attends = nn.MultiheadAttention(b, i)
        if j and not k:
            self.last = nn.Linear(b, b)
        self.inner = Inner(m, n_heads=n, those=o)
        self.kept = q


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a", WIDTH), ("b", WIDTH), ("c", VOCABULARY), ("d", DEPTH), ("e", DEPTH), ("f", WIDTH), ("g", KERNEL),
        ("h", 0.0), ("i", 4), ("j", False), ("k", False), ("m", WIDTH), ("n", 4), ("o", VOCABULARY), ("q", None),
        ("r", None),
    ],
)  # fmt: skip
def test_what_an_argument_is(name: str, value: Any) -> None:
    found = value_built_with(Model, name, {})
    assert found == value and type(found) is type(value)


def test_the_values_beside_it_count() -> None:
    assert value_built_with(Model, "a", {"d_model": 48}) == 48
    assert value_built_with(Model, "i", {"d_model": 128}) == 2


class Endless(nn.Module):
    def __init__(self, x) -> None:
        super().__init__()
        self.other = EndlessToo(x)


class EndlessToo(nn.Module):
    def __init__(self, x) -> None:
        super().__init__()
        self.other = Endless(x)


def test_it_ends() -> None:
    assert value_built_with(Endless, "x", {}) is None


def test_without_source_nothing_is_known() -> None:
    assert value_built_with(type("Made", (nn.Module,), {"__init__": eval("lambda self, x: None")}), "x", {}) is None
    assert value_built_with(torch.Tensor, "x", {}) is None


class Pooled(nn.Module):
    def __init__(self, width: int, pool: str = "cls", depth: int = 40, is_wide: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(width, depth)


class HandsOn(nn.Module):
    def __init__(self, pooling, how_deep, wide) -> None:
        super().__init__()
        self.pooling = pooling
        self.model = Pooled(8, pool=self.pooling, depth=how_deep, is_wide=wide)


def test_a_choice_is_what_the_inner_class_has_by_default() -> None:
    assert value_built_with(HandsOn, "pooling", {}) == "cls"
    # By its name, which tells a size before the default does.
    assert value_built_with(HandsOn, "how_deep", {}) == DEPTH
    assert value_built_with(HandsOn, "wide", {}) is False
