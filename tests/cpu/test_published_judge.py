"""The judge of published models: what it calls wrong, and what is eager's own rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from zoo import measure

# Less than the judge's noise, and more than a rounding of float32.
MARGIN = 4e-7


class Attention(nn.Module):
    """what: "smooth", "kinked" by a relu at its first output, or "chosen" from two outputs there, as roundings fall."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.value = nn.Linear(16, 16)
        self.what = what
        self.bound: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = torch.softmax(x @ x.mT, -1) @ (self.value(x) + 4)
        if self.what == "smooth":
            return out.tanh()
        if self.bound is None:
            self.bound = out.detach() * (1 - MARGIN)
        bound = self.bound.to(out)
        return out + torch.relu(out - bound) if self.what == "kinked" else torch.where(out > bound, out, -out)


def setting(what: str) -> measure.Setting:
    def build() -> Any:
        torch.manual_seed(0)
        model, x = Attention(what), torch.randn(2, 32, 16)
        model.double()(x.double())
        return model.float(), (x,), {}

    return measure.Setting(build, "training")


def rounded(model: nn.Module) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with measure.Rounded(99):
            return model(*args)

    return call


def judged(monkeypatch: pytest.MonkeyPatch, what: str, by: measure.Compile) -> measure.Row:
    monkeypatch.setattr(measure.Setting, "ours", lambda self, inner: by)
    nothing = measure.Result([], {}, {})
    return measure.compared(measure.Row("package", "case", "training"), setting(what), nothing, nothing)


def test_a_relu_that_another_rounding_switches_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    row = judged(monkeypatch, "kinked", rounded)
    assert row.far > measure.NEAR and row.kinked and not row.wrong


@pytest.mark.parametrize("what", ["smooth", "kinked"])
def test_another_scale_is_a_mistake(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    row = judged(monkeypatch, what, lambda model: lambda x: model(x * 1.05))
    assert row.wrong and not row.kinked


def test_outputs_that_are_far_are_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = judged(monkeypatch, "chosen", rounded)
    assert row.wrong and not row.kinked


def test_what_is_near_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    row = judged(monkeypatch, "smooth", rounded)
    assert row.far <= measure.NEAR and not row.wrong and not row.kinked
