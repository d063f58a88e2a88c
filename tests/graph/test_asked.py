"""What errors ask of inputs, and the search that follows them from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.repairing.asked import Asked, asked_by
from attn_fuse.explain.repairing.repairs import STEPS
from attn_fuse.explain.running.guess_inputs import inputs_for

Program = Callable[[Tensor], Any]


def asked(program: Program, x: Any) -> Asked:
    with pytest.raises(Exception) as raised:
        program(x)
    return asked_by(raised.value)


class Wide:
    width = 16


def asserts_width(x: Tensor) -> None:
    assert x.shape[-1] == Wide.width, "wrong"


def asserts_both(x: Tensor) -> None:
    n, width = x.shape
    assert (
        n == 2  #
        and width == Wide.width
    )


def raises_for_width(x: Tensor) -> None:
    width = x.size(1)
    if width != Wide.width:
        raise ValueError(f"no width of {width}")


def asserts_multiple(x: Tensor) -> None:
    assert x.shape[1] % Wide.width == 0


def raises_for_remainder(x: Tensor) -> None:
    if x.shape[1] % Wide.width:
        raise ValueError("no multiple")


def asserts_at_most(x: Tensor) -> None:
    assert x.shape[1] <= Wide.width


def asserts_shape(x: Tensor) -> None:
    assert x.shape == (2, 16)


def asserts_one_of(x: Tensor) -> None:
    assert x.shape[1] in (16, 32)


def torch_asserts(x: Tensor) -> None:
    torch._assert(x.shape[1] == Wide.width, "wrong")


@pytest.mark.parametrize(
    ("program", "pair"),
    [
        (asserts_width, (21, 16)),
        (asserts_both, (21, 16)),
        (raises_for_width, (21, 16)),
        (asserts_multiple, (21, 32)),
        (raises_for_remainder, (21, 32)),
        (asserts_at_most, (21, 16)),
        (asserts_shape, (21, 16)),
        (asserts_one_of, (21, 16)),
        (asserts_one_of, (21, 32)),
        (torch_asserts, (21, 16)),
        (lambda x: x @ torch.zeros(16, 3), (21, 16)),
    ],
)
def test_sizes_that_the_code_compares(program: Program, pair: tuple[int, int]) -> None:
    assert pair in asked(program, torch.zeros(2, 21)).sizes


def asserts_sides(x: Tensor) -> None:
    height = 32
    assert x.shape[-2:] == (height, height * 2)


def test_shapes_that_the_code_compares() -> None:
    assert ((21, 21), (32, 64)) in asked(asserts_sides, torch.zeros(2, 21, 21)).runs
    # One size that differs is told of as a size.
    assert asked(asserts_shape, torch.zeros(2, 21)).runs == ()


def asserts_a_call(x: Tensor) -> None:
    assert Counted()(x) == 16


class Counted:
    calls = 0

    def __call__(self, x: Tensor) -> int:
        Counted.calls += 1
        return x.shape[1]


def test_nothing_but_sizes_is_computed_again() -> None:
    assert asked(asserts_a_call, torch.zeros(2, 21)).sizes == ()
    assert Counted.calls == 1


class Doubles:
    calls = 0

    def max(self) -> int:
        Doubles.calls += 1
        return 16


def asserts_a_method(x: Tensor) -> None:
    assert x.shape[1] == Doubles().max()


def test_no_method_of_the_model_is_called_again() -> None:
    assert asked(asserts_a_method, torch.zeros(2, 21)).sizes == ()
    assert Doubles.calls == 1


def asserts_rank(x: Tensor) -> None:
    assert x.dim() == 4


def wants_volumes(x: Tensor) -> None:
    raise ValueError("a 5-dimensional tensor it must be")


@pytest.mark.parametrize(
    ("program", "pair"),
    [
        (asserts_rank, (2, 4)),
        (lambda x: x.permute(0, 2, 1), (2, 3)),
        (lambda x: x[:, :, 0], (2, 3)),
        (lambda x: x.size(2), (2, 3)),
        (lambda x: [None for a, b, c in [x.shape]], (None, 3)),
        (lambda x: torch._nested_tensor_from_mask(x[None], x[None] > 0), (None, 2)),
        (wants_volumes, (None, 5)),
    ],
)
def test_ranks(program: Program, pair: tuple[int | None, int]) -> None:
    assert pair in asked(program, torch.zeros(2, 21)).ranks


class Axes:
    sizes = (2, 3, 4)


def reads_each(x: Tensor) -> list[int]:
    count = x.shape[-1]
    return [Axes.sizes[i] for i in range(count)]


def test_a_list_that_an_index_goes_beyond() -> None:
    assert (21, 3) in asked(reads_each, torch.zeros(2, 21)).sizes


def test_a_convolution_on_what_is_no_map() -> None:
    assert asked(lambda x: torch.conv2d(x, torch.zeros(8, 3, 3, 3)), torch.zeros(1, 21, 7)).map == (3, 2)


def test_rows_that_a_table_lacks() -> None:
    table = nn.Embedding(4, 8)
    assert asked(table, torch.tensor([[7]])).small and not asked(table, torch.zeros(1)).small


class Heads:
    def __init__(self, width: int, heads: int) -> None:
        if width % heads:
            raise ValueError("width must be divisible by heads")


def test_a_size_that_another_must_divide() -> None:
    assert {(30, 32), (8, 6)} <= set(asked(lambda _: Heads(30, 8), None).sizes)
    found = asked(lambda _: nn.Conv2d(31, 8, 1, groups=4), None)
    assert {(31, 32), (4, 1)} <= set(found.sizes)


def knows_texts(way: str) -> None:
    if way == "sum":
        return
    if way not in ("mean", "max"):
        raise ValueError(f"{way} is no way")


def test_texts_that_the_code_knows() -> None:
    assert asked(knows_texts, "?").choices == (("way", "?", ("sum", "mean", "max")),)


def test_what_came_further_has_greater_lines() -> None:
    def program(x: Tensor) -> Tensor:
        x = x.view(4, 4)
        return x @ torch.zeros(3, 3)

    assert asked(program, torch.zeros(3)).lines < asked(program, torch.zeros(16)).lines


def test_names_that_are_none() -> None:
    def program(x: Tensor, memory: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        return x + memory.sum()  # type: ignore[union-attr]

    found = asked(program, torch.zeros(2))
    assert "memory" in found.absent and "other" not in found.absent


class Pair(nn.Module):
    """Takes a dict of points in the plane, features [batch, 16, n] and scores [batch, n], each twice: a matcher of two
    pictures. Only errors tell."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mix = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 16, 1)

    def encode(self, points: Tensor, scores: Tensor, shape: torch.Size) -> Tensor:
        _, _, height, width = shape
        points = points - points.new_tensor([[height, width]])
        return self.encoder(torch.cat([points.transpose(1, 2), scores.unsqueeze(1)], 1))

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        a = data["features0"] + self.encode(data["points0"], data["scores0"], data["picture0"].shape)
        b = data["features1"] + self.encode(data["points1"], data["scores1"], data["picture1"].shape)
        return self.mix(a).mT @ self.mix(b)


