"""Stand-ins for packages that are missing or fail to import, and files that ask for a missing GPU."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.opening.sources import on_the_cpu
from attn_fuse.explain.opening.stand_ins import MissingPackage
from tests.explain.repository import Write, net


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
        assert notes == ["missing packages, replaced by stand-ins: no_such_plots, no_such_registry, no_such_types"]

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
        assert notes == ["missing packages, replaced by stand-ins: part_of_a_package.utils"]

    @pytest.mark.parametrize(
        "ask",
        [
            "try:\n    import no_such_package\n    HAS = True\nexcept ImportError:\n    HAS = False\n",
            "try:\n    from helper_of_it import x\n    HAS = True\nexcept Exception:\n    HAS = False\n",
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
LIBRARIES = {
    "broken_package/__init__.py": RAISES,
    "broken_package/inner.py": "",
    "whole_package/__init__.py": "import broken_package.shapes as shapes\nSIZE = 3\n",
    "careful_package/__init__.py": "try:\n    import broken_package\nexcept ImportError:\n    SIZE = 4\n",
}


class TestBrokenPackages:
    """Installed packages that fail to import."""

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
            "broken_package is replaced by a stand-in, since its import raises RuntimeError: operator x.y is gone "
            "(__init__.py:3)"
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
        # Because it holds a stand-in.
        assert "whole_package" not in sys.modules

    def test_who_can_do_without_it_is_told(self, write: Write) -> None:
        notes: list[str] = []
        (Path(sys.path[0]) / "broken_package" / "__init__.py").write_text("raise ImportError('gone')\n")
        with imported(write("from careful_package import SIZE\n"), notes.append) as module:
            assert module.SIZE == 4
        assert notes == []

    def test_a_compiled_module_that_does_not_load(self, write: Write, installed: Path) -> None:
        (installed / "compiled_package.so").write_bytes(b"no library")
        notes: list[str] = []
        with imported(write("import compiled_package\nSIZE = 5\n"), notes.append) as module:
            assert module.SIZE == 5
        assert notes[0].startswith("compiled_package is replaced by a stand-in, since its import raises ImportError")

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
            ("def f(x, device='cuda'):\n    pass", "def f(x, device='cpu'):\n    pass"),
        ],
    )
    def test_what_asks_for_one_asks_for_the_cpu(self, source: str, cpu: str) -> None:
        assert rewritten(source) == cpu

    @pytest.mark.parametrize(
        "source",
        [
            "x.device.type == 'cuda'",
            "torch.cuda.is_available()",
            "torch.version.cuda is None",
            "print('cuda!')",
            "model.get_device()",
        ],
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
        assert notes == ['no GPU here: "cuda" in its files means the CPU']
