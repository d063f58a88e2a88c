"""Packages that are installed and whose import raises, as that of one that was compiled for another torch."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attn_fuse.explain.opening.absent_values import MissingPackage
from attn_fuse.explain.opening.open_file import imported
from tests.model_files import Write

RAISES = "import operator\nfrom broken_package import inner\nraise RuntimeError('operator x::y does not exist')\n"
NET = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of libraries: broken_package, whose import raises, and whole_package, which imports it."""
    site = tmp_path_factory.mktemp("libraries")
    for name, source in {
        "broken_package/__init__.py": RAISES,
        "broken_package/inner.py": "",
        "whole_package/__init__.py": "import broken_package.shapes as shapes\nSIZE = 3\n",
        "lazy_package/__init__.py": (
            "import importlib\ndef __getattr__(name):\n    if name == 'SIZE':\n        try:\n"
            "            return importlib.import_module('lazy_package.inner').SIZE\n"
            "        except Exception:\n            pass\n    raise AttributeError(name)\n"
        ),
        "lazy_package/inner.py": "import broken_package\nSIZE = 5\n",
        # As torchvision, where its compiled library is of another torch.
        "mismatched_package/__init__.py": (
            "from mismatched_package import fakes\nfrom mismatched_package.layers import Mlp\n"
        ),
        "mismatched_package/fakes.py": "\n".join(
            (
                "import torch",
                *(
                    f"@torch.library.register_fake('mismatched_package::{name}')\ndef {name}(x):\n    return x"
                    for name in ("boxes", "quantised_boxes")
                ),
            )
        ),
        "mismatched_package/layers.py": (
            "import torch\nclass Mlp(torch.nn.Linear):\n    pass\n"
            "def boxes(x):\n    return torch.ops.mismatched_package.boxes(x)\n"
        ),
        "careful_package/__init__.py": "try:\n    import broken_package\nexcept ImportError:\n    SIZE = 4\n",
    }.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(source)
    monkeypatch.syspath_prepend(site)
    yield site
    # Libraries stay imported, and the next test has a folder of its own.
    for name in left():
        del sys.modules[name]


def left() -> list[str]:
    """The modules in sys.modules that are of these libraries."""
    return [name for name in sys.modules if name.partition(".")[0].endswith("_package")]


def test_one_that_the_model_never_uses(write: Write) -> None:
    notes: list[str] = []
    source = (
        f"import broken_package\nfrom broken_package.layers import Mlp\n{NET}        self.layer = nn.Linear(3, 3)\n"
    )
    with imported(write(source), notes.append) as module:
        assert module.Net().layer.in_features == 3
    assert len(notes) == 1 and notes[0].startswith(
        "stood in for broken_package, whose import raises RuntimeError: operator x::y does not exist (__init__.py:3)"
    )
    assert left() == []


def test_one_that_the_model_uses(write: Write) -> None:
    message = (
        r"the model uses broken_package\.layers\.Mlp, and importing broken_package raises RuntimeError: operator x::y "
        r"does not exist .*; install a broken_package that fits torch \d"
    )
    source = f"from broken_package.layers import Mlp\n{NET}        self.layer = Mlp()\n"
    with imported(write(source)) as module, pytest.raises(MissingPackage, match=message):
        module.Net()


def test_a_library_that_needs_it_works_as_far_as_it_can(write: Write) -> None:
    with imported(write("from whole_package import SIZE\n")) as module:
        assert module.SIZE == 3
    assert left() == []


def test_a_library_that_loads_its_parts_when_they_are_asked_for(write: Write) -> None:
    notes: list[str] = []
    with imported(write("from lazy_package import SIZE\n"), notes.append) as module:
        assert module.SIZE == 5
    assert notes[0].startswith("stood in for broken_package") and "lazy_package.inner" not in sys.modules


def test_an_environment_inside_of_the_repository(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("import broken_package_of_here\nSIZE = 6\n")
    site = path.parent / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "broken_package_of_here.py").write_text("raise RuntimeError('no such operator')\n")
    monkeypatch.syspath_prepend(site)
    with imported(path) as module:
        assert module.SIZE == 6


def test_who_can_do_without_it_is_told(write: Write) -> None:
    notes: list[str] = []
    with imported(write("from careful_package import SIZE\n"), notes.append) as module:
        assert module.SIZE == 4
    assert notes == []


def test_a_compiled_module_that_does_not_load(write: Write, installed: Path) -> None:
    (installed / "compiled_package.so").write_bytes(b"no library")
    notes: list[str] = []
    with imported(write("import compiled_package\nSIZE = 5\n"), notes.append) as module:
        assert module.SIZE == 5
    assert notes[0].startswith("stood in for compiled_package, whose import raises ImportError")


def test_a_loader_that_several_modules_share_stays_as_it_is(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
            return importlib.machinery.ModuleSpec(name, self) if name == "shared_package" else None

        def exec_module(self, module: types.ModuleType) -> None:
            module.SIZE = 6  # type: ignore[attr-defined]

    shared = Shared()
    monkeypatch.setattr(sys, "meta_path", [shared, *sys.meta_path])
    with imported(write("from shared_package import SIZE\n")) as module:
        assert module.SIZE == 6
    assert not vars(shared)
    sys.modules.pop("shared_package")


def test_outside_the_block_it_raises_as_it_did(write: Write) -> None:
    with imported(write("import broken_package\n")):
        pass
    with pytest.raises(RuntimeError, match="does not exist"):
        __import__("broken_package")


def test_operators_that_could_not_be_loaded(write: Write) -> None:
    notes: list[str] = []
    source = (
        f"import mismatched_package\n{NET}        self.layer = mismatched_package.Mlp(3, 3)\n"
        "    def forward(self, x):\n        return mismatched_package.layers.boxes(self.layer(x))\n"
    )
    with imported(write(source), notes.append) as module:
        net = module.Net()
        assert net.layer(torch.ones(3)).shape == (3,)
        with pytest.raises(NotImplementedError, match="mismatched_package::boxes"):
            net(torch.ones(3))
    assert not notes
