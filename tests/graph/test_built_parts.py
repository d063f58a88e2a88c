"""Parts of a model that was built and does not run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.running.built_parts import largest_parts, parts_that_ran
from tests.model_files import Write
from tests.subjects import found_in

LAYERS = """
class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

class Encoder(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.embed, self.layers = nn.Embedding(vocab_size, dim), nn.ModuleList(Attention(dim) for _ in range(3))
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x
"""
FAILS = """
class Net(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.encoder, self.head = Encoder(vocab_size, dim), nn.Linear(dim, 2)
    def forward(self, tokens):
        raise RuntimeError(self.head(self.encoder(tokens)).shape) if {before} else ValueError("needs a graph")
"""
NO_FORWARD = """
class Net(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.parts = nn.ModuleDict({"encoder": Encoder(vocab_size, dim), "head": nn.Linear(dim, 2)})
    def describe(self):
        return self.parts["head"], self.parts["encoder"]
"""


@pytest.mark.parametrize(
    "source, name",
    [
        (FAILS.replace("{before}", "True"), "encoder"),
        (FAILS.replace("{before}", "False"), "encoder"),
        (NO_FORWARD, "parts.encoder"),
    ],
)
def test_the_part_that_attends(write: Write, source: str, name: str) -> None:
    subject = found_in(write(LAYERS + source))
    assert type(subject.model).__name__ == "Encoder"
    assert any(note.startswith(f"of a part only, {name} (Encoder), since of the whole: ") for note in subject.said)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 64)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def test_what_ran_with_its_inputs_the_largest_first() -> None:
    model, x = Halves(), torch.ones(2, 4)
    found = [*parts_that_ran(model, [Inputs((x,))])]
    assert [name for name, _, _ in found] == ["second", "first"]
    assert found[1][1] is model.first and found[1][2].args[0] is x
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_are_alike_are_one_part() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))])
    model.small = nn.Bilinear(1, 1, 1)
    assert [name for name, _, _ in largest_parts(model)] == ["layers.0"]
