"""The model of a file: which class, from which config and sizes, and what is said where that is open."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from attn_fuse.errors import ExplainError
from attn_fuse.explain.build import built
from attn_fuse.explain.choose_entry import candidates, outermost
from attn_fuse.explain.open_file import imported

HEADER = """
from dataclasses import dataclass
import torch
from torch import nn
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a model file with the usual imports."""

    def _write(source: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + source)
        return path

    return _write


def outermost_name(path: Path) -> str:
    with imported(path) as module:
        return outermost(module).__name__


def model_of(path: Path, notes: list[str] | None = None, **limits: int) -> tuple[Any, tuple[object, ...]]:
    with imported(path) as module:
        made = built(outermost(module), vars(module), (notes if notes is not None else []).append, **limits)
    return made.model, tuple(holder for holder in made.holders if type(holder) is not dict)


class TestOutermost:
    def test_the_class_that_no_other_uses(self, write: Write) -> None:
        path = write("""
class Attention(nn.Module): pass
class Block(nn.Module):
    def __init__(self):
        self.attention = Attention()
class Spare(nn.Module): pass
class GPT(nn.Module):
    def __init__(self):
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
    @classmethod
    def from_pretrained(cls):
        return GPT()
""")
        assert outermost_name(path) == "GPT"

    @pytest.mark.parametrize(
        "use",
        [
            "def make():\n    return Part()\nclass Net(nn.Module):\n    def __init__(self):\n        make()\n",
            "KINDS = {'part': Part}\nclass Net(nn.Module):\n    def __init__(self):\n        KINDS['part']()\n",
            "from functools import partial\nmake = partial(Part)\nclass Net(nn.Module):\n    def f(self): make()\n",
            "class Net(nn.Module):\n    part_class = Part\n",
            "class Net(Part): pass\n",
            "class Net(nn.Module):\n    @property\n    def part(self):\n        return Part()\n",
            "class Net(nn.Module):\n    @staticmethod\n    def part():\n        return [Part() for _ in 'a']\n",
        ],
    )
    def test_every_way_to_use_a_class(self, write: Write, use: str) -> None:
        assert outermost_name(write(f"class Part(nn.Module): pass\n{use}class Other(nn.Module): pass\n")) == "Net"

    def test_a_name_that_is_only_a_local_variable_is_no_use(self, write: Write) -> None:
        path = write("""
class Net(nn.Module):
    def __init__(self):
        Part()
class Part(nn.Module):
    def f(self):
        model = 1
        return model
model = Net
""")
        assert outermost_name(path) == "Net"

    def test_an_alias_is_no_second_class(self, write: Write) -> None:
        assert outermost_name(write("class Net(nn.Module): pass\nModel = Net\n")) == "Net"

    def test_imported_classes_do_not_count(self, write: Write) -> None:
        with pytest.raises(ExplainError, match=r"model\.py: it defines no nn\.Module class; pass --entry EXPR"):
            outermost_name(write("from torch.nn import Linear\nclass NotOne: pass\n"))

    @pytest.mark.parametrize(
        ("names", "taken"),
        [
            (("GPTTrainer", "DistillWrapper", "Net"), "Net"),
            (("EncoderBlock", "CrossAttention", "Seq2Seq"), "Seq2Seq"),
            (("Other", "Model", "Another"), "Model"),
        ],
    )
    def test_of_several_the_one_named_as_a_model_is(self, write: Write, names: Sequence[str], taken: str) -> None:
        body = "(nn.Module):\n    def forward(self, x):\n        return x\n"
        assert outermost_name(write("".join(f"class {name}{body}" for name in names))) == taken

    def test_of_several_the_one_that_runs(self, write: Write) -> None:
        path = write("class Kind(nn.Module): pass\nclass Net(nn.Module):\n    def forward(self, x): return x\n")
        assert outermost_name(path) == "Net"

    def test_a_variant_leaves_the_plain_one_a_candidate(self, write: Write) -> None:
        path = write(
            "class Part(nn.Module): pass\nclass UNet(nn.Module):\n    def forward(self): return Part()\n"
            "class SuperRes(UNet): pass\n"
        )
        assert outermost_name(path) == "UNet"

    def test_classes_that_use_each_other(self, write: Write) -> None:
        path = write("""
class Tree(nn.Module):
    def f(self):
        return Leaf(), Branch()
