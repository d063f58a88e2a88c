"""Which file of a folder holds its model, and which class of a file is the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from attn_fuse.errors import ExplainError
from attn_fuse.explain.choose import candidates, file_in, parts
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.opening.stand_ins import MissingPackage
from tests.explain.repository import Write, net

FORWARD = "    def forward(self, x):\n        return x\n"
ATTENDS = "    def forward(self, x):\n        return x.softmax(-1)\n"


def names_in(path: Path) -> list[str]:
    with imported(path) as module:
        return [cls.__name__ for cls in candidates(module)]


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
def test_the_class_that_no_other_uses(write: Write, use: str) -> None:
    assert names_in(write(f"class Part(nn.Module): pass\n{use}class Other(nn.Module): pass\n"))[0] == "Net"


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("GPTTrainer", "DistillWrapper", "Net"), "Net"),
        (("EncoderBlock", "CrossAttention", "Seq2Seq"), "Seq2Seq"),
        (("Other", "Model", "Another"), "Model"),
        (("LabelSmoothingLoss", "LightningNet", "Some"), "Some"),
        (("PatchEmbeddings", "MultiHead", "Whole"), "Whole"),
    ],
)
def test_of_several_the_one_named_as_a_model_is(write: Write, names: Sequence[str], taken: str) -> None:
    assert names_in(write("".join(f"class {name}(nn.Module):\n{FORWARD}" for name in names)))[0] == taken


def test_of_several_the_one_that_runs(write: Write) -> None:
    assert names_in(write(f"class Kind(nn.Module): pass\nclass Net(nn.Module):\n{FORWARD}"))[0] == "Net"


def test_of_several_the_one_that_attends(write: Write) -> None:
    source = f"class Aaa(nn.Module):\n{FORWARD}class Bbb(nn.Module):\n{ATTENDS}class Ccc(nn.Module):\n{FORWARD}"
    assert names_in(write(source)) == ["Bbb"]


def test_an_alias_is_no_second_class(write: Write) -> None:
    assert names_in(write("class Net(nn.Module): pass\nModel = Net\n")) == ["Net"]


def test_a_part_is_no_candidate_beside_a_model(write: Write) -> None:
    source = f"class GPT(nn.Module):\n{ATTENDS}class PatchEmbeddings(nn.Module):\n{ATTENDS}"
    source += f"class Other(nn.Module):\n{FORWARD}"
    assert names_in(write(source)) == ["GPT"]


def test_classes_that_use_each_other(write: Write) -> None:
    source = "class Tree(nn.Module):\n    def f(self):\n        return Leaf(), Branch()\n"
    source += "class Branch(nn.Module):\n    def f(self):\n        return Tree()\nclass Leaf(nn.Module): pass\n"
    assert {*names_in(write(source))} >= {"Tree"} and "Leaf" not in names_in(write(source))


def test_imported_classes_do_not_count(write: Write) -> None:
    with pytest.raises(ExplainError, match=r"model\.py: it defines no nn\.Module class; pass --entry EXPR"):
        names_in(write("from torch.nn import Linear\nclass NotOne: pass\n"))


def test_classes_of_the_repository_count_where_the_file_has_none(write: Write) -> None:
    write(net("width=3"), "parts_of_it.py")
    assert names_in(write("from parts_of_it import GPT\ndef build():\n    return GPT()\n")) == ["GPT"]


def test_a_class_that_inherits_a_missing_one(write: Write) -> None:
    source = "from no_such_package.models import PreTrained\nclass Tagger(PreTrained): pass\n"
    with imported(write(source + "class Net(nn.Module): pass\n")) as module:
        del module.Net
        with pytest.raises(MissingPackage, match=r"the model uses no_such_package\.models\.PreTrained, and"):
            candidates(module)


def test_parts_attend_the_largest_first(write: Write) -> None:
    source = f"class Attention(nn.Module):\n{ATTENDS}class Mlp(nn.Module):\n{FORWARD}"
    source += "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    source += "        self.a, self.b = Attention(), Mlp()\n"
    source += f"{ATTENDS}class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    source += f"        self.h = Block()\n{FORWARD}"
    with imported(write(source)) as module:
        assert [cls.__name__ for cls in candidates(module)] == ["Net"]
        assert [cls.__name__ for cls in parts(module)] == ["Block", "Attention"]


class TestFolders:
    def test_the_file_with_the_model(self, write: Write, tmp_path: Path) -> None:
        for name in ("tests/model.py", "loss.py", "core/other.py"):
            write(f"class {'Loss' if name == 'loss.py' else 'Net'}(nn.Module): pass\n", name)
        write("def train(): pass\n", "train.py")
        path = write("class Net(nn.Module): pass\n# softmax\n", "core/model.py")
        notes: list[str] = []
        assert file_in(tmp_path, notes.append) == path
        assert notes == ["of 3 files with models, core/model.py is taken; others: core/other.py, loss.py"]

    def test_files_are_read_and_not_run(self, write: Write, tmp_path: Path) -> None:
        path = write("class Net(nn.Module): pass\nraise SystemExit\n")
        notes: list[str] = []
        assert file_in(tmp_path, notes.append) == path and notes == []

    def test_one_without_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(ExplainError, match=r"no Python file in it defines an nn\.Module class; pass the file"):
            file_in(tmp_path)
