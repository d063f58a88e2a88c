"""Models whose constructor loads weights that are not there: random numbers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from attn_fuse.explain.weights import random_weights


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
