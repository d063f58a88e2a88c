"""Tables looked up once before the attention: the operator's values and gradients against torch's own indexing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.kernels.score.apart import add_up, look_up
from attn_fuse.kernels.score.program import ScoreProgram

BATCH, HEADS, Q_LEN, KV_LEN = 2, 3, 5, 7
DISTANCE = ["minimum", ["maximum", ["add", ["sub", ["j"], ["i"]], ["number", 0]], ["const", 0]], ["const", 8]]


@dataclass(frozen=True)
class Lookup:
    """What the program looks up, and the same indexed in torch: (table, places, positions of heads) -> bias."""

    tree: list[Any]
    table: tuple[int, ...]
    places: tuple[int, ...]
    indexed: Callable[[Tensor, Tensor, Tensor], Tensor]
    shape: tuple[int, ...]


H = torch.arange(HEADS).view(1, -1, 1, 1)
FAR = (torch.arange(KV_LEN)[None, :] - torch.arange(Q_LEN)[:, None] + 4).clamp(0, 8)
LOOKUPS = {
    "distances": Lookup(
        ["gather", 0, DISTANCE, ["h"]], (9, HEADS), (1,), lambda t, at, h: t[FAR, h], (1, HEADS, Q_LEN, KV_LEN)
    ),
    "stored": Lookup(
        ["gather", 0, ["input", 1], ["h"]], (9, HEADS), (1, 1, Q_LEN, KV_LEN), lambda t, at, h: t[at, h],
        (1, HEADS, Q_LEN, KV_LEN),
    ),
    "stored for each batch entry": Lookup(
        ["gather", 0, ["input", 1], ["h"]], (9, HEADS), (BATCH, 1, Q_LEN, KV_LEN), lambda t, at, h: t[at, h],
        (BATCH, HEADS, Q_LEN, KV_LEN),
    ),
    "the same for all heads": Lookup(
        ["gather", 0, ["input", 1]], (9,), (1, 1, Q_LEN, KV_LEN), lambda t, at, h: t[at], (1, 1, Q_LEN, KV_LEN)
    ),
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def arguments(lookup: Lookup, dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    table = torch.randn(lookup.table, dtype=dtype, requires_grad=True)
    # Some are counted from the end.
    inputs = [table, torch.randint(-9, 9, lookup.places)]
    return [inputs, [4], BATCH, HEADS, Q_LEN, KV_LEN, ScoreProgram(lookup.tree).dumps()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_values_and_gradients(lookup: Lookup, dtype: torch.dtype) -> None:
    how = arguments(lookup, dtype)
    table, places = how[0]
    found = look_up(*how)
    expected = lookup.indexed(table, places, H)
    assert found.shape == lookup.shape and found.dtype == dtype
    # A kernel reads its rows by vectors.
    assert found.stride(2) % 16 == 0 and found.stride(3) == 1
    torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=0)
    above = torch.randn(found.shape, dtype=dtype)
    (gradient,) = torch.autograd.grad(found, table, above)
    exact = table.detach().double().requires_grad_()
    (of_exact,) = torch.autograd.grad(lookup.indexed(exact, places, H).expand_as(found), exact, above.double())
    torch.testing.assert_close(gradient, of_exact.to(dtype))


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_opcheck(lookup: Lookup) -> None:
    how = arguments(lookup)
    torch.library.opcheck(look_up, how)
    inputs, numbers, batch, heads, *_, program = how
    detached = [inputs[0].detach(), inputs[1]]
    torch.library.opcheck(add_up, (torch.randn(lookup.shape), detached, numbers, batch, heads, program))


def test_strips_of_queries_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    how = arguments(LOOKUPS["stored"])
    above = torch.randn(LOOKUPS["stored"].shape)
    (whole,) = torch.autograd.grad(look_up(*how), how[0][0], above)
    monkeypatch.setattr("attn_fuse.kernels.score.program._STRIP", 2 * HEADS * KV_LEN)
    (strips,) = torch.autograd.grad(look_up(*how), how[0][0], above)
    torch.testing.assert_close(strips, whole)
