"""Short inputs that ran become ones of a usual length, where the model takes those, too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.running.declared import SHORT, USUAL
from attn_fuse.explain.running.guess_inputs import trial_of
from attn_fuse.explain.running.longer import longer


class Padded(nn.Module):
    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.only = only

    def forward(self, x: Tensor, batch: dict[str, Tensor], lengths: list[int]) -> Tensor:
        assert self.only in (None, x.shape[1])
        return self.layer(x) * batch["mask"][..., None]


def shapes(model: nn.Module, length: int | None = None) -> list[tuple[int, ...]]:
    trial = trial_of(model, (), False, length, 1)
    ran = trial.on(Inputs((torch.randn(1, SHORT, 6), {"mask": torch.ones(1, SHORT)}), {"lengths": [SHORT]}))
    assert ran is not None
    inputs = longer(ran, trial).inputs
    assert inputs.kwargs == {"lengths": [SHORT]} and trial.slow is None
    return [tuple(tensor.shape) for tensor in (inputs.args[0], inputs.args[1]["mask"])]


def test_every_tensor_grows() -> None:
    assert shapes(Padded()) == [(1, USUAL, 6), (1, USUAL)]


def test_a_model_of_one_length() -> None:
    assert shapes(Padded(only=SHORT)) == [(1, SHORT, 6), (1, SHORT)]


def test_a_length_that_the_user_asked_for() -> None:
    assert shapes(Padded(), length=SHORT) == [(1, SHORT, 6), (1, SHORT)]


def test_a_batch_that_the_user_asked_for() -> None:
    trial = trial_of(nn.Linear(6, 6), (), False, None, SHORT)
    ran = trial.on(Inputs((torch.randn(SHORT, USUAL, 6),)))
    assert ran is not None and longer(ran, trial) is ran


def test_maps_of_features_stay() -> None:
    class Maps(nn.Conv2d):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x) * mask

    trial = trial_of(Maps(3, 4, 1), (), False, None, 1)
    ran = trial.on(Inputs((torch.randn(1, 3, SHORT, SHORT), torch.ones(SHORT, SHORT))))
    assert ran is not None and longer(ran, trial) is ran