def test_a_dict_of_tensors_of_many_shapes() -> None:
    (data,) = inputs_for(Pair()).args
    assert data["points0"].shape[2] == 2 and data["features1"].shape[1] == 16 and data["picture0"].dim() == 4
    assert Pair()(data).dim() == 3


class Guided(nn.Module):
    """Wants one of its optional arguments, which its error names, and a number in place of None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, strength: Tensor | None = None, splits: int | None = None) -> Tensor:
        if strength is None:
            raise ValueError("no strength was given")
        if splits > 1:  # type: ignore[operator]
            x = torch.cat(x.chunk(splits))
        return self.layer(x) * strength.mean()


def test_optional_arguments_that_an_error_names() -> None:
    found = inputs_for(Guided())
    assert {"strength", "splits"} <= found.kwargs.keys()
    assert Guided()(*found.args, **found.kwargs).shape[-1] == 16


class Renamed(nn.Module):
    """Wants an argument that has another name where it is missed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def inner(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        return x * hidden.dim()  # type: ignore[union-attr]

    def forward(self, x: Tensor, text_attention_mask: Tensor | None = None) -> Tensor:
        return self.inner(self.layer(x), text_attention_mask)


def test_an_argument_that_has_another_name_where_it_is_missed() -> None:
    found = inputs_for(Renamed())
    assert Renamed()(*found.args, **found.kwargs).shape[-1] == 16


class HandsOn(nn.Module):
    """Hands its arguments on to a method that takes more of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward(*args, **kwargs)

    def _forward(self, features: Tensor, memory: Tensor) -> Tensor:
        return self.layer(features) @ self.layer(memory).mT


def test_arguments_that_forward_hands_on() -> None:
    assert len(inputs_for(HandsOn()).args) == 2


class Tables(nn.Module):
    """Takes tokens, and kinds of which there are few."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(50, 16), nn.Embedding(2, 16)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        return self.tokens(tokens) + self.kinds(types)


def test_whole_numbers_for_a_small_table() -> None:
    tokens, types = inputs_for(Tables()).args
    assert tokens.dim() == types.dim() == 2 and types.max() < 2


class OwnConvolution(nn.Module):
    """A picture model whose convolutions are none of torch's classes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv2d(x, self.weight).flatten(2).mT.softmax(-1)


def test_a_picture_for_a_convolution_of_no_class() -> None:
    (x,) = inputs_for(OwnConvolution()).args
    assert x.dim() == 4 and x.shape[1] == 3


class Arrays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(20, 8)

    def forward(self, items: Any) -> Tensor:
        kept = items.astype(int) * (items != 0)
        return self.items(torch.from_numpy(kept))


def test_arrays_of_numpy() -> None:
    found = inputs_for(Arrays())
    assert type(found.args[0]).__name__ == "ndarray" and str(found).startswith("numpy int64[")


class Entries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def rest(self, nodes: dict[str, Tensor], names: tuple[str, ...] = ("demand",)) -> Tensor:
        return torch.cat([nodes["places"], *(nodes[name][:, :, None] for name in names)], -1)

    def forward(self, nodes: dict[str, Tensor]) -> Tensor:
        assert nodes["places"].shape[-1] == 2
        return self.layer(self.rest(nodes))


def test_an_entry_that_a_dict_lacks() -> None:
    (nodes,) = inputs_for(Entries()).args
    assert nodes["demand"].shape == nodes["places"].shape[:2]


class Tuned(nn.Module):
    """Runs only after a method has set what its forward reads."""

    def __init__(self, is_none: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        if is_none:
            self.extra = None

    def finetune(self, count: int = 4) -> None:
        self.extra = nn.Parameter(torch.zeros(1, count, 8))

    def forget(self) -> None:
        raise AssertionError("nothing asks for this")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([x, self.extra + 0.0], 1))  # type: ignore[list-item, operator]


@pytest.mark.parametrize("is_none", [False, True])
def test_a_method_that_sets_what_forward_lacks(is_none: bool) -> None:
    model = Tuned(is_none)
    found = inputs_for(model)
    assert model(*found.args).shape[-1] == 8 and model.extra is not None


class Endless(nn.Module):
    """Wants another width each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for _ in range(self.count):
            x = x + 0.0
        assert x.shape[-1] == 9 + self.count
        return x


@pytest.mark.thorough
def test_a_search_ends() -> None:
    model = Endless()
    with pytest.raises(ExplainError, match="no inputs found that Endless runs on"):
        inputs_for(model)
    assert model.count < 2000 and STEPS < 20
