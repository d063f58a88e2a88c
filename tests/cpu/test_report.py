"""What a report says of an attention: true facts, where it stands, what to do next."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attn_fuse
from attn_fuse.report import SiteReport, collecting


class Attention(nn.Module):
    """Self-attention of 4 heads, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Nested(nn.Module):
    """Attentions under names that are easily mangled."""

    def __init__(self) -> None:
        super().__init__()
        self._first, self.layers = Attention(), nn.ModuleList([nn.Sequential(Attention())])
        self.by_name = nn.ModuleDict({"two__words": Attention()})

    def forward(self, x: Tensor) -> Tensor:
        return self.by_name["two__words"](self.layers[0](self._first(x)))


class Wrapped(nn.Module):
    """A module of torch, called from user code."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.encoder = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def site_of(model: nn.Module, *inputs: Tensor, **named: Tensor) -> SiteReport:
    (site,) = attn_fuse.explain(model, *inputs, **named).sites
    return site


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_multihead_attention_has_its_heads_and_its_padding(batch: int, padded: bool) -> None:
    x, padding = torch.randn(batch, 16, 64), torch.arange(16).repeat(batch, 1) > 9
    model = nn.MultiheadAttention(64, 8, batch_first=True)
    site = site_of(model, x, x, x, **({"key_padding_mask": padding} if padded else {}))
    assert site.attention["heads"] == "8"
    assert site.attention["mask"] == ("key padding" if padded else "none")
    assert "bias" not in site.attention


def test_a_batch_of_single_heads_has_one_head() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    (site,) = attn_fuse.explain(attention, *(torch.randn(3, 8, 16) for _ in range(3))).sites
    assert site.attention["heads"] == "1"


@pytest.mark.parametrize(
    ("training", "gradients", "said"),
    [
        (False, False, "inference,"),
        (True, True, "training,"),
        (False, True, "eval() with gradients, as in training,"),
        (True, False, "train() without gradients,"),
    ],
)
def test_the_heading_says_whether_gradients_are_recorded(training: bool, gradients: bool, said: str) -> None:
    with contextlib.nullcontext() if gradients else torch.no_grad():
        heading = str(attn_fuse.explain(Attention().train(training), torch.randn(1, 8, 32))).splitlines()[0]
    assert heading.startswith(f"Attention(float32[1, 8, 32]), {said} float32 on cpu")


def test_a_model_without_weights_to_train_is_in_inference() -> None:
    model = Attention().eval().requires_grad_(False)
    assert ", inference," in str(attn_fuse.explain(model, torch.randn(1, 8, 32)))


def test_a_module_of_torch_is_located_in_torch_or_in_its_caller() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    x = torch.randn(1, 8, 32)
    alone, called = site_of(layer.train(), x), site_of(Wrapped(layer), x)
    assert Path(alone.location.file).match("torch/nn/modules/activation.py")
    assert alone.location.line > 1 and alone.location.code == "MultiheadAttention.forward"
    assert called.location.file == __file__ and called.location.code == "return self.encoder(x)"


def test_module_paths_are_as_the_program_names_them() -> None:
    model, x = Nested(), torch.randn(1, 8, 32)
    paths = ["_first", "layers.0.0", "by_name.two__words"]
    assert [site.location.module for site in attn_fuse.explain(model, x).sites] == paths

    def run(x: Tensor) -> Tensor:
        return model(x)

    with collecting() as reports:
        torch.compile(run, backend="attn_fuse", options={"inner_backend": "eager"})(x)
    assert [site.location.module for site in reports[0].sites] == [f"model.{path}" for path in paths]
