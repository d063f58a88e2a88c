"""A model's file as a module: its paths, its packages, what it lacks, what it runs."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.build import built
from attn_fuse.explain.building.choose_entry import outermost
from attn_fuse.explain.opening.absent_values import MissingPackage
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.roots import repository_of
from attn_fuse.explain.steps import within_memory
from attn_fuse.explain.subject import evaluated
from tests.model_files import HEADER, Write, net


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
        with imported(path) as module:
            assert module.Net.inner.__name__ == "Inner"

    def test_a_missing_package_is_no_folder_that_has_a_module_of_its(self, write: Write) -> None:
        write("SIZE = 3\n", "utils.py")
        write("", "setup.py")
        path = write("from scattered_package import add\nfrom scattered_package.utils import spread\nSIZE = 5\n")
        with imported(path) as module:
            assert module.SIZE == 5

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
        with imported(path) as module:
            assert built(module.Net, vars(module)).model.layer.in_features == 3

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


class TestRepository:
    """Files of a repository in the shapes that public ones have."""

    def test_absolute_imports_from_the_root(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("# a repository")
        write("class Layer(nn.Module): pass\n", "explained_parts/layer.py")
        path = write("from explained_parts.layer import Layer\n", "networks/deep/model.py")
        assert repository_of(path) == tmp_path
        with imported(path) as module:
            assert module.Layer.__name__ == "Layer"
        assert "explained_parts.layer" not in sys.modules and "explained_parts" not in sys.modules

    def test_absolute_imports_from_a_folder_between(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("# a repository")
        write("class Layer(nn.Module): pass\n", "supervised/explained_layers/layer.py")
        with imported(write("from explained_layers.layer import Layer\n", "supervised/models/model.py")) as module:
            assert module.Layer.__name__ == "Layer"

    def test_relative_imports_without_an_init(self, write: Write) -> None:
        write("SIZE = 3\n", "explained_plain/sizes.py")
        path = write("from .sizes import SIZE\nfrom ..explained_plain import sizes\n", "explained_plain/model.py")
        with imported(path) as module:
            assert module.SIZE == 3

    def test_a_package_whose_init_raises(self, write: Write) -> None:
        write("1 / 0\n", "explained_broken/__init__.py")
        write("SIZE = 3\n", "explained_broken/sizes.py")
        with imported(write("from .sizes import SIZE\n", "explained_broken/model.py")) as module:
            assert module.SIZE == 3

    def test_a_package_whose_init_imports_the_file(self, write: Write) -> None:
        write("from .model import Net\n", "explained_whole/__init__.py")
        with imported(write("class Net(nn.Module): pass\n", "explained_whole/model.py")) as module:
            assert sys.modules["explained_whole"].Net is module.Net


class TestStandIns:
    def test_a_package_that_the_model_never_uses(self, write: Write) -> None:
        notes: list[str] = []
        path = write(
            "import no_such_plots as plt\nfrom no_such_registry.models import register, Base\n"
            "from no_such_types import Float\nMODELS = register.of('kind')\n"
            "@register\nclass Net(nn.Module):\n    def f(self, x: Float['b n'] | None): pass\n"
            "@MODELS.named('x')\ndef build(): return Net()\n"
            "class Trainer(Base): pass\n"
        )
        with imported(path, notes.append) as module:
            assert isinstance(module.build(), module.Net)
        assert notes == ["not installed, and stood in for: no_such_plots, no_such_registry, no_such_types"]
        assert not any(name.startswith("no_such") for name in sys.modules)

    def test_a_package_that_a_library_needs(self, write: Write) -> None:
        path = write("from torch.utils.tensorboard import SummaryWriter\nclass Net(nn.Module): pass\n")
        if importlib.util.find_spec("tensorboard") is not None:
            pytest.skip("tensorboard is installed")
        notes: list[str] = []
        with imported(path, notes.append) as module:
            assert module.Net.__name__ == "Net"
        assert notes[0].startswith("not installed, and stood in for: tensorboard")
        assert "torch.utils.tensorboard" not in sys.modules

    @pytest.mark.parametrize("use", ["layers.Mlp()", "iter(layers.KINDS)", "layers.KINDS['x']", "len(layers.KINDS)"])
    def test_a_package_that_the_model_uses(self, write: Write, use: str) -> None:
        path = write(f"from no_such_package import layers\ndef build():\n    return {use}\n")
        message = r"the model uses no_such_package\.layers\.\w+, and no_such_package is not installed; install no_such"
        with imported(path) as module, pytest.raises(MissingPackage, match=message):
            module.build()

    def test_a_class_of_a_missing_base(self, write: Write) -> None:
        path = write("import no_such_package as p\nclass Net(p.Module):\n    def __init__(self, x): pass\n")
        with imported(path) as module, pytest.raises(MissingPackage, match=r"uses no_such_package\.Module"):
            module.Net(3)

    def test_a_module_of_a_missing_framework(self, write: Write) -> None:
        layer = net("width", "self.layer = nn.Linear(width, 1)").replace("nn.Module", "BaseModule")
        source = "from no_such_package import BaseModule\n" + layer.replace("__init__()", "__init__(init_cfg=None)")
        notes: list[str] = []
        with imported(write(source), notes.append) as module:
            assert module.GPT(3).layer.in_features == 3 and isinstance(module.GPT(3), nn.Module)
        assert "in place of no_such_package's BaseModule: nn.Module" in notes

    def test_a_name_that_a_file_of_the_package_defines(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / ".git").mkdir()
        write("", "src/gadgets/__init__.py")
        write("def widen(n):\n    return 2 * n\nSTEP = 3\n", "src/gadgets/gadgets.py")
        path = write("from gadgets import widen, STEP\n" + net("", "self.n = widen(STEP)"), "src/nets/model.py")
        with imported(path) as module:
            assert module.GPT().n == 6
        assert not any(name.startswith("gadgets.") for name in sys.modules)

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

    def test_layers_that_torch_has_too(self, write: Write) -> None:
        notes: list[str] = []
        path = write(
            "from no_such_layers import ColumnParallelLinear, FusedLayerNorm, world\n"
            "class Norm(FusedLayerNorm): pass\n"
            "def build():\n"
            "    wide = ColumnParallelLinear(4, 6 // world.get_model_parallel_world_size(), gather_output=False)\n"
            "    return nn.Sequential(wide, Norm(6))\n"
        )
        with imported(path, notes.append) as module:
            wide, norm = module.build()
        assert (wide.in_features, wide.out_features, norm.normalized_shape) == (4, 6, (6,))
        assert isinstance(wide, torch.nn.Linear) and isinstance(norm, torch.nn.LayerNorm)
        assert notes == [
            "in place of no_such_layers's FusedLayerNorm: nn.LayerNorm",
            "not installed, and stood in for: no_such_layers",
            "in place of no_such_layers's get_model_parallel_world_size: 1, for one process",
            "in place of no_such_layers's ColumnParallelLinear: nn.Linear",
        ]

    @pytest.mark.parametrize(
        "name",
        [
            "RotaryEmbedding", "PatchEmbedding", "ParallelMultiheadAttention", "MultiheadAttention", "FusedTransformer",
            "DistributedDataParallel", "Linear8bit", "Fused", "GroupedLinear", "frank", "get_rank_of_a_matrix",
            "matrix_rank", "get_lora_rank",
        ],
    )  # fmt: skip
    def test_names_that_say_something_else(self, write: Write, name: str) -> None:
        path = write(f"import no_such_layers\ndef build(): return no_such_layers.{name}(8, 8)\n")
        with imported(path) as module, pytest.raises(MissingPackage, match=f"uses no_such_layers.{name}"):
            module.build()

    def test_functions_that_torch_has_too(self, write: Write) -> None:
        notes: list[str] = []
        path = write(
            "from no_such_layers import to_2tuple, trunc_normal_\n"
            "def build():\n    return to_2tuple(3), to_2tuple((4, 5)), trunc_normal_(torch.zeros(9), std=0.1)\n"
        )
        with imported(path, notes.append) as module:
            twice, given, filled = module.build()
        assert twice == (3, 3) and given == (4, 5) and filled.abs().max() > 0
        assert notes[1:] == [
            "in place of no_such_layers's to_2tuple: a tuple of one number",
            "in place of no_such_layers's trunc_normal_: torch's",
        ]

    def test_a_layer_that_needs_what_is_not_passed(self, write: Write) -> None:
        path = write("import no_such_layers\ndef build(): return no_such_layers.FusedLinear(dim=8)\n")
        with imported(path) as module, pytest.raises(MissingPackage, match=r"uses no_such_layers.FusedLinear"):
            module.build()

    def test_classes_that_all_inherit_one(self, write: Write) -> None:
        source = "from no_such_package.models import PreTrained\nclass Tagger(PreTrained): pass\n"
        with imported(write(source + "class Net(nn.Module): pass\n")) as module:
            del module.Net
            with pytest.raises(MissingPackage, match=r"the model uses no_such_package\.models\.PreTrained, and"):
                outermost(module)

    def test_no_submodule_of_an_installed_package(self, write: Write) -> None:
        with pytest.raises(ExplainError, match=r"No module named 'torch\.no_such_part'"):
            imported(write("import torch.no_such_part\n")).__enter__()


class TestPrograms:
    def test_what_fails_at_the_top_is_left_out(self, write: Write) -> None:
        notes: list[str] = []
        path = write(
            "class Net(nn.Module): pass\ndata = open('no such file')\nnet = Net(data)\n"
            "SIZE = 3\ndef late(): return SIZE\n"
        )
        with imported(path, notes.append) as module:
            assert module.late() == 3 and not hasattr(module, "net")
        assert len(notes) == 1 and notes[0].startswith("left out of model.py: line 6 (FileNotFoundError")

    def test_an_import_that_fails_stops_nothing_else(self, write: Write) -> None:
        path = write("from torch import no_such_name\nclass Net(nn.Module): pass\nkinds = dict(net=Net)\n")
        with imported(path) as module:
            assert module.kinds["net"] is module.Net

    @pytest.mark.parametrize("package", ["", "explained_words"])
    def test_what_fails_at_the_top_of_a_file_that_it_imports(self, write: Write, package: str) -> None:
        """A tokenizer that reads its vocabulary, beside what the model needs."""
        words = "SIZE = 3\nvocabulary = open('explained_missing.json')\nTOKENS = 7\n"
        if package:
            write("", f"{package}/__init__.py")
        write(words, f"{package}/explained_tokens.py".removeprefix("/"))
        name = f"{package}.explained_tokens".removeprefix(".")
        path = write(
            f"from {name} import SIZE, TOKENS\nimport {name}\nclass Net(nn.Module):\n    size = SIZE + TOKENS\n"
        )
        said: list[str] = []
        with imported(path, said.append) as module:
            assert module.Net.size == 10
            assert eval(f"{name}.TOKENS", vars(module)) == 7
        (line,) = [x for x in said if "left out" in x]
        assert line.startswith("left out of explained_tokens.py: line 6 (FileNotFoundError")
        assert name not in sys.modules

    def test_a_file_that_it_imports_and_that_lacks_what_it_needs(self, write: Write) -> None:
        write("SIZE = int('many')\n", "explained_sizes.py")
        path = write("from explained_sizes import SIZE\nclass Net(nn.Module):\n    size = SIZE\n")
        with pytest.raises(ExplainError, match="invalid literal"), imported(path):
            pass

    @pytest.mark.parametrize(
        "use", ["from explained_layers import Net", "import explained_layers; explained_layers.Net"]
    )
    def test_files_that_import_one_another_begin_where_they_can(self, write: Write, use: str) -> None:
        write("from .net import Net\n", "explained_layers/__init__.py")
        path = write("import explained_words\nclass Net(nn.Module): pass\n", "explained_layers/net.py")
        write(f"{use}\nSIZE = 3\n", "explained_words.py")
        with imported(path) as module:
            assert module.explained_words.SIZE == 3 and issubclass(module.Net, nn.Module)

    def test_a_readme_within_a_package_is_of_no_repository(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").touch()
        write("", "src/inner_of_it/parts/__init__.py")
        write("SIZE = 3\n", "src/inner_of_it/parts/sizes_of_it.py")
        path = write("from inner_of_it.parts.sizes_of_it import SIZE\n", "src/inner_of_it/parts/backbones/net.py")
        (path.parent / "README.md").touch()
        assert repository_of(path) == tmp_path
        with imported(path) as module:
            assert module.SIZE == 3

    def test_a_clone_that_is_a_package(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "clone" / ".git").mkdir(parents=True)
        for name in ("clone/__init__.py", "clone/models/__init__.py", "clone/layers/__init__.py"):
            write("", name)
        write("class Layer(nn.Module): pass\n", "clone/layers/layer.py")
        path = write("from layers.layer import Layer\nclass Net(Layer): pass\n", "clone/models/net.py")
        assert repository_of(path) == tmp_path / "clone"
        with imported(path) as module:
            assert issubclass(module.Net, nn.Module)

    def test_a_script_that_trains(self, write: Write) -> None:
        notes: list[str] = []
        path = write("class Net(nn.Module): pass\nwhile True:\n    try: pass\n    except Exception: pass\n")
        with imported(path, notes.append, limit=0.3) as module:
            assert module.Net.__name__ == "Net"
        assert notes == ["left out of model.py: line 6 (it runs more than 0.3 s)"]

    def test_a_loop_with_a_backward_pass_is_not_even_begun(self, write: Write) -> None:
        notes: list[str] = []
        source = "class Net(nn.Module): pass\nfor step in range(10**12):\n    loss = Net()(step)\n    loss.backward()\n"
        with imported(write(source + "size = 3\n"), notes.append) as module:
            assert module.size == 3 and not hasattr(module, "step")
        assert notes == ["left out of model.py: line 6 (it trains)"]

    def test_a_file_beside_the_script(self, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "words.txt").write_text("abc")
        (tmp_path / "README.md").touch()
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        notes: list[str] = []
        source = "class Net(nn.Module): pass\ntext = open('words.txt').read()\nsize = len(text)\n"
        with imported(write(source, "nets/model.py"), notes.append) as module:
            assert module.size == 3 and Path.cwd() == tmp_path / "elsewhere"
        assert notes == []

    def test_a_script_without_a_class_that_trains(self, write: Write) -> None:
        with pytest.raises(
            ExplainError, match=r"it runs a program of more than .* s; keep what it runs under __main__"
        ):
            imported(write("while True: pass\n"), limit=0.3).__enter__()

    def test_a_question_to_the_user_is_not_waited_for(self, write: Write) -> None:
        with imported(write("class Net(nn.Module): pass\nsize = int(input('size? '))\n")) as module:
            assert not hasattr(module, "size")

    def test_sizes_that_main_sets(self, write: Write) -> None:
        notes: list[str] = []
        path = write(
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.layer = nn.Linear(width, size)\n"
            "if __name__ == '__main__':\n    words = ['a', 'b']\n    size = len(words)\n    width = 4\n"
            "    net = Net()\n"
        )
        with imported(path, notes.append) as module:
            layer = module.Net().layer
        assert (layer.in_features, layer.out_features) == (4, 2)
        assert notes == ["from under __main__: size, width"]


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


def test_a_run_within_memory() -> None:
    with within_memory(1 << 30):
        assert torch.ones(1 << 20).sum() == 1 << 20
        with pytest.raises(RuntimeError, match="memory"):
            torch.ones(1 << 29)
    assert torch.ones(1 << 29, dtype=torch.int8).numel() == 1 << 29


def test_its_own_compile_is_left_out(write: Write) -> None:
    # Dynamo (torch 2.13) fails on a compiled method with a default argument in a model that is compiled.
    source = (
        "class Part(nn.Module):\n    @torch.compile\n    def forward(self, x, flag, more=None):\n        return x + 1\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layer = Part()\n"
        "    def forward(self, x):\n        return self.layer(x, self.training) * 2\n"
        "double = torch.compile(lambda x: 2 * x, dynamic=True)\n"
        "@torch.compile(fullgraph=True)\ndef triple(x):\n    return 3 * x\n"
    )
    notes: list[str] = []
    compiles = torch.compile
    with imported(write(source), notes.append) as module:
        assert isinstance(module.double, types.FunctionType) and isinstance(module.triple, types.FunctionType)
        model = torch.compile(module.Net(), backend="eager")
        assert torch.equal(model(torch.ones(3)), 4 * torch.ones(3))
    assert notes == ["its own calls of torch.compile are left out: the whole model is compiled"]
    assert torch.compile is compiles
