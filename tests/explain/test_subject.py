"""The subject of a command: the model or a part that runs, or one line; and the notes on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.stand_ins import MissingPackage
from attn_fuse.explain.steps import now
from attn_fuse.explain.subject import Subject, evaluated
from tests.explain.repository import Write, found_in, net

HEAD = (
    "class Net(nn.Module):\n    def __init__(self{0}):\n        super().__init__()\n        {1}\n"
    "    def forward(self, {2}):\n        {3}\n"
)
ATTENTION = """
class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v
"""
ENCODER = f"""{ATTENTION}
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


def module(arguments: str, layers: str, signature: str, body: str) -> str:
    """The source of a module Net."""
    return HEAD.format(arguments and f", {arguments}", layers, signature, body)


@dataclass(frozen=True)
class Found:
    """A model's file, the flags, a condition on its subject, and parts of the notes on it."""

    source: str
    holds: Callable[[Subject], object]
    said: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)


LAYER = module("", "self.layer = nn.Linear(6, 6)", "x", "return self.layer(x).softmax(-1)")
SUBJECTS = {
    "the defaults": Found(LAYER, lambda one: str(one) == "Net(float32[1, 64, 6])"),
    "small values": Found(
        module("d_model, n_heads", "self.layer = nn.Linear(d_model, n_heads)", "x", "return self.layer(x).softmax(-1)"),
        lambda one: one.inputs.args[0].shape[-1] == 256,
        ("small values by name: d_model=256, n_heads=4",),
    ),
    "several dtypes": Found(
        module(
            "",
            "self.layers = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8))",
            "x",
            "return self.layers(x).softmax(-1)",
        ),
        lambda one: one.inputs.args[0].dtype == torch.float32,
        ("weights of several dtypes, all made float32",),
    ),
    "a candidate that attends, before one that does not": Found(
        module("", "self.layer = nn.Linear(6, 6)", "x", "return self.layer(x) if x.dim() else x.softmax(-1)")
        + LAYER.replace("class Net", "class Other"),
        lambda one: type(one.model).__name__ == "Other",
    ),
    "one that does not attend, where nothing else runs": Found(
        module("", "self.layer = nn.Linear(6, 6)", "x", "return self.layer(x)"),
        lambda one: str(one) == "Net(float32[1, 64, 6])",
    ),
    "a part before what raises": Found(
        ENCODER
        + module(
            "vocab_size, dim",
            "self.encoder, self.head = Encoder(vocab_size, dim), nn.Linear(dim, 2)",
            "tokens",
            "raise RuntimeError(self.head(self.encoder(tokens)).shape)",
        ),
        lambda one: type(one.model).__name__ == "Encoder",
        ("of a part only, Encoder, since of the whole: no inputs found that Net runs on",),
        ("--time-limit", "12"),
    ),
    "a part where nothing ran before": Found(
        ENCODER
        + module(
            "vocab_size, dim", "self.encoder = Encoder(vocab_size, dim)", "tokens", "raise ValueError('needs a graph')"
        ),
        lambda one: type(one.model).__name__ == "Encoder",
        ("of a part only, Encoder, since of the whole: no inputs found that Net runs on",),
        ("--time-limit", "12"),
    ),
    "inputs that the user gives": Found(
        LAYER, lambda one: str(one) == "Net(float32[3, 6])", flags=("--inputs", "torch.ones(3, 6)")
    ),
    "an entry that the user gives": Found(
        net("width", "self.width = width") + LAYER,
        lambda one: str(one) == "Net(float32[1, 64, 6])",
        flags=("--entry", "Net"),
    ),
    "a length and a batch": Found(
        LAYER, lambda one: str(one) == "Net(float32[3, 9, 6])", flags=("--length", "9", "--batch", "3")
    ),
    "a dtype": Found(LAYER, lambda one: one.inputs.args[0].dtype == torch.float64, flags=("--dtype", "float64")),
    "training": Found(LAYER, lambda one: one.train and one.model.training, flags=("--train",)),
    "inference": Found(LAYER, lambda one: not one.train and not one.model.training),
    "a train that gives nothing": Found(
        f"{LAYER}    def train(self, mode=True):\n        super().train(mode)\n", lambda one: not one.model.training
    ),
}


