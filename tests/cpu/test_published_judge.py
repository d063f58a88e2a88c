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
    def __init__(self, is_kinked: bool) -> None:
        super().__init__()
        self.value = nn.Linear(16, 16)
        self.is_kinked = is_kinked
        self.bound: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = torch.softmax(x @ x.mT, -1) @ (self.value(x) + 4)
        if not self.is_kinked:
            return out.tanh()
        if self.bound is None:
            self.bound = out.detach() * (1 - MARGIN)
        return out + torch.relu(out - self.bound.to(out))


def setting(is_kinked: bool) -> measure.Setting:
    def build() -> Any:
        torch.manual_seed(0)
        model, x = Attention(is_kinked), torch.randn(2, 32, 16)
        model.double()(x.double())
        return model.float(), (x,), {}

    return measure.Setting(build, "training")


def rounded(model: nn.Module) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with measure.Rounded(99):
            return model(*args)

    return call


def judged(monkeypatch: pytest.MonkeyPatch, is_kinked: bool, by: measure.Compile) -> measure.Row:
    monkeypatch.setattr(measure.Setting, "ours", lambda self, inner: by)
    case = setting(is_kinked)
    nothing = measure.Result([], {}, {})
    return measure.compared(measure.Row("package", "case", "training"), case, nothing, nothing)


def test_a_relu_that_another_rounding_switches_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    row = judged(monkeypatch, True, rounded)
    assert row.far > measure.NEAR and row.kinked and not row.wrong


@pytest.mark.parametrize("is_kinked", [False, True])
def test_another_scale_is_a_mistake(monkeypatch: pytest.MonkeyPatch, is_kinked: bool) -> None:
    row = judged(monkeypatch, is_kinked, lambda model: lambda x: model(x * 1.05))
    assert row.wrong and not row.kinked


class Chosen(nn.Module):
    """Which of two outputs it gives turns on a rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(16, 16)
        self.bound: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = torch.softmax(x @ x.mT, -1) @ (self.value(x) + 4)
        if self.bound is None:
            self.bound = out.detach() * (1 - MARGIN)
        return torch.where(out > self.bound.to(out), out, -out)


def test_outputs_that_are_far_are_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        model, x = Chosen(), torch.randn(2, 32, 16)
        model.double()(x.double())
        return model.float(), (x,), {}

    monkeypatch.setattr(measure.Setting, "ours", lambda self, inner: rounded)
    nothing = measure.Result([], {}, {})
    row = measure.compared(measure.Row("p", "c", "training"), measure.Setting(build, "training"), nothing, nothing)
    assert row.wrong and not row.kinked


def test_what_is_near_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    row = judged(monkeypatch, False, rounded)
    assert row.far <= measure.NEAR and not row.wrong and not row.kinked
