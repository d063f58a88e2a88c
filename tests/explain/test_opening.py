"""A model's file as a module: its paths, what it lacks, what it runs, and what is left behind: nothing."""

from __future__ import annotations

import ast
import collections
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.opening.roots import is_users, projects_around, repository_of
from attn_fuse.explain.opening.sources import on_the_cpu
from attn_fuse.explain.opening.stand_ins import MissingPackage
from attn_fuse.explain.problems import in_one_line, without_frames
from tests.explain.repository import Write, net

State = dict[str, object]


def state() -> State:
    """What a file may change of the process and explain puts back."""
    return {
        "modules": {
            name
            for name, module in sys.modules.items()
            if not (getattr(module, "__file__", "") or "").startswith(sys.prefix)
        },
        "path": list(sys.path),
        "meta_path": list(sys.meta_path),
        "argv": list(sys.argv),
        "stdin": sys.stdin,
        "folder": os.getcwd(),
        "compile": torch.compile,
        "load": torch.load,
        "from_url": torch.hub.load_state_dict_from_url,
        "load_state_dict": nn.Module.load_state_dict,
        "torch": set(vars(torch)),
        "nn": set(vars(nn)),
        "collections": set(vars(collections)),
    }


@pytest.fixture
def left_as_it_was() -> Iterator[None]:
    """What the process has before a test it has after it."""
    before = state()
    yield
    after = state()
    assert {name for name in before if before[name] != after[name]} == set()


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
            "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
            "class Config:\n    width: int = 3\n"
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
        assert notes == ["its own calls of torch.compile are left out: the whole model is compiled"]


