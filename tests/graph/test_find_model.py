"""The model of a source file: which class, from which config, on which inputs; and what is said where that is open."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.find_model import (
    LONGEST,
    SHORT,
    USUAL,
    built,
    evaluated,
    imported,
    in_one_line,
    inputs_for,
    outermost,
)

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


def model_of(path: Path) -> tuple[Any, tuple[object, ...]]:
    with imported(path) as module:
        return built(outermost(module), vars(module))


class TestImported:
    def test_gives_the_files_names_and_leaves_no_trace(self, write: Write) -> None:
        path = write("class Net(nn.Module): pass\n")
        before = list(sys.path), list(sys.argv)
        with imported(path) as module:
            assert module.Net.__name__ == "Net"
            assert sys.modules["model"] is module and sys.path[0] == str(path.parent)
        assert "model" not in sys.modules and before == (sys.path, sys.argv)

    def test_takes_a_name_that_another_module_has(self, write: Write) -> None:
        path = write("import json\nvalue = json.dumps([1])\n", "json.py")
        import json

        with imported(path) as module:
            assert module.value == "[1]"
        assert sys.modules["json"] is json

    def test_siblings_can_be_imported(self, write: Write) -> None:
        write("class Inner(nn.Module): pass\n", "explained_sibling.py")
        path = write("from explained_sibling import Inner\nclass Net(nn.Module):\n    inner = Inner\n")
        assert outermost_name(path) == "Net"

    def test_a_file_of_a_package_may_import_relatively(self, write: Write) -> None:
        write("", "explained_package/__init__.py")
        write("SIZE = 3\n", "explained_package/sizes.py")
        path = write("from .sizes import SIZE\n", "explained_package/model.py")
        with imported(path) as module:
            assert module.SIZE == 3

    def test_the_module_is_there_for_dataclasses_with_postponed_annotations(self, tmp_path: Path) -> None:
        path = tmp_path / "postponed.py"
        path.write_text(
            f"from __future__ import annotations\n{HEADER}\n@dataclass\nclass Config:\n    width: int = 3\n"
            "class Net(nn.Module):\n    def __init__(self, settings: Config):\n        super().__init__()\n"
            "        self.layer = nn.Linear(settings.width, 1)\n"
        )
        assert model_of(path)[0].layer.in_features == 3

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(ExplainError, match="no such file; pass a Python file"), imported(tmp_path / "none.py"):
            pass

    def test_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ExplainError, match="this is a directory; pass a Python file"), imported(tmp_path):
            pass

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("x = 1 / 0\n", r"ZeroDivisionError: division by zero \(model.py:5\)"),
            ("import no_such_package\n", r"ModuleNotFoundError: No module named 'no_such_package' \(model.py:5\)"),
            ("class Net(:\n", r"SyntaxError: invalid syntax \(model.py:5\)"),
            ("raise SystemExit(1)\n", "it exits; keep what it runs under __main__"),
        ],
    )
    def test_a_file_that_raises(self, write: Write, source: str, message: str) -> None:
        with pytest.raises(ExplainError, match=f"model.py cannot be imported: {message}"), imported(write(source)):
            pass
        assert "model" not in sys.modules

    def test_a_file_that_is_no_python(self, write: Write) -> None:
        with pytest.raises(ExplainError, match=r"not a Python file; pass one that ends in \.py"):
            imported(write("", "model.txt")).__enter__()

    def test_another_package_of_that_name(self, write: Write) -> None:
        write("", "explained_twice/__init__.py")
        path = write("", "explained_twice/model.py")
        sys.modules["explained_twice.model"] = types.ModuleType("explained_twice.model")
        sys.modules["explained_twice"] = types.ModuleType("explained_twice")
        try:
            with pytest.raises(ExplainError, match=r"is imported as explained_twice\.model already"), imported(path):
                pass
        finally:
            del sys.modules["explained_twice.model"], sys.modules["explained_twice"]


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

    def test_several(self, write: Write) -> None:
        names = "".join(f"class {name}(nn.Module): pass\n" for name in ("A", "B", "C"))
        message = "A, B and C are equally outermost; say which with --entry, as in --entry A"
        with pytest.raises(ExplainError, match=message):
            outermost_name(write(names))

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
        with pytest.raises(ExplainError, match="Tree and Branch are equally outermost"):
            outermost_name(path)


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
        message = "its constructor needs vocab, width; pass --entry 'GPT(vocab=..., width=...)'"
        with pytest.raises(ExplainError, match=re.escape(message)):
            model_of(write(CONFIG + net("vocab, width: int, config, depth=2")))

    def test_a_config_without_defaults(self, write: Write) -> None:
        message = "GPTConfig has no default for width, depth; pass --entry 'GPT(GPTConfig(width=..., depth=...))'"
        source = "@dataclass\nclass GPTConfig:\n    width: int\n    depth: int\n" + net("config: GPTConfig")
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


class Tokens(nn.Module):
    """Token and position embeddings; refuses sequences longer than its positions."""

    def __init__(self, positions: int = 32, vocab: int = 11) -> None:
        super().__init__()
        self.position = nn.Embedding(positions, 4)
        self.token = nn.Embedding(vocab, 4)
        self.out = nn.Linear(4, vocab)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.out(self.token(ids) + self.position(torch.arange(ids.shape[1])))
        if targets is None:
            return x
        return nn.functional.cross_entropy(x.view(-1, x.shape[-1]), targets.view(-1))


class Floats(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Config:
    block_size = 20


class TestInputs:
    def test_tokens_as_long_as_the_config_says(self) -> None:
        (ids,) = inputs_for(Tokens(), [Config()]).args
        assert ids.dtype == torch.int64 and ids.shape == (1, 20) and int(ids.max()) < 11

    @pytest.mark.parametrize("holder", [Config(), {"n_positions": 9}, types.SimpleNamespace(max_seq_len=9)])
    def test_the_length_may_stand_in_the_models_config(self, holder: object) -> None:
        model: Any = Floats()
        model.config = holder
        assert inputs_for(model).args[0].shape[1] == (20 if isinstance(holder, Config) else 9)

    def test_tokens_as_long_as_the_positions(self) -> None:
        assert inputs_for(Tokens(positions=30)).args[0].shape == (1, 30)

    def test_tokens_of_the_embedding_that_takes_them(self) -> None:
        (ids,) = inputs_for(Tokens(positions=1000, vocab=2)).args
        assert ids.shape == (1, 1000) and set(ids.flatten().tolist()) == {0, 1}

    def test_no_longer_than_is_cheap(self) -> None:
        model: Any = Floats()
        model.max_position_embeddings = 131072
        assert inputs_for(model).args[0].shape == (1, LONGEST, 6)

    def test_the_short_run_stands_where_the_long_one_fails(self) -> None:
        model = Tokens(positions=SHORT)
        assert inputs_for(model, [types.SimpleNamespace(block_size=100)]).args[0].shape == (1, SHORT)

    def test_a_model_of_one_length_only(self) -> None:
        class Fixed(Floats):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                assert x.shape[1] == 20
                return self.layer(x)

        assert inputs_for(Fixed(), [Config()]).args[0].shape == (1, 20, 6)

    def test_floats_as_wide_as_the_first_linear(self) -> None:
        (x,) = inputs_for(Floats(width=10).to(torch.bfloat16)).args
        assert x.shape == (1, USUAL, 10) and x.dtype == torch.bfloat16

    def test_an_embedding_that_does_not_take_the_argument_makes_no_tokens(self) -> None:
        class Positions(Floats):
            def __init__(self) -> None:
                super().__init__(width=SHORT)
                self.position = nn.Embedding(64, SHORT)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x + self.position(torch.arange(x.shape[1])))

        assert inputs_for(Positions()).args[0].shape == (1, 64, SHORT)

    def test_pictures(self) -> None:
        class Picture(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.img_size = (32, 32)
                self.patches = nn.Conv2d(3, 8, 16, 16)
                self.head = nn.Linear(8, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.patches(x).flatten(2).transpose(1, 2))

        assert inputs_for(Picture()).args[0].shape == (1, 3, 32, 32)

    def test_optional_parameters_are_left_out(self) -> None:
        assert inputs_for(Tokens()).kwargs == {}

    def test_targets(self) -> None:
        inputs = inputs_for(Tokens(), targets=True)
        assert inputs.kwargs["targets"].shape == inputs.args[0].shape
        assert str(inputs) == "int64[1, 32], targets=int64[1, 32]"

    def test_targets_that_the_model_does_not_take_in_this_shape(self) -> None:
        class Classifier(Tokens):
            def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
                assert labels is None or labels.dim() == 1
                return self.token(ids)

        assert inputs_for(Classifier(), targets=True).kwargs == {}

    def test_other_required_parameters(self) -> None:
        class Decoder(Floats):
            def forward(  # type: ignore[override]
                self, x: torch.Tensor, memory: torch.Tensor, start_pos: int, mask: torch.Tensor, *, scale: int
            ) -> torch.Tensor:
                assert start_pos == 0 and scale == 0 and mask.shape == (x.shape[1], x.shape[1])
                return self.layer(x + memory)

        inputs = inputs_for(Decoder())
        assert [type(value) for value in inputs.args] == [torch.Tensor, torch.Tensor, int, torch.Tensor]
        assert inputs.kwargs == {"scale": 0}

    def test_a_forward_of_no_arguments(self) -> None:
        class Alone(Floats):
            def forward(self) -> torch.Tensor:  # type: ignore[override]
                return self.layer.weight

        assert inputs_for(Alone()).args == ()

    def test_hooks_are_gone_afterwards(self) -> None:
        model = Tokens()
        inputs_for(model)
        assert not any(module._forward_pre_hooks for module in model.modules())

    def test_a_model_that_always_raises(self) -> None:
        class Broken(Floats):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise ValueError("not today")

        message = r"no inputs found that Broken runs on \(with float32\[1, 8, 6\]: ValueError: not today .*--inputs"
        with pytest.raises(ExplainError, match=message):
            inputs_for(Broken())

    def test_a_model_with_nothing_to_go_by(self) -> None:
        class Bare(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        with pytest.raises(ExplainError, match=r"\(it has no embedding, convolution or linear layer\); pass them with"):
            inputs_for(Bare())


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
        with pytest.raises(ExplainError, match=re.escape(message)):
            evaluated("--entry", expression, {})


def test_an_error_in_one_line() -> None:
    assert in_one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert in_one_line(KeyError()) == "KeyError"