class Branch(nn.Module):
    def f(self):
        return Tree()
class Leaf(nn.Module): pass
""")
        with imported(path) as module:
            assert {cls.__name__ for cls in candidates(module)} == {"Tree", "Branch"}


CONFIG = """
@dataclass
class GPTConfig:
    block_size: int = 12
    width: int = 6
"""


def net(signature: str, body: str = "pass", name: str = "GPT") -> str:
    return (
        f"class {name}(nn.Module):\n    def __init__(self, {signature}):\n        super().__init__()\n        {body}\n"
    )


class TestBuilt:
    @pytest.mark.parametrize(
        "signature",
        [
            "config",
            "config: GPTConfig",
            "config: 'GPTConfig'",
            "config: GPTConfig | None",
            "anything: GPTConfig",
            "cfg",
            "args",
            "gpt_config, width=3",
            "*, config",
        ],
    )
    def test_from_its_config(self, write: Write, signature: str) -> None:
        given = signature.replace("*, ", "").split(":")[0].split(",")[0]
        model, configs = model_of(write(CONFIG + net(signature, f"self.layer = nn.Linear({given}.width, 1)")))
        assert model.layer.in_features == 6
        assert [type(config).__name__ for config in configs] == ["GPTConfig"]

    def test_from_plain_defaults(self, write: Write) -> None:
        model, configs = model_of(write(CONFIG + net("width=5", "self.layer = nn.Linear(width, 1)")))
        assert model.layer.in_features == 5 and configs == ()

    def test_from_nothing(self, write: Write) -> None:
        assert type(model_of(write("class Net(nn.Module): pass\n"))[0]).__name__ == "Net"

    def test_from_a_plain_class_of_settings(self, write: Write) -> None:
        source = "class Config:\n    width = 7\n" + net("config", "self.layer = nn.Linear(config.width, 1)")
        assert model_of(write(source))[0].layer.in_features == 7

    def test_the_config_of_its_name_among_several(self, write: Write) -> None:
        other = "@dataclass\nclass TrainConfig:\n    steps: int = 1\n"
        assert type(model_of(write(other + CONFIG + net("config")))[1][0]).__name__ == "GPTConfig"

    def test_the_only_config_whose_defaults_suffice(self, write: Write) -> None:
        other = "@dataclass\nclass TrainConfig:\n    steps: int\n"
        assert type(model_of(write(other + CONFIG + net("config", name="Net")))[1][0]).__name__ == "GPTConfig"

    def test_several_configs(self, write: Write) -> None:
        other = "@dataclass\nclass TrainConfig:\n    steps: int = 1\n"
        message = "cannot build Net: its config may be TrainConfig or GPTConfig; pass --entry 'Net(TrainConfig())'"
        with pytest.raises(ExplainError, match=re.escape(message)):
            model_of(write(other + CONFIG + net("config", name="Net")))

    def test_an_argument_without_default(self, write: Write) -> None:
        message = "its constructor needs flavour, kind; pass --entry 'GPT(flavour=..., width=256, kind=...)'"
        with pytest.raises(ExplainError, match=re.escape(message)):
            model_of(write(CONFIG + net("flavour, width: int, kind, config, depth=2")))

    def test_a_config_without_defaults(self, write: Write) -> None:
        message = "GPTConfig has no default for flavour, kind; pass --entry 'GPT(GPTConfig(flavour=..., kind=...))'"
        source = "@dataclass\nclass GPTConfig:\n    flavour: str\n    width: int\n    kind: int\n" + net(
            "config: GPTConfig"
        )
        with pytest.raises(ExplainError, match=re.escape(message)):
            model_of(write(source))

    def test_a_config_that_raises(self, write: Write) -> None:
        source = CONFIG + "    def __post_init__(self):\n        raise ValueError('no')\n" + net("config")
        with pytest.raises(ExplainError, match=r"GPTConfig\(\) raises ValueError: no \(model.py:\d+\); pass --entry"):
            model_of(write(source))

    def test_a_constructor_that_raises(self, write: Write) -> None:
        message = r"cannot build GPT: AssertionError: assert config.width == 7 \(model.py:\d+\); build it yourself"
        with pytest.raises(ExplainError, match=message):
            model_of(write(CONFIG + net("config", "assert config.width == 7")))