REFUSED = {
    "a file that raises": ("x = 1 / 0\n", r"ZeroDivisionError: division by zero \(model.py:5\)"),
    "a file that is no Python": ("class Net(:\n", r"SyntaxError: invalid syntax \(model.py:5\)"),
    "a file that exits": ("raise SystemExit(1)\n", "it exits; keep what it runs under __main__"),
    "a file that runs on": ("while True: pass\n", r"it runs a program of more than 0\.3 s; keep that under __main__"),
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
    assert "not installed, and stood in for: torch.no_such_part" in notes
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


# Of each repository the file to open, its files beside that, and its own source, which leaves a SIZE of 3.
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
    assert repository_of(path) == tmp_path / "clone" and projects_around(tmp_path / "clone" / "models") == [
        tmp_path / "clone"
    ]
    assert is_users(path, (tmp_path,)) and not is_users(path, (tmp_path / "clone" / "other",))
    assert not is_users(tmp_path / "venv" / "lib" / "site-packages" / "torch.py", (tmp_path,))


class TestPrograms:
    def test_what_fails_at_the_top_is_left_out_and_said(self, write: Write) -> None:
        notes: list[str] = []
        source = "class Net(nn.Module): pass\ndata = open('no such file')\n"
        source += "net = Net(data)\nSIZE = 3\ndef late(): return SIZE\n"
        with imported(write(source), notes.append) as module:
            assert module.late() == 3 and not hasattr(module, "net")
        assert len(notes) == 1 and notes[0].startswith("left out of model.py: line 6 (FileNotFoundError")

    def test_of_a_file_that_it_imports_too(self, write: Write) -> None:
        notes: list[str] = []
        write("SIZE = 3\nwords = open('no such file')\n", "tokens_of_it.py")
        with imported(write("from tokens_of_it import SIZE\n"), notes.append) as module:
            assert module.SIZE == 3
        assert len(notes) == 1 and notes[0].startswith("left out of tokens_of_it.py: line 6 (FileNotFoundError")

    def test_a_script_that_runs_on(self, write: Write) -> None:
        notes: list[str] = []
        source = "class Net(nn.Module): pass\nwhile True:\n    try: pass\n    except Exception: pass\n"
        with imported(write(source), notes.append, limit=0.3) as module:
            assert module.Net.__name__ == "Net"
        assert notes == ["left out of model.py: line 6 (it runs more than 0.3 s)"]

    def test_a_loop_with_a_backward_pass_is_not_even_begun(self, write: Write) -> None:
        notes: list[str] = []
        source = "class Net(nn.Module): pass\nfor step in range(10**12):\n"
        source += "    loss = Net()(step)\n    loss.backward()\nsize = 3\n"
        with imported(write(source), notes.append) as module:
            assert module.size == 3 and not hasattr(module, "step")
        assert notes == ["left out of model.py: line 6 (it trains)"]

    def test_what_runs_under_main_is_not_run(self, write: Write) -> None:
        source = "class Net(nn.Module): pass\nif __name__ == '__main__':\n    raise SystemExit(3)\n"
        notes: list[str] = []
        with imported(write(source), notes.append):
            pass
        assert notes == []


@pytest.mark.usefixtures("left_as_it_was")
class TestStandIns:
    def test_a_package_that_the_model_never_uses(self, write: Write) -> None:
        notes: list[str] = []
        source = (
            "import no_such_plots as plt\nfrom no_such_registry.models import register, Base\n"
            "from no_such_types import Float\nMODELS = register.of('kind')\n"
            "@register\nclass Net(nn.Module):\n    def f(self, x: Float['b n'] | None): pass\n"
            "@MODELS.named('x')\ndef build(): return Net()\nclass Trainer(Base): pass\n"
        )
        with imported(write(source), notes.append) as module:
            assert isinstance(module.build(), module.Net)
        assert notes == ["not installed, and stood in for: no_such_plots, no_such_registry, no_such_types"]

    @pytest.mark.parametrize("use", ["layers.Mlp()", "iter(layers.KINDS)", "layers.KINDS['x']", "len(layers.KINDS)"])
    def test_a_package_that_the_model_uses(self, write: Write, use: str) -> None:
        message = r"the model uses no_such_package\.layers\.\w+, and no_such_package is not installed; install no_such"
        path = write(f"from no_such_package import layers\ndef build():\n    return {use}\n")
        with imported(path) as module, pytest.raises(MissingPackage, match=message):
            module.build()

    def test_a_class_of_a_missing_base(self, write: Write) -> None:
        path = write("import no_such_package as p\nclass Net(p.Base):\n    def __init__(self, x): pass\n")
        with imported(path) as module, pytest.raises(MissingPackage, match=r"uses no_such_package\.Base"):
            module.Net(3)

    def test_a_module_of_a_missing_framework_is_said_to_be_torchs(self, write: Write) -> None:
        layer = net("width", "self.layer = nn.Linear(width, 1)").replace("nn.Module", "BaseModule")
        notes: list[str] = []
        source = "from no_such_package import BaseModule\n" + layer.replace("__init__()", "__init__(init_cfg=None)")
        with imported(write(source), notes.append) as module:
            assert module.GPT(3).layer.in_features == 3 and isinstance(module.GPT(3), nn.Module)
        assert any("BaseModule" in note and "nn.Module" in note for note in notes)

    @pytest.mark.parametrize("name", ["RotaryEmbedding", "PatchEmbed", "MultiheadAttention", "GroupedLinear", "rank"])
    def test_no_layer_is_made_up(self, write: Write, name: str) -> None:
        path = write(f"import no_such_layers\ndef build(): return no_such_layers.{name}(8, 8)\n")
        with imported(path) as module, pytest.raises(MissingPackage, match=f"uses no_such_layers.{name}"):
            module.build()

    def test_a_dataclass_that_inherits_one(self, write: Write) -> None:
        source = "from not_installed import Serializable\n@dataclass\nclass Config(Serializable):\n    width: int = 6\n"
        with imported(write(source)) as module:
            config = module.Config()
            assert config.width == 6 and getattr(config, "depth", 3) == 3

    def test_a_file_of_the_users_package_that_is_not_there(self, write: Write) -> None:
        write("", "part_of_a_package/__init__.py")
        source = "from part_of_a_package.utils.registry import REGISTRY\n@REGISTRY.register()\n"
        notes: list[str] = []
        with imported(write(source + net("width", "self.width = width")), notes.append) as module:
            assert module.GPT(3).width == 3
            with pytest.raises(MissingPackage, match=r"part_of_a_package\.utils\.registry\.REGISTRY"):
                module.REGISTRY.get("x")
        assert notes == ["not installed, and stood in for: part_of_a_package.utils"]

    @pytest.mark.parametrize(
        "ask",
        [
            "try:\n    import no_such_package\n    HAS = True\nexcept ImportError:\n    HAS = False\n",
            pytest.param(
                "try:\n    from helper_of_it import x\n    HAS = True\nexcept Exception:\n    HAS = False\n",
                marks=pytest.mark.xfail(strict=True, reason="a `try` around another file's import is not seen"),
            ),
            "import importlib.util\nHAS = importlib.util.find_spec('no_such_package') is not None\n",
        ],
    )
    def test_who_asks_whether_a_package_is_there_is_told(self, write: Write, ask: str) -> None:
        write("import no_such_package\nx = 1\n", "helper_of_it.py")
        notes: list[str] = []
        with imported(write(ask), notes.append) as module:
            assert module.HAS is False
        assert notes == []


RAISES = "import operator\nfrom broken_package import inner\nraise RuntimeError('operator x.y is gone')\n"
FAKES = "import torch\n" + "".join(
    f"@torch.library.register_fake('mismatched_package::{name}')\ndef {name}(x):\n    return x\n"
    for name in ("boxes", "quantised_boxes")
)
LIBRARIES = {
    "broken_package/__init__.py": RAISES,
    "broken_package/inner.py": "",
    "whole_package/__init__.py": "import broken_package.shapes as shapes\nSIZE = 3\n",
    # As torchvision, where its compiled library is of another torch.
    "mismatched_package/__init__.py": "from mismatched_package import fakes\n"
    "from mismatched_package.layers import Mlp\n",
    "mismatched_package/fakes.py": FAKES,
    "mismatched_package/layers.py": (
        "import torch\nclass Mlp(torch.nn.Linear):\n    pass\n"
        "def boxes(x):\n    return torch.ops.mismatched_package.boxes(x)\n"
    ),
    "careful_package/__init__.py": "try:\n    import broken_package\nexcept ImportError:\n    SIZE = 4\n",
    # As timm, that moves what others import.
    "moving_package/__init__.py": "",
    "moving_package/layers.py": "class Layer:\n    width = 3\n",
    "moving_package/models.py": "from moving_package import layers\n",
}


class TestBrokenPackages:
    """Packages that are installed and whose import raises, or that no longer have a name."""

    @pytest.fixture(autouse=True)
    def installed(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        site = tmp_path_factory.mktemp("libraries") / "site-packages"
        for name, source in LIBRARIES.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(source)
        monkeypatch.syspath_prepend(site)
        yield site
        # Libraries stay imported, and the next test has a folder of its own.
        for name in [name for name in sys.modules if name.partition(".")[0].endswith("_package")]:
            del sys.modules[name]

    def test_one_that_the_model_never_uses(self, write: Write) -> None:
        notes: list[str] = []
        source = "import broken_package\nfrom broken_package.layers import Mlp\n" + net(
            "", "self.layer = nn.Linear(3, 3)"
        )
        with imported(write(source), notes.append) as module:
            assert module.GPT().layer.in_features == 3
        assert notes == [
            "stood in for broken_package, whose import raises RuntimeError: operator x.y is gone (__init__.py:3)"
        ]
        assert "broken_package" not in sys.modules
        with pytest.raises(RuntimeError, match="is gone"):
            __import__("broken_package")

    def test_one_that_the_model_uses(self, write: Write) -> None:
        message = (
            r"the model uses broken_package\.layers\.Mlp, and importing broken_package raises RuntimeError: operator"
        )
        path = write("from broken_package.layers import Mlp\n" + net("", "self.layer = Mlp()"))
        with imported(path) as module, pytest.raises(MissingPackage, match=message):
            module.GPT()

    def test_a_library_that_needs_it_works_as_far_as_it_can(self, write: Write) -> None:
        with imported(write("from whole_package import SIZE\n")) as module:
            assert module.SIZE == 3
        # It holds a stand-in.
        assert "whole_package" not in sys.modules

    def test_who_can_do_without_it_is_told(self, write: Write) -> None:
        notes: list[str] = []
        (Path(sys.path[0]) / "broken_package" / "__init__.py").write_text("raise ImportError('gone')\n")
        with imported(write("from careful_package import SIZE\n"), notes.append) as module:
            assert module.SIZE == 4
        assert notes == []

    @pytest.mark.xfail(strict=True, reason="a package whose import raises is left out with the line that imports it")
    def test_a_compiled_module_that_does_not_load(self, write: Write, installed: Path) -> None:
        (installed / "compiled_package.so").write_bytes(b"no library")
        notes: list[str] = []
        with imported(write("import compiled_package\nSIZE = 5\n"), notes.append) as module:
            assert module.SIZE == 5
        assert notes[0].startswith("stood in for compiled_package, whose import raises ImportError")

    def test_operators_that_could_not_be_loaded(self, write: Write) -> None:
        body = "self.layer = mismatched_package.Mlp(3, 3)"
        source = "import mismatched_package\n" + net("", body)
        source += "    def forward(self, x):\n        return mismatched_package.layers.boxes(self.layer(x))\n"
        with imported(write(source)) as module:
            model = module.GPT()
            assert model.layer(torch.ones(3)).shape == (3,)
            with pytest.raises(NotImplementedError, match="mismatched_package::boxes"):
                model(torch.ones(3))

    def test_a_name_that_another_module_of_it_has(self, write: Write) -> None:
        with imported(write("from moving_package.models import Layer\n")) as module:
            assert module.Layer.width == 3
        assert not hasattr(sys.modules["moving_package.models"], "Layer")

    @pytest.mark.xfail(strict=True, reason="the stand-in for it is a module")
    def test_a_name_that_nothing_has(self, write: Write) -> None:
        notes: list[str] = []
        source = "from moving_package import gone\n" + net("width=3", "self.layer = gone(width)")
        with (
            imported(write(source), notes.append) as module,
            pytest.raises(MissingPackage, match=r"moving_package\.gone, which"),
        ):
            module.GPT()
        assert not hasattr(sys.modules["moving_package"], "gone") and any(
            "moving_package.gone" in note for note in notes
        )

    def test_a_name_that_moved_is_said(self, write: Write) -> None:
        notes: list[str] = []
        with imported(write("from moving_package.models import Layer\n"), notes.append):
            pass
        assert any("Layer" in note for note in notes)

    @pytest.mark.parametrize("use", ["torch.gone_from_torch", "nn.gone_from_nn()", "torch.nn.functional.gone(1)"])
    def test_no_name_of_torch_is_made_up(self, write: Write, use: str) -> None:
        with imported(write(f"class Net(nn.Module): pass\nGONE = {use}\n")) as module:
            assert not hasattr(module, "GONE")

    def test_a_loader_that_several_modules_share_stays_as_it_is(
        self, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Shared(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(
                self, name: str, path: object, target: object = None
            ) -> importlib.machinery.ModuleSpec | None:
                return importlib.machinery.ModuleSpec(name, self) if name == "shared_package" else None

            def exec_module(self, module: types.ModuleType) -> None:
                module.SIZE = 6  # type: ignore[attr-defined]

        shared = Shared()
        monkeypatch.setattr(sys, "meta_path", [shared, *sys.meta_path])
        with imported(write("from shared_package import SIZE\n")) as module:
            assert module.SIZE == 6
        assert not vars(shared)


def rewritten(source: str) -> str:
    tree = ast.parse(source)
    on_the_cpu(tree)
    return ast.unparse(tree)


class TestNoGpu:
    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    @pytest.mark.parametrize(
        ("source", "cpu"),
        [
            ("x.cuda(non_blocking=True)", "x.cpu()"),
            ("x.to('cuda:1')", "x.to('cpu')"),
            ("torch.device('cuda')", "torch.device('cpu')"),
            ("torch.zeros(3, device='cuda')", "torch.zeros(3, device='cpu')"),
            ("torch.cuda.FloatTensor(3)", "torch.FloatTensor(3)"),
            ("def f(x, device='cuda'):\n    pass", "def f(x, device='cpu'):\n    pass"),
            ("y.to(x.get_device())", "y.to(x.device)"),
        ],
    )
    def test_what_asks_for_one_asks_for_the_cpu(self, source: str, cpu: str) -> None:
        assert rewritten(source) == cpu

    @pytest.mark.parametrize(
        "source",
        ["x.device.type == 'cuda'", "torch.cuda.is_available()", "torch.version.cuda is None", "print('cuda!')"],
    )
    def test_what_only_names_one_stays(self, source: str) -> None:
        assert rewritten(source) == source

    def test_files_that_it_imports_do_so_too_and_it_is_said(self, write: Write) -> None:
        write("SIZE = torch.ones(3, device='cuda')\n", "parts_of_it.py")
        notes: list[str] = []
        with imported(
            write("from parts_of_it import SIZE\n" + net("", "self.size = SIZE.cuda()")), notes.append
        ) as module:
            assert module.GPT().size.device.type == "cpu"
        assert notes == ["no GPU here: what its files put on cuda is on the CPU"]


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
