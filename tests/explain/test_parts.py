"""What of a model stays where it does not run, or where its weights are not there: its parts, and random numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.parts import parts_that_ran
from attn_fuse.explain.weights import random_weights


class Attends(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).softmax(-1) @ torch.ones(self.layer.out_features, 8)


class Halves(nn.Module):
    """Fails in its last part; its first does not attend, and its small one has next to no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.first, self.second = nn.Linear(8, 8), Attends(64), nn.Sequential(Attends(256))
        self.small, self.third = nn.Softmax(-1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.small(self.second(self.first(self.plain(x)))))


def test_the_outermost_that_attend_with_their_inputs_the_largest_first() -> None:
    model, x = Halves(), torch.ones(2, 8)
    found = [*parts_that_ran(model, [Inputs((x,))])]
    assert [name for name, _, _ in found] == ["second", "first"] and found[1][1] is model.first
    assert found[1][2].args[0].shape == (2, 8)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_part_that_raised_is_none() -> None:
    model = Halves()
    model.second = nn.Sequential(Attends(256), nn.Linear(3, 3))
    found = [*parts_that_ran(model, [Inputs((torch.ones(2, 8),))])]
    assert [name for name, _, _ in found] == ["second.0", "first"]


def test_without_runs_there_are_none() -> None:
    assert [*parts_that_ran(Halves(), [])] == []


def test_hooks_go_where_nobody_asks_further() -> None:
    model = Halves()
    next(parts_that_ran(model, [Inputs((torch.ones(2, 8),))]))
    assert not any(module._forward_hooks for module in model.modules())


class TestWeights:
    def test_that_are_there_are_loaded(self, tmp_path: Path) -> None:
        given, other = nn.Linear(3, 4), nn.Linear(3, 4)
        torch.save(given.state_dict(), tmp_path / "gpt.pth")
        notes: list[str] = []
        with random_weights(notes.append):
            other.load_state_dict(torch.load(tmp_path / "gpt.pth"))
            with pytest.raises(RuntimeError, match="size mismatch"):
                nn.Linear(5, 4).load_state_dict(given.state_dict())
        torch.testing.assert_close(given.weight, other.weight)
        assert notes == []

    def test_that_are_not_are_said_and_leave_no_trace(self) -> None:
        before = torch.load, torch.hub.load_state_dict_from_url, nn.Module.load_state_dict
        notes: list[str] = []
        with pytest.raises(KeyError), random_weights(notes.append):
            state = torch.load("/nowhere/gpt.pth")["model"]
            assert nn.Linear(2, 2).load_state_dict(state) == ([], [])
            torch.hub.load_state_dict_from_url("https://nowhere.invalid/gpt.pth")
            raise KeyError
        assert notes == [
            "random weights in place of /nowhere/gpt.pth",
            "random weights in place of https://nowhere.invalid/gpt.pth",
        ]
        assert before == (torch.load, torch.hub.load_state_dict_from_url, nn.Module.load_state_dict)

    def test_an_empty_state_of_the_users_is_none_that_is_missing(self) -> None:
        with random_weights(lambda note: None), pytest.raises(RuntimeError, match="Missing key"):
            nn.Linear(2, 2).load_state_dict({})
