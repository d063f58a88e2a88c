"""A model's file as a module: its paths, missing parts and programs. Nothing is left behind."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.opening.roots import is_users, repository_of
from attn_fuse.explain.problems import in_one_line, without_frames
from tests.explain.repository import Write


@pytest.mark.usefixtures("left_as_it_was")
class TestImported:
    def test_gives_the_files_names(self, write: Write) -> None:
        path = write("class Net(nn.Module): pass\n")
        with imported(path) as module:
            assert module.Net.__name__ == "Net"
            assert sys.modules["model"] is module and sys.path[0] == str(path.parent)

    def test_takes_a_name_that_another_module_has(self, write: Write) -> None:
        import json

        with imported(write("import json\nvalue = json.dumps([1])\n", "json.py")) as module:
            assert module.value == "[1]"
        assert sys.modules["json"] is json

    def test_postponed_annotations_of_a_dataclass(self, tmp_path: Path) -> None:
        path = tmp_path / "postponed.py"
        path.write_text(
            "from __future__ import annotations\nfrom __future__ import division\n"
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int = 3\n"
        )
        with imported(path) as module:
            assert module.Config.__annotations__ == {"width": "int"} and module.Config().width == 3

    @pytest.mark.parametrize("raises", [KeyError("in the block"), SystemExit(2), KeyboardInterrupt()])
    def test_a_block_that_raises(self, write: Write, raises: BaseException) -> None:
        write("import no_such_plots\n", "beside_it.py")
        with pytest.raises(type(raises)), imported(write("import beside_it\nclass Net(nn.Module): pass\n")):
            raise raises

    def test_the_same_file_twice_is_two_modules(self, write: Write) -> None:
        path = write("class Net(nn.Module): pass\n")
        with imported(path) as one:
            pass
        with imported(path) as other:
            assert one.Net is not other.Net

    def test_nothing_is_written_beside_it(self, write: Write, tmp_path: Path) -> None:
        write("SIZE = 3\n", "parts_of_it.py")
        with imported(write("from parts_of_it import SIZE\n")):
            pass
        assert not [*tmp_path.rglob("*.pyc")]

    def test_a_question_to_the_user_is_not_waited_for(self, write: Write) -> None:
        with imported(write("class Net(nn.Module): pass\nsize = int(input('size? '))\n")) as module:
            assert not hasattr(module, "size")

    def test_its_own_compile_is_left_out(self, write: Write) -> None:
        source = (
            "double = torch.compile(lambda x: 2 * x, dynamic=True)\n"
            "@torch.compile(fullgraph=True)\ndef triple(x):\n    return 3 * x\n"
            "class Part(nn.Module):\n    @torch.compile\n    def forward(self, x, more=None): return x\n"
        )
        notes: list[str] = []
        with imported(write(source), notes.append) as module:
            kinds = (module.double, module.triple, module.Part.forward)
            assert all(isinstance(kind, types.FunctionType) for kind in kinds)
            assert torch.compile(module.triple, backend="eager")(torch.ones(2)).tolist() == [3, 3]
        assert notes == ["its own calls of torch.compile are skipped, since the whole model is compiled"]


REFUSED = {
    "a file that raises": ("x = 1 / 0\n", r"ZeroDivisionError: division by zero \(model.py:5\)"),
    "a file that is no Python": ("class Net(:\n", r"SyntaxError: invalid syntax \(model.py:5\)"),
    "a file that exits": (
        "raise SystemExit(1)\n",
        "it exits; keep programs under __main__, or allow more with",
    ),
    "a file that runs on": (
        "while True: pass\n",
        r"it runs more than 0\.3 s; keep programs under __main__, or allow",
    ),
    "a name that another file of it lacks": (
        "from sizes_of_it import DEPTH\n",
        "cannot import name 'DEPTH' from 'sizes_of_it'",
    ),
    "another file that lacks what it needs": (
        "from raising_of_it import SIZE\n",
        "cannot import name 'SIZE'|invalid literal",
    ),
}


@pytest.mark.usefixtures("left_as_it_was")
def test_a_module_that_torch_no_longer_has_is_stood_in_for(write: Write) -> None:
    notes: list[str] = []
    path = write("from torch.no_such_part import containers\nclass Net(nn.Module): part = containers\n")
    with imported(path, notes.append) as module:
        assert module.Net.part is not None
    assert "missing packages, replaced by stand-ins: torch.no_such_part" in notes
    assert sys.modules["torch"] is torch and not hasattr(torch, "no_such_part")


@pytest.mark.parametrize(("source", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_imported_ends_in_one_line(write: Write, source: str, message: str) -> None:
    write("WIDTH = 3\n", "sizes_of_it.py")
    write("SIZE = int('many')\n", "raising_of_it.py")
    with pytest.raises(ExplainError, match=message) as raised, imported(write(source), limit=0.3):
        pass
    assert "\n" not in str(raised.value)


def test_what_is_no_file(write: Write, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none.py", "no such file; pass a Python file"),
        (tmp_path, "this is a directory; pass a Python file"),
        (write("", "model.txt"), r"not a Python file; pass one that ends in \.py"),
    ):
        with pytest.raises(ExplainError, match=message), imported(path):
            pass


def test_another_package_of_that_name(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("", "explained_twice/__init__.py")
    path = write("", "explained_twice/model.py")
    for name in ("explained_twice", "explained_twice.model"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(ExplainError, match=r"is imported as explained_twice\.model already"), imported(path):
        pass


# By name: the file to open, the other files, and the source of the file, after which SIZE is 3.
README = {"README.md": ""}
SIZES = "SIZE = 3\n"
REPOSITORIES: dict[str, tuple[str, dict[str, str], str]] = {
    "a sibling": ("model.py", {"sizes_of_it.py": SIZES}, "from sizes_of_it import SIZE\n"),
    "relative imports": (
        "parts/model.py",
        {"parts/__init__.py": "", "parts/sizes.py": SIZES},
        "from .sizes import SIZE\n",
    ),
    "relative imports without an __init__": (
        "parts/model.py",
        {"parts/sizes.py": SIZES},
        "from .sizes import SIZE\nfrom ..parts import sizes\n",
    ),
    "from the root": ("nets/deep/model.py", {**README, "parts/sizes.py": SIZES}, "from parts.sizes import SIZE\n"),
    "from a folder between": (
        "supervised/models/model.py",
        {**README, "supervised/layers_of_it/sizes.py": SIZES},
        "from layers_of_it.sizes import SIZE\n",
    ),
    "from a folder that scripts put on the path": (
        "src/models/model.py",
        {**README, "src/tools/odd_sizes.py": SIZES},
        "from odd_sizes import SIZE\n",
    ),
    "by the name that it was cloned as": (
        "clone_of_it/model.py",
        {"clone_of_it/README.md": "", "clone_of_it/util/sizes.py": SIZES},
        "from clone_of_it.util.sizes import SIZE\n",
    ),
    "a folder below src": (
        "code/video_net/dit/model.py",
        {"setup.py": "", "code/video_net/util/sizes.py": SIZES},
        "from video_net.util.sizes import SIZE\n",
    ),
    "a package whose __init__ raises": (
        "broken_of_it/model.py",
        {"broken_of_it/__init__.py": "1 / 0\n", "broken_of_it/sizes.py": SIZES},
        "from .sizes import SIZE\n",
    ),
    "a package whose __init__ imports the file": (
        "whole_of_it/model.py",
        {"whole_of_it/__init__.py": "from .model import SIZE\n"},
        SIZES,
    ),
    "a circular package": (
        "circles/model.py",
        {
            "circles/__init__.py": "",
            "circles/words/__init__.py": "from circles.model import build\n",
            "circles/words/sizes.py": SIZES,
        },
        "from circles.words.sizes import SIZE\nimport circles.words\nclass Net(nn.Module): pass\n"
        "def build(): return Net()\n",
    ),
    "files that import one another": (
        "layers_of_it/net.py",
        {
            "layers_of_it/__init__.py": "from .net import Net\n",
            "words_of_it.py": f"from layers_of_it import Net\n{SIZES}",
        },
        "import words_of_it\nclass Net(nn.Module): pass\nSIZE = words_of_it.SIZE\n",
    ),
    "a README within a package": (
        "src/inner/parts/backbones/net.py",
        {
            "pyproject.toml": "",
            "src/inner/parts/__init__.py": "",
            "src/inner/parts/sizes.py": SIZES,
            "src/inner/parts/backbones/README.md": "",
        },
        "from inner.parts.sizes import SIZE\n",
    ),
    "a file that has the name of its package": (
        "video_net/models/video_net.py",
        {**README, "video_net/util/sizes.py": SIZES},
        "from video_net.util.sizes import SIZE\n",
    ),
    "a folder that has the name of a package that is not there": (
        "model.py",
        {"setup.py": "", "utils.py": SIZES},
        "from scattered_package import add\nfrom scattered_package.utils import spread\nSIZE = 3\n",
    ),
    "a folder whose files import each other": (
        "src/net/gpt.py",
        {
            **README,
            "src/net/__init__.py": "",
            "src/tools_of_it.py": "SIZE = 1\n",
            "src/net/tools_of_it.py": SIZES,
            "src/net/part_of_it.py": "from tools_of_it import SIZE\n",
        },
        "from part_of_it import SIZE\n",
    ),
    "a name that a file of the package defines": (
        "src/nets/model.py",
        {"setup.py": "", "src/gadgets/__init__.py": "", "src/gadgets/gadgets.py": SIZES},
        "from gadgets.gadgets import SIZE\n",
    ),
    "a file that reads one in its folder": (
        "nets/model.py",
        {**README, "words.txt": "abc"},
        "SIZE = len(open('words.txt').read())\n",
    ),
    "a package that reads its data": (
        "data_of_it/model.py",
        {"data_of_it/__init__.py": "", "data_of_it/words.txt": "abc"},
        "from importlib.resources import files\nSIZE = len(files('data_of_it').joinpath('words.txt').read_text())\n",
    ),
    "a file of whose program a part fails": (
        "model.py",
        {"tokens_of_it.py": "TOKENS = open('no such file')\nSIZE = 3\n"},
        "from tokens_of_it import SIZE\n",
    ),
}

NOT_YET = {
    "a folder whose files import each other": pytest.mark.xfail(strict=True, reason="the folder above comes first"),
}


@pytest.mark.usefixtures("left_as_it_was")
@pytest.mark.parametrize(
    ("name", "files", "source"),
    [pytest.param(*repository, id=name, marks=NOT_YET.get(name, ())) for name, repository in REPOSITORIES.items()],
)
def test_a_repository(write: Write, name: str, files: Mapping[str, str], source: str) -> None:
    for file, text in files.items():
        write(text, file)
    with imported(write(source, name)) as module:
        assert module.SIZE == 3


def test_the_repository_of_a_file(write: Write, tmp_path: Path) -> None:
    write("", "clone/.git/config")
    for name in ("clone/__init__.py", "clone/models/__init__.py", "clone/models/README.md"):
        write("", name)
    path = write("", "clone/models/net.py")
    assert repository_of(path) == tmp_path / "clone"
    assert is_users(path, (tmp_path,)) and not is_users(path, (tmp_path / "clone" / "other",))
    assert not is_users(tmp_path / "venv" / "lib" / "site-packages" / "torch.py", (tmp_path,))


class TestPrograms:
    def test_what_fails_at_the_top_is_left_out_and_said(self, write: Write) -> None:
        notes: list[str] = []
        source = "class Net(nn.Module): pass\ndata = open('no such file')\n"
        source += "net = Net(data)\nSIZE = 3\ndef late(): return SIZE\n"
        with imported(write(source), notes.append) as module:
            assert module.late() == 3 and not hasattr(module, "net")
        assert len(notes) == 1 and notes[0].startswith("skipped in model.py: line 6 (FileNotFoundError")

    def test_of_a_file_that_it_imports_too(self, write: Write) -> None:
        notes: list[str] = []
        write("SIZE = 3\nwords = open('no such file')\n", "tokens_of_it.py")
        with imported(write("from tokens_of_it import SIZE\n"), notes.append) as module:
            assert module.SIZE == 3
        assert len(notes) == 1 and notes[0].startswith("skipped in tokens_of_it.py: line 6 (FileNotFoundError")

    def test_a_script_that_runs_on(self, write: Write) -> None:
        notes: list[str] = []
        source = "class Net(nn.Module): pass\nwhile True:\n    try: pass\n    except Exception: pass\n"
        with imported(write(source), notes.append, limit=0.3) as module:
            assert module.Net.__name__ == "Net"
        assert notes == ["skipped in model.py: line 6 (it runs more than 0.3 s)"]

    def test_a_loop_with_a_backward_pass_is_not_even_begun(self, write: Write) -> None:
        notes: list[str] = []
        source = "class Net(nn.Module): pass\nfor step in range(10**12):\n"
        source += "    loss = Net()(step)\n    loss.backward()\nsize = 3\n"
        with imported(write(source), notes.append) as module:
            assert module.size == 3 and not hasattr(module, "step")
        assert notes == ["skipped in model.py: line 6 (it trains)"]

    def test_what_runs_under_main_is_not_run(self, write: Write) -> None:
        source = "class Net(nn.Module): pass\nif __name__ == '__main__':\n    raise SystemExit(3)\n"
        notes: list[str] = []
        with imported(write(source), notes.append):
            pass
        assert notes == []


def test_an_error_in_one_line() -> None:
    assert in_one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert in_one_line(KeyError()) == "KeyError"


def test_errors_hold_no_models() -> None:
    import weakref

    class Model:
        pass

    def raises() -> None:
        model = Model()
        gone.append(weakref.ref(model))
        try:
            raise ValueError("first")
        except ValueError as error:
            raise ExplainError("second") from error

    gone: list[weakref.ref[Model]] = []
    with pytest.raises(ExplainError) as raised:
        raises()
    kept = without_frames(raised.value)
    del raised
    assert str(kept) == "second" and gone[0]() is None
