"""The operator on small tiles, for the tests of triton_flash in a process that interprets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from tests.graph.chunked_cases import Case
from tests.triton.interpreted import INTERPRETED

if INTERPRETED:
    from attn_fuse.kernels.triton.flash import facts
    from attn_fuse.kernels.triton.flash.configs import Config
    from attn_fuse.kernels.triton.flash.facts import CallFacts
    from attn_fuse.kernels.triton.flash.op import triton_flash


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_tiles(monkeypatch, Config(16, 32, 4, 1))


def use_tiles(monkeypatch: pytest.MonkeyPatch, tiles: Config) -> None:
    """Run every kernel with `tiles` from here on, and forget the facts of earlier calls."""
    monkeypatch.setattr(CallFacts, "config", lambda *_: tiles)
    monkeypatch.setattr(facts, "_known", {})


@pytest.fixture
def products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum products in one order whatever the tile, as tensor cores do; numpy rounds a transposed product otherwise."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from tests.triton.gluon_machine import floats

    def create_dot(self: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
        wide = floats(a.data, a.dtype.scalar) @ floats(b.data, b.dtype.scalar) + sums.data
        return TensorHandle(wide.astype(sums.data.dtype), sums.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def operator(
    case: Case,
    *tensors: Tensor,
    numbers: Sequence[int],
    seed: Tensor | None = None,
    p: float = 0.0,
    tables: tuple[Any, Any] = (None, None),
) -> Tensor:
    query, key, value, *inputs = tensors
    return triton_flash(query, key, value, inputs, numbers, seed, *tables, p, case.program.dumps(), False)[0]
