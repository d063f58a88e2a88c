"""Inputs of other sizes, as errors ask for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.repairing.asked import asked_by
from attn_fuse.explain.repairing.repaired import MOST_NUMBERS, repaired
from attn_fuse.explain.running import try_inputs
from attn_fuse.explain.running.guess_inputs import inputs_for

Call = Callable[..., Any]


def leads_to(program: Call, inputs: Inputs, steps: int = 3) -> bool:
    """Whether the program runs on `inputs`, or on some that its errors lead to."""
    try:
        program(*inputs.args, **inputs.kwargs)
    except Exception as error:
        return steps > 0 and any(leads_to(program, other, steps - 1) for other in repaired(inputs, asked_by(error)))
    return True


def asserts_sides(x: Tensor) -> None:
    assert x.shape[-2:] == (32, 96)


@pytest.mark.parametrize(
    ("program", "shape"),
    [
        (nn.Linear(7, 3), (1, 8, 256)),
        (nn.Conv1d(7, 3, 1), (1, 3, 16)),
        (nn.Conv2d(7, 3, 1), (1, 3, 16, 16)),
        (nn.LayerNorm(7), (1, 8, 256)),
        (nn.LSTM(7, 3, batch_first=True), (1, 8, 256)),
        (nn.BatchNorm1d(7), (2, 3, 16)),
        (nn.MultiheadAttention(8, 2, batch_first=True), (1, 8, 256)),
        (lambda x: x + torch.zeros(1, 12, 256), (1, 8, 256)),
        (lambda x: torch.cat([torch.zeros(1, 2, 7), x], 1), (1, 8, 256)),
        (lambda x: x.new_zeros(x.shape[0], 8, 7).expand(-1, -1, 7).copy_(x), (1, 8, 256)),
        # Frames of 9 samples, which a linear layer takes.
        (lambda x: nn.Linear(90, 2)(x.unfold(1, 9, 9).flatten(1)), (1, 27)),
        # Learned positions of a picture's 16 patches, with one more token or none.
        (lambda x: x.unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3)[:, 0] + torch.zeros(1, 16, 8, 8), (1, 3, 64, 64)),
        (lambda x: torch.cat([x[:, 0, ::8, ::8].flatten(1), x[:, 0, :1, 0]], 1) + torch.zeros(1, 17), (1, 3, 64, 64)),
        # A latent, not a picture: 16 channels, 8 x 8 places.
        (lambda x: nn.Linear(16, 2)(x.flatten(2).mT) + torch.zeros(1, 64, 2), (1, 3, 64, 64)),
        (lambda x: [None for batch, length, width in [x.shape]], (1, 3, 64, 64)),
        (lambda x: [None for batch, time, channels, height, width in [x.shape]], (1, 3, 64, 64)),
        (asserts_sides, (1, 3, 64, 64)),
        # Joints and their coordinates, which a layer takes together.
        (lambda x: nn.Linear(34, 2)(x.flatten(2)), (1, 8, 8, 8)),
        # The batch second, as torch's own attention has it.
        (lambda x: nn.MultiheadAttention(8, 2)(x, *2 * [torch.zeros(64, 1, 8)]), (1, 64, 8)),
        # Whole pictures stored flat.
        (lambda x: x.reshape(-1, 4, 9, 9), (1, 8)),
    ],
)  # fmt: skip
def test_what_an_error_asks_for_runs(program: Call, shape: tuple[int, ...]) -> None:
    call = (lambda x: program(x, x, x)) if isinstance(program, nn.MultiheadAttention) else program
    first = Inputs((torch.randn(shape),))
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        call(*first.args)
    assert leads_to(call, first)


def test_any_argument_by_position_or_name() -> None:
    def program(x: Tensor, *, context: Tensor) -> Tensor:
        return x + context

    given = Inputs((torch.zeros(1, 8),), {"context": torch.zeros(1, 6)})
    found = [str(inputs) for inputs in repaired(given, asked_by(_error(program)))]
    assert "float32[1, 6], context=float32[1, 6]" in found
    assert "float32[1, 8], context=float32[1, 8]" in found


def test_whole_numbers_stay_in_their_range() -> None:
    given = Inputs((torch.tensor([[5, 7, 9]]),))
    message = "The size of tensor a (3) must match the size of tensor b (8) at non-singleton dimension 1"
    (x,) = next(repaired(given, asked_by(RuntimeError(message)))).args
    assert x.shape == (1, 8) and {*x.flatten().tolist()} == {5, 7, 9}


@pytest.mark.parametrize(
    ("program", "given"),
    [
        (nn.Embedding(5, 3), torch.randn(1, 8)),
        (nn.Embedding(5, 3), torch.randn(1, 8, 3)),
        (lambda x: nn.functional.one_hot(x, 3), torch.randn(1, 8)),
        (nn.Linear(8, 3), torch.zeros(1, 8, dtype=torch.long)),
        (nn.LayerNorm(8), torch.zeros(1, 8, dtype=torch.long)),
        (nn.Conv1d(3, 3, 1), torch.zeros(1, 3, 4, dtype=torch.long)),
        (lambda x: torch.bmm(x, torch.randn(1, 8, 3)), torch.zeros(1, 8, 8, dtype=torch.long)),
        (lambda x: x.softmax(-1), torch.zeros(1, 8, dtype=torch.long)),
        (lambda x: torch.zeros(5)[x], torch.randn(3)),
        (lambda x: torch.zeros(1, 5).gather(1, x), torch.randn(1, 3)),
    ],
)
def test_another_dtype(program: Call, given: Tensor) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        program(given)
    assert leads_to(program, Inputs((given,)))


@pytest.mark.parametrize("message", ["", "it does not work", "division by zero"])
def test_an_error_of_no_sizes_gives_nothing(message: str) -> None:
    assert list(repaired(Inputs((torch.zeros(1, 8),)), asked_by(RuntimeError(message)))) == []


def test_nothing_takes_all_memory() -> None:
    message = "The size of tensor a (2) must match the size of tensor b (4096) at non-singleton dimension 1"
    given = Inputs((torch.zeros(2, 2, 2, 2),))
    sizes = [value.numel() for inputs in repaired(given, asked_by(RuntimeError(message))) for value in inputs.args]
    assert sizes and max(sizes) <= MOST_NUMBERS


def test_no_length_takes_all_memory() -> None:
    message = "The size of tensor a (8) must match the size of tensor b (60000) at non-singleton dimension 1"
    assert not [*repaired(Inputs((torch.zeros(1, 8),)), asked_by(RuntimeError(message)))]


class Slow(nn.Module):
    """Takes long on what its error asks for, and then raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == 31:
            time.sleep(5)
        assert x.shape[-1] == 31
        raise ValueError("for another reason")


