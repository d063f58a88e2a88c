"""Configs that name what they build, and constructors that a text spells out in part or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.build import TooLarge
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.reading.snippets import only_computes
from tests.model_files import Write, model_of, net

GPT = net("part, width, label", "self.part, self.layer = part.float(), nn.Linear(width, len(label))")
PARTS = "class Part(nn.Module):\n    def __init__(self, size):\n        super().__init__()\n        self.size = size\n"


class TestTargets:
    @pytest.mark.parametrize(
        "config",
        [
            "sizes:\n  big: 6\nmodel:\n  _target_: model.GPT\n  width: ${sizes.big}\n  label: [1, 2]\n"
            "  part:\n    _target_: model.Part\n    size: 5\n",
            "model:\n  target: model.GPT\n  params:\n    width: 6\n    label: abcdef\n    unknown: 1\n"
            "    part:\n      target: model.Part\n      params:\n        size: 5\n",
            "model:\n  class_path: elsewhere.GPT\n  init_args:\n    width: 6\n    label: ab\n"
            "    part:\n      class_path: model.Part\n      init_args:\n        size: 5\n",
        ],
    )
    def test_a_class_with_its_parts(self, write: Write, tmp_path: Path, config: str) -> None:
        (tmp_path / "config.yaml").write_text(config)
        notes: list[str] = []
        model, _ = model_of(write(PARTS + GPT), notes)
        assert (
            model.layer.in_features == 6
            and model.part.size == 5
            and any(note.startswith("as in config.yaml") for note in notes)
        )

    def test_what_the_config_leaves_out_is_made_up(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("_target_: model.GPT\nlabel: abc\nd_model: ${of.another.file}\n")
        notes: list[str] = []
        model, _ = model_of(write(net("label, d_model", "self.layer = nn.Linear(d_model, len(label))")), notes)
        assert model.layer.out_features == 3 and notes[:1] == ["as in config.yaml"]
        assert "d_model=256" in notes[1]

    def test_what_cannot_be_imported(self, write: Write, tmp_path: Path) -> None:
        config = "_target_: model.GPT\nwidth: 6\nlabel: ab\npart:\n  _target_: no_such.Part\n"
        (tmp_path / "config.yaml").write_text(config)
        with pytest.raises(ExplainError, match=r"a config names no_such\.Part, and it cannot be imported"):
            model_of(write(GPT))

    def test_a_class_of_that_name_that_takes_nothing_of_it_is_another(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("_target_: elsewhere.GPT\nlearning_rate: 3\n")
        notes: list[str] = []
        model_of(write(net("width=4", "self.layer = nn.Linear(width, 1)")), notes)
        assert notes == []


class TestInPart:
    def test_the_arguments_that_a_script_gives_with_what_it_computes(self, write: Write) -> None:
        write("def table(n):\n    return torch.zeros(n, 4)\ndef read():\n    return open('x')\n", "helps.py")
        write(
            "from model import GPT\nfrom helps import *\nsize = 6\nbias = table(size)\n"
            "model = GPT(len(read().words), zork=bias, width=size)\n",
            "train_it.py",
        )
        notes: list[str] = []
        source = net("n_words, zork, width", "self.bias, self.layer = zork.sum(1), nn.Linear(width, n_words)")
        model, _ = model_of(write(source), notes)
        assert model.bias.shape == (6,) and model.layer.in_features == 6 and model.layer.out_features == 1000
        assert notes == ["zork, width as in train_it.py", "sizes by name: GPT(n_words=1000)"]

    @pytest.mark.parametrize(
        ("body", "computes"),
        [
            ("return torch.ones(n).tril()", True),
            ("return helper(n)", True),
            ("return open('x').read()", False),
            ("return torch.load('x')", False),
            ("return os.listdir('x')", False),
            ("return [torch.hub for _ in range(n)]", False),
            ("return reads(n)", False),
            ("return __import__('os')", False),
            ("return recurses(n)", True),
        ],
    )
    def test_what_only_computes(self, write: Write, body: str, computes: bool) -> None:
        helpers = (
            "import os\ndef helper(n):\n    return n + 1\ndef reads(n):\n    return open(n)\n"
            "def recurses(n):\n    return recurses(n - 1)\n"
        )
        with imported(write(f"{helpers}def f(n):\n    {body}\n")) as module:
            assert only_computes(module.f) is computes


class TestGuesses:
    @pytest.mark.parametrize(
        ("signature", "body", "guess"),
        [
            ("zork", "self.size = 6 // zork", "zork=2"),
            ("zork: int", "assert zork == 8", "zork=8"),
            ("zork: float", "assert zork < 1", "zork=0.1"),
            ("zork", "assert zork is False", "zork=False"),
            ("zork", "self.size = zork[0] + zork[2]", "zork=(2, 2, 2)"),
        ],
    )
    def test_plain_ones_in_turn_for_names_that_say_nothing(
        self, write: Write, signature: str, body: str, guess: str
    ) -> None:
        notes: list[str] = []
        model_of(write(net(signature, body)), notes)
        assert notes == [f"guesses, for names that say nothing: GPT({guess})"]

    def test_none_for_a_string(self, write: Write) -> None:
        with pytest.raises(ExplainError, match="its constructor needs zork; pass --entry"):
            model_of(write(net("zork: str", "zork.lower()")))

    def test_a_guess_that_does_not_build_tells_the_first_problem(self, write: Write) -> None:
        with pytest.raises(ExplainError, match="its constructor needs zork; pass --entry"):
            model_of(write(net("zork", "assert zork < 0")))


class TestSequences:
    @pytest.mark.parametrize(
        ("body", "entries"),
        [
            ("high, wide = image_size\n        self.size = high * wide", (64, 64)),
            ("self.size = image_size[0] * image_size[1]", (64, 64)),
            ("self.size = Inner(image_size).size", (64, 64)),
            ("self.size = image_size * 2", 64),
        ],
    )
    def test_a_size_that_is_taken_apart_here_or_further_in(self, write: Write, body: str, entries: object) -> None:
        inner = net("sides", "self.size = sides[0] * sides[1]", "Inner") if "Inner" in body else ""
        notes: list[str] = []
        model_of(write(inner + net("image_size", body)), notes)
        assert notes == [f"sizes by name: GPT(image_size={entries!r})"]


def test_no_more_memory_than_allowed_where_the_meta_device_does_not_build_it(write: Write) -> None:
    """The 10^15 numbers of all layers fit in no memory: the first layer that is one too many raises."""
    body = "torch.zeros(1).item()\n        self.layers = nn.ModuleList(nn.Linear(1000, 1000) for _ in range(width))"
    with pytest.raises(TooLarge, match=r"GPT has [345]e\+06 parameters, more than 3e\+06; build a smaller one"):
        model_of(write(net("width=10**9", body)), most=3_000_000)
