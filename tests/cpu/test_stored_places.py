"""A learned table read at places that a buffer holds: what is proved of the buffer, and that the answer follows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.kernels.chunked import attend as chunked_blocks
from attn_fuse.kernels.chunked.plan import Plan, planned
from tests.harness import every_day

HEADS, WIDTH, SIDE = 4, 8, 6
LENGTH = SIDE * SIDE


def distances() -> Tensor:
    return torch.arange(LENGTH) - torch.arange(LENGTH)[:, None] + LENGTH - 1


def buckets() -> Tensor:
    apart = distances() - LENGTH + 1
    return torch.where(apart > 0, 8, 0) + apart.abs().add(1).float().log2().long().clamp(max=7)


def windows() -> Tensor:
    """Swin's, of one window: by the distances of rows and of columns."""
    place = torch.arange(LENGTH)
    row, column = place // SIDE, place % SIDE
    apart = (row[:, None] - row + SIDE - 1) * (2 * SIDE - 1)
    return apart + column[:, None] - column + SIDE - 1


def windows_and_a_class() -> Tensor:
    """BEiT's: the first token stands apart."""
    index = torch.full((LENGTH, LENGTH), 120)
    index[1:, 1:] = windows()[:-1, :-1]
    index[0], index[0, 0] = 118, 119
    return index


def all_but_one() -> Tensor:
    index = distances()
    index[-1, 3] += 1
    return index


def from_the_end() -> Tensor:
    return distances() - 2 * LENGTH


class Biased(nn.Module):
    """BEiT's spelling: looked up by one dimension, as many heads as the table has columns."""

    def __init__(self, index: Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(2 * LENGTH + 49, HEADS, dtype=dtype))
        self.register_buffer("index", index)

    def bias(self, length: int) -> Tensor:
        index = self.index[:length, :length]
        return self.table[index.reshape(-1)].view(length, length, -1).permute(2, 0, 1).unsqueeze(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * WIDTH**-0.5) @ k.transpose(-2, -1) + self.bias(q.shape[2])
        return scores.softmax(-1) @ v


class Embedded(Biased):
    """MPNet's spelling."""

    def bias(self, length: int) -> Tensor:
        return nn.functional.embedding(self.index[:length, :length], self.table).permute(2, 0, 1)[None]


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    options = {"inner_backend": "eager", "kernels": ["chunked"]}
    return torch.compile(model, backend=backend, options=options, dynamic=False)


def results(run: Callable[..., Tensor], model: Biased, length: int = LENGTH, batch: int = 2) -> list[Tensor]:
    torch.manual_seed(1)
    dtype = model.table.dtype
    tensors = [torch.randn(batch, HEADS, length, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]
    out = run(*tensors)
    return [out, *torch.autograd.grad(out, [*tensors, model.table], torch.randn(out.shape).to(dtype))]


def assert_same(run: Callable[..., Tensor], model: Biased, length: int = LENGTH) -> None:
    for found, expected in zip(results(run, model, length), results(model, model, length), strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE[model.table.dtype])


TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 1e-4}, torch.bfloat16: {"atol": 0.25, "rtol": 0.05}}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans of what runs."""
    made: list[Plan] = []

    def seen(*args: object, **kwargs: object) -> Plan:
        made.append(planned(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(chunked_blocks, "planned", seen)
    return made


BY_DISTANCE = (distances, buckets, from_the_end)
STORED = (windows, windows_and_a_class, all_but_one)


@pytest.mark.parametrize("kind", every_day([Biased, Embedded], Biased))
@pytest.mark.parametrize("make", [*BY_DISTANCE, *STORED])
def test_the_same_as_eager(make: Callable[[], Tensor], kind: type[Biased], plans: list[Plan]) -> None:
    if kind is Embedded and make is from_the_end:
        pytest.skip("an embedding has no place that is counted from the end")
    model = kind(make())
    assert_same(compiled(model), model)
    (site,) = attn_fuse.reports()[-1].sites
    assert site.kernel == "chunked" and len(plans) == 2
    for plan in plans:
        assert len(plan.hoisted.parts) == (make in BY_DISTANCE)
        assert not plan.steps.sources


@pytest.mark.parametrize("make", [buckets, windows])
def test_part_of_the_buffer(make: Callable[[], Tensor], plans: list[Plan]) -> None:
    model = Biased(make())
    assert_same(compiled(model), model, LENGTH - 7)
    assert len(plans[0].hoisted.parts) == (make is buckets)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("make", every_day([buckets, windows], buckets))
def test_types_of_whole_numbers(make: Callable[[], Tensor], dtype: torch.dtype) -> None:
    model = Biased(make().to(dtype))
    assert_same(compiled(model), model)


@pytest.mark.parametrize("make", [buckets, windows])
def test_half_precision(make: Callable[[], Tensor]) -> None:
    model = Biased(make(), torch.bfloat16)
    assert_same(compiled(model), model)


@pytest.mark.parametrize("edit", ["in place", "all of it", "another buffer"])
def test_an_edited_buffer_is_followed(edit: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Biased(distances())
    run = compiled(model)
    assert_same(run, model)
    if edit == "in place":
        model.index[4, 9] = 0
    elif edit == "all of it":
        model.index.copy_(windows())
    else:
        model.index = all_but_one()
    assert_same(run, model)
    assert caplog.text.count("running as written") == 1


def test_other_distances_stay_fused(caplog: pytest.LogCaptureFixture, plans: list[Plan]) -> None:
    model = Biased(distances())
    run = compiled(model)
    assert_same(run, model)
    model.index.copy_(buckets())
    plans.clear()
    assert_same(run, model)
    assert len(plans) == 2 and "running as written" not in caplog.text


def test_what_is_not_proved_needs_no_guard(caplog: pytest.LogCaptureFixture) -> None:
    model = Biased(windows())
    run = compiled(model)
    assert_same(run, model)
    model.index[3, 4] = 0
    assert_same(run, model)
    assert "running as written" not in caplog.text


@pytest.mark.parametrize("make", [distances, windows])
def test_a_place_beyond_the_table(make: Callable[[], Tensor]) -> None:
    model = Biased(make() + 60)
    for run in (model, compiled(model)):
        with pytest.raises(IndexError, match="out of bounds"):
            results(run, model)