def test_what_runs_long_and_may_yet_raise_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_inputs, "RUN_SECONDS", 0.2)
    with pytest.raises(ExplainError, match="no inputs found that Slow runs on"):
        inputs_for(Slow())


def test_nothing_is_empty() -> None:
    message = "The size of tensor a (8) must match the size of tensor b (0) at non-singleton dimension 1"
    found = [*repaired(Inputs((torch.zeros(1, 8),)), asked_by(RuntimeError(message)))]
    assert all(value.numel() for inputs in found for value in inputs.args)


def _error(program: Call) -> Exception:
    with pytest.raises(RuntimeError) as raised:
        program(torch.zeros(1, 8), context=torch.zeros(1, 6))
    return raised.value


class Latent(nn.Module):
    """Takes [batch, 5, 6, 6], of which only errors tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(5, 2), nn.Parameter(torch.zeros(1, 36, 2))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return self.layer(x.reshape(b, c, h * w).permute(0, 2, 1)) + self.places


def test_inputs_of_a_model_of_which_only_errors_tell() -> None:
    assert inputs_for(Latent()).args[0].shape == (1, 5, 6, 6)


def test_the_length_that_the_user_asks_for_stays() -> None:
    with pytest.raises(ExplainError, match="no inputs found"):
        inputs_for(Latent(), length=37)


class Never(Latent):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.zeros(x.shape[-1] + 3, 3)


def test_one_that_runs_on_nothing_is_refused() -> None:
    with pytest.raises(ExplainError, match="no inputs found that Never runs on"):
        inputs_for(Never())


def test_one_label_for_each_of_the_batch() -> None:
    table = nn.Embedding(7, 4)
    labels = Inputs((torch.zeros(1, 8, dtype=torch.long),))
    assert leads_to(lambda x: table(x).unsqueeze(1).expand(1, 3, -1), labels)


def test_a_tuple_that_the_code_takes_apart() -> None:
    weight = nn.Linear(4, 3)

    def program(data: Any) -> Tensor:
        nodes, edges = data
        assert edges.shape[0] == 2
        return weight(nodes).index_select(0, edges[0])

    assert leads_to(program, Inputs((torch.randn(1, 8, 4),)), steps=4)


def test_an_argument_that_may_be_none(tmp_path: Any) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.offsets = None

        def forward(self, numbers: Tensor, kinds: Tensor | None) -> Tensor:
            return self.layer(numbers if kinds is None else numbers + self.offsets[kinds])  # type: ignore[index]

    assert inputs_for(Table()).args[1] is None


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(
        self, ids: Tensor, embeds: Tensor | None = None, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        if ids is not None and embeds is not None:
            raise ValueError("ids and embeds cannot both be given")
        assert memory is not None, "memory must be given for cross-attention"
        return self.table(ids) @ self.layer(memory).transpose(-1, -2)


def test_the_argument_of_which_the_message_speaks() -> None:
    inputs = inputs_for(Crossed())
    assert "embeds" not in inputs.kwargs and inputs.kwargs["memory"].shape[-1] == 6
