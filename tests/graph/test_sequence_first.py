"""Inputs get the sequence as their first axis where the model attends over that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.running.declared import USUAL
from attn_fuse.explain.running.guess_inputs import inputs_for, trial_of
from attn_fuse.explain.running.sequence_first import sequence_first


class Language(nn.Module):
    """As torch's tutorial has it: tokens of [len, batch]."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src: Tensor) -> Tensor:
        return self.encoder(self.embedding(src))


class ByHand(nn.Module):
    """x: [len, batch, dim] if `first`, else [batch, len, dim]."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.query, self.first = nn.Linear(16, 16), first

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, kv = (t.transpose(0, 1) if self.first else t for t in (self.query(x), memory))
        return (q @ kv.mT).softmax(-1) @ kv


class Padded(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=batch_first)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        x = self.project(x)
        return self.attend(x, x, x, key_padding_mask=pad)[0]


class OfOne(nn.Module):
    """Attends over one key either way round: of the sequence it takes the first step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.query(x)[:1, :1]
        return (x @ x.mT).softmax(-1) @ x


@pytest.mark.parametrize(("batch_first", "shape"), [(False, (USUAL, 1)), (True, (1, USUAL))])
def test_of_an_encoder(batch_first: bool, shape: tuple[int, int]) -> None:
    assert inputs_for(Language(batch_first).eval()).args[0].shape == shape


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("first", [False, True])
def test_every_tensor_is_exchanged(batch: int, first: bool) -> None:
    model = ByHand(first)
    trial = trial_of(model, (), False, None, batch)
    given = [torch.randn(batch, 8, 16) for _ in range(2)]
    ran = trial.on(Inputs((given[0],), {"memory": given[1]}))
    assert ran is not None
    inputs = sequence_first(ran, trial).inputs
    wanted = [t.transpose(0, 1) if first else t for t in given]
    assert torch.equal(inputs.args[0], wanted[0]) and torch.equal(inputs.kwargs["memory"], wanted[1])


@pytest.mark.parametrize(("batch_first", "shape"), [(False, (USUAL, 1, 16)), (True, (1, USUAL, 16))])
def test_the_mask_of_keys_is_batch_first_all_the_same(batch_first: bool, shape: tuple[int, ...]) -> None:
    x, pad = inputs_for(Padded(batch_first)).args
    assert x.shape == shape and pad.shape == (1, USUAL) and pad.dtype is torch.bool and not pad.any()


def test_one_key_either_way_round_changes_nothing() -> None:
    assert inputs_for(OfOne()).args[0].shape[0] == 1