@pytest.mark.parametrize("case", SUBJECTS.values(), ids=SUBJECTS)
def test_subjects(write: Write, case: Found) -> None:
    for name, text in case.files.items():
        write(text, name)
    found = found_in(write(case.source), *case.flags)
    assert case.holds(found), (str(found), found.said)
    for words in case.said:
        assert any(words in note for note in found.said), found.said
    assert case.said or found.said == ()
    # A report is only on a subject that runs.
    found.call_as_written()


REFUSED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "what a part computes with a missing package": (
        "import no_such_layers\n"
        + ATTENTION.replace("self.qkv(x)", "no_such_layers.turned(self.qkv(x))")
        + module("", "self.a = Attention(8)", "x", "return self.a(x)"),
        (),
        "the model uses no_such_layers.turned, and no_such_layers is not installed",
    ),
    "a class of a missing package's": (
        "import no_such_layers\nclass Net(no_such_layers.Base): pass\n",
        (),
        "the model uses no_such_layers.Base",
    ),
}


@pytest.mark.parametrize(("source", "flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_ends_in_one_line(write: Write, source: str, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ExplainError) as raised:
        found_in(write(source), *flags)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_report_is_never_on_what_a_stand_in_computed(write: Write) -> None:
    """Even if the model catches the error, for example around a fast path."""
    body = "try:\n            return self.a(x).softmax(-1)\n        except AttributeError:\n            return None"
    source = "import no_such_layers\n" + module("", "self.a = no_such_layers.Mlp()", "x", body)
    with pytest.raises(MissingPackage):
        found_in(write(source))


@pytest.mark.parametrize(
    "source",
    [
        "import time\n" + module("zork, quux", "time.sleep(0.1); raise ValueError(zork)", "x", "return x.softmax(-1)"),
        "import time\n"
        + module("", "self.layer = nn.Linear(6, 6)", "x", "time.sleep(0.1); raise ValueError(x.softmax(-1))"),
        module("", "self.layer = nn.Linear(6, 6)\n        while True: pass", "x", "return self.layer(x).softmax(-1)"),
    ],
)
def test_it_ends_soon_after_its_time(write: Write, source: str) -> None:
    start = now()
    with pytest.raises(ExplainError):
        found_in(write(source), "--time-limit", "3")
    assert now() - start < 30


def test_a_folder_is_as_good_as_a_file(write: Write, tmp_path: Any) -> None:
    write(LAYER, "nets/model.py")
    write(net("width"), "loss.py")
    found = found_in(tmp_path)
    assert str(found) == "Net(float32[1, 64, 6])"
    assert found.said == ("of 2 files with models, nets/model.py is taken; others: loss.py",)


class TestEvaluated:
    def test_in_the_files_names_and_torchs(self) -> None:
        assert evaluated("--inputs", " torch.ones(size) ", {"size": 3}).tolist() == [1.0, 1.0, 1.0]

    @pytest.mark.parametrize(
        ("expression", "message"),
        [
            ("Net", "--entry 'Net' does not evaluate: NameError: name 'Net' is not defined"),
            ("Net(", "--entry 'Net(' does not evaluate: SyntaxError: '(' was never closed"),
            ("import x", "--entry 'import x' does not evaluate: SyntaxError: invalid syntax"),
        ],
    )
    def test_an_expression_that_does_not_evaluate(self, expression: str, message: str) -> None:
        with pytest.raises(ExplainError) as raised:
            evaluated("--entry", expression, {})
        assert str(raised.value).startswith(message)


def test_a_mask_that_explain_passes_as_none_is_said(write: Write) -> None:
    masked = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
    def forward(self, x, padding_mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT if padding_mask is None else (q @ k.mT).masked_fill(padding_mask, -1e9)
        return scores.softmax(-1) @ v
"""
    assert "padding_mask: none, since explain passed none" in found_in(write(masked)).said
    optional = masked.replace("self, x, padding_mask", "self, x, padding_mask=None")
    assert not any("explain passed none" in line for line in found_in(write(optional)).said)
