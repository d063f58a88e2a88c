"""What a missing package gives: a model may hold it, and never computes with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.stand_ins import MissingPackage
from tests.explain.repository import Write, built, built_in, net

LAYER = "self.layer = nn.Linear(width, 1)"
HOLDS = "import no_such_tokens\n" + net(
    "width=3", "self.tokens = no_such_tokens.get_encoding('gpt2'); self.layer = nn.Linear(width, 3)"
)


def test_a_value_that_forward_never_uses(write: Write) -> None:
    with built_in(write(f"{HOLDS}    def forward(self, x):\n        return self.layer(x)\n")) as made:
        assert made.model(torch.ones(3)).shape == (3,)


@pytest.mark.parametrize(
    "use",
    [
        "self.tokens(x)",
        "self.tokens.encode(x)",
        "x if self.tokens == 'gpt2' else 2 * x",
        "x if self.tokens else 2 * x",
        "x + self.tokens",
        "self.tokens + x",
        "x * self.tokens.scale",
        "x[self.tokens]",
        "x[: len(self.tokens)]",
        "torch.cat([x, *self.tokens])",
        "torch.zeros(self.tokens)",
        "self.layer(x) @ self.tokens",
        "torch.softmax(x, self.tokens)",
        "x.view(-1, int(self.tokens))",
        "x * float(self.tokens.scale)",
        "x.to(self.tokens.dtype)",
    ],
)
def test_a_value_that_forward_uses(write: Write, use: str) -> None:
    with (
        built_in(write(f"{HOLDS}    def forward(self, x):\n        return {use}\n")) as made,
        pytest.raises(Exception),  # noqa: B017
    ):
        made.model(torch.ones(3))


@pytest.mark.parametrize(
    "use",
    [
        "nn.Linear(self.tokens.count, 3)",
        "nn.Sequential(nn.Linear(3, 3), self.tokens)",
        "self.register_buffer('table', self.tokens)",
        "[n for n in self.tokens]",
        "nn.Linear(3 + self.tokens.count, 3)",
    ],
)
def test_a_value_that_the_constructor_uses(write: Write, use: str) -> None:
    with pytest.raises(MissingPackage, match=r"the model uses no_such_tokens\.get_encoding.* is not installed"):
        built(write(f"{HOLDS.rstrip()}; {use}\n"))


def test_another_problem_is_told_as_it_is(write: Write) -> None:
    with pytest.raises(ExplainError, match="cannot build GPT: ValueError: no kind"):
        built(write(f"{HOLDS.rstrip()}; raise ValueError('no kind')\n"))


def test_a_class_of_a_missing_package_is_none_that_is_there(write: Write) -> None:
    body = "self.several = type(sizes) == ListConfig; self.layer = nn.Linear(3, 3)"
    made = built(write(f"from no_such_config import ListConfig\n{net('sizes=(2, 4)', body)}"))
    assert made.model.several is False and isinstance(made.model.layer, nn.Linear)


def test_annotations_of_a_missing_package_say_nothing(write: Write) -> None:
    source = "from no_such_types import Float, Union\n" + net("width: Union[int, tuple], heads: Float = 2", LAYER)
    assert built(write(source)).model.layer.in_features == 128
