"""Files written for a GPU, for an older torch, or with modules elsewhere in their repository."""

from __future__ import annotations

import ast
import collections
import importlib.machinery
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.no_gpu import on_the_cpu
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.reading.snippets import inputs_of
from tests.model_files import Write, model_of, net


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def rewritten(source: str) -> str:
    tree = ast.parse(source)
    on_the_cpu(tree)
    return ast.unparse(tree)


class TestPartsOfPackages:
    """Modules that an older version of their package imported."""

    def test_a_constructor_reads_one(self, write: Write) -> None:
        write("", "older_package/__init__.py")
        write("WIDTH = 3", "older_package/layers.py")
        source = "import older_package\n" + net("width=1", "self.layer = nn.Linear(older_package.layers.WIDTH, 1)")
        assert model_of(write(source))[0].layer.in_features == 3

    def test_one_that_there_is_not(self, write: Write) -> None:
        write("", "other_package/__init__.py")
        source = "import other_package\n" + net("width=1", "self.layer = nn.Linear(other_package.layers.WIDTH, 1)")
        with pytest.raises(ExplainError, match="module 'other_package' has no attribute 'layers'"):
            model_of(write(source))


LAYER = """
from torch import nn
class Layer(nn.Linear):
    def __init__(self, width, bias=True):
        super().__init__(width, 1, bias=bias)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes a file of a library that is installed beside the repository, not in it."""
    place = tmp_path / "site-packages"

    def writes(name: str, source: str = "") -> None:
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)

    monkeypatch.syspath_prepend(place)
    yield writes
    for name in [name for name in sys.modules if name.partition(".")[0] == "library_of_today"]:
        del sys.modules[name]


class TestLibrariesOfToday:
    """Arguments and modules that an older version of a library had."""

    @pytest.mark.parametrize("value", ["None", "0", "0.", "False"])
    def test_an_argument_that_is_off_is_left_out(self, write: Write, library: Callable[..., None], value: str) -> None:
        library("library_of_today/__init__.py", LAYER)
        notes: list[str] = []
        body = f"self.layer = Layer(width, drop={value}, scale=None)"
        model, _ = model_of(write("from library_of_today import Layer\n" + net("width=3", body)), notes)
        assert model.layer.in_features == 3
        said = "library_of_today's Layer has no {} any more: {} left out"
        assert notes == [said.format("drop", float(value) if "." in value else value), said.format("scale", None)]

    def test_in_a_partial_and_in_a_module(self, write: Write, library: Callable[..., None]) -> None:
        library("library_of_today/__init__.py", LAYER)
        source = "import functools\nimport library_of_today\n"
        body = "self.one = library_of_today.Layer(width, drop=0)\n"
        body += "        self.layer = functools.partial(library_of_today.Layer, drop=0)(width)"
        assert model_of(write(source + net("width=3", body)))[0].layer.in_features == 3
        import library_of_today

        with pytest.raises(TypeError, match="unexpected keyword argument 'drop'"):
            library_of_today.Layer(3, drop=0)

    @pytest.mark.parametrize("value", ["0.1", "True", "''", "torch.zeros(2)"])
    def test_one_that_is_on_is_not(self, write: Write, library: Callable[..., None], value: str) -> None:
        library("library_of_today/__init__.py", LAYER)
        source = "from library_of_today import Layer\n" + net("width=3", f"self.layer = Layer(width, drop={value})")
        with pytest.raises(ExplainError, match="unexpected keyword argument 'drop'"):
            model_of(write(source))

    @pytest.mark.parametrize("argument", ["default_cfg", "pretrained_cfg"])
    def test_a_record_of_weights_that_the_library_hands_on(
        self, write: Write, library: Callable[..., None], argument: str
    ) -> None:
        library("library_of_today/__init__.py", "def build(kind, **kwargs):\n    return kind(**kwargs)\n")
        source = "from library_of_today import build\n" + net("width", "self.layer = nn.Linear(width, 1)")
        source += f"def tiny():\n    return build(GPT, width=3, {argument}=dict(url='x'))\n"
        assert model_of(write(source))[0].layer.in_features == 3

    def test_the_users_own_class_is_wrong(self, write: Write) -> None:
        source = net("width", "self.weight = width", "Layer") + net("width=3", "self.layer = Layer(width, drop=0)")
        with pytest.raises(ExplainError, match="unexpected keyword argument 'drop'"):
            model_of(write(source))

    @pytest.mark.parametrize("now", ["layers/helpers.py", "models/_helpers.py", "layers/_helpers.py"])
    def test_a_module_that_moved(self, write: Write, library: Callable[..., None], now: str) -> None:
        for package in ("", "models/", "models/layers/", "layers/"):
            library(f"library_of_today/{package}__init__.py")
        library(f"library_of_today/{now}", "WIDTH = 3")
        notes: list[str] = []
        with imported(write("from library_of_today.models.layers.helpers import WIDTH\n"), notes.append) as module:
            assert module.WIDTH == 3
        dotted = now.removesuffix(".py").replace("/", ".")
        assert notes == [f"library_of_today.models.layers.helpers is library_of_today.{dotted} by now"]

    def test_one_of_two_below_the_folder_of_its_name(self, write: Write, library: Callable[..., None]) -> None:
        for package in ("", "models/", "layers/"):
            library(f"library_of_today/{package}__init__.py")
        library("library_of_today/layers/helpers.py", "WIDTH = 3")
        library("library_of_today/models/_helpers.py", "WIDTH = 4")
        source = "from library_of_today.models.layers.helpers import WIDTH\n"
        assert (
            model_of(write(source + net("width=WIDTH", "self.layer = nn.Linear(width, 1)")))[0].layer.in_features == 3
        )

    def test_which_is_meant_may_be_unclear(self, write: Write, library: Callable[..., None]) -> None:
        for package in ("", "models/", "layers/"):
            library(f"library_of_today/{package}__init__.py")
            library(f"library_of_today/{package}_helpers.py", "WIDTH = 3")
        with (
            pytest.raises(ExplainError, match=r"No module named 'library_of_today\.blocks'"),
            imported(write("from library_of_today.blocks.helpers import WIDTH\n")),
        ):
            pass

    def test_a_file_that_can_do_without_does(self, write: Write, library: Callable[..., None]) -> None:
        library("library_of_today/__init__.py")
        library("library_of_today/_helpers.py", "WIDTH = 3")
        source = "try:\n    from library_of_today.helpers import WIDTH\nexcept ImportError:\n    WIDTH = 5\n"
        assert (
            model_of(write(source + net("width=WIDTH", "self.layer = nn.Linear(width, 1)")))[0].layer.in_features == 5
        )


class TestNamesThatAreGone:
    """Names that an installed library no longer has."""

    def test_one_that_another_module_has(self, write: Write, library: Callable[..., None]) -> None:
        library("library_of_today/__init__.py")
        library("library_of_today/layers.py", LAYER)
        library("library_of_today/models.py", "from library_of_today import layers\n")
        notes: list[str] = []
        source = "from library_of_today.models import Layer\n" + net("width=3", "self.layer = Layer(width)")
        with imported(write(source), notes.append) as module:
            assert module.GPT().layer.in_features == 3
        assert notes == ["library_of_today.models.Layer is in another module by now"]
        assert not hasattr(sys.modules["library_of_today.models"], "Layer")

    def test_one_that_nothing_has_and_nobody_uses(self, write: Write, library: Callable[..., None]) -> None:
        library("library_of_today/__init__.py")
        write("from library_of_today import gone\ndef width(): return 3\n", "sizes_of_it.py")
        source = "from sizes_of_it import width\n" + net("", "self.layer = nn.Linear(width(), 1)")
        assert model_of(write(source))[0].layer.in_features == 3
        assert not hasattr(sys.modules["library_of_today"], "gone") and "torch" in sys.modules

    def test_an_attribute_that_a_file_reads(self, write: Write, library: Callable[..., None]) -> None:
        library("library_of_today/__init__.py")
        write("import library_of_today\nCACHE = library_of_today.CACHE\ndef width(): return 3\n", "sizes_of_it.py")
        notes: list[str] = []
        source = "from sizes_of_it import width\n" + net("", "self.layer = nn.Linear(width(), 1)")
        with imported(write(source), notes.append) as module:
            assert module.GPT().layer.in_features == 3
        assert notes == ["library_of_today has no library_of_today.CACHE any more: stood in for"]
        assert not hasattr(sys.modules["library_of_today"], "CACHE")

    def test_an_attribute_that_torch_lacks_is_an_error(self, write: Write) -> None:
        write("import torch\nGONE = torch.gone_from_torch\n", "sizes_of_it.py")
        source = "import sizes_of_it\n" + net("", "self.layer = nn.Linear(3, 1)")
        with imported(write(source)) as module:
            assert not hasattr(module.sizes_of_it, "GONE") and not hasattr(torch, "gone_from_torch")

    def test_one_that_the_model_uses(self, write: Write, library: Callable[..., None]) -> None:
        library("library_of_today/__init__.py")
        source = "from library_of_today import gone\n" + net("width=3", "self.layer = gone(width) + 1")
        with pytest.raises(ExplainError, match=r"uses library_of_today\.gone, which library_of_today no longer has"):
            model_of(write(source))

    def test_a_file_that_can_do_without_it_does(self, write: Write, library: Callable[..., None]) -> None:
        library("library_of_today/__init__.py")
        source = "try:\n    from library_of_today import gone\nexcept ImportError:\n    gone = 5\n"
        with imported(write(source + net(""))) as module:
            assert module.gone == 5

    def test_one_of_the_users_own(self, write: Write) -> None:
        write("WIDTH = 3\n", "sizes_of_it.py")
        with (
            pytest.raises(ExplainError, match="cannot import name 'DEPTH' from 'sizes_of_it'"),
            imported(write("from sizes_of_it import DEPTH\n")),
        ):
            pass

    def test_a_default_that_is_an_object_of_a_dataclass(self, write: Write) -> None:
        source = "@dataclass\nclass Block:\n    width: int = 3\n@dataclass\nclass Config:\n    block: Block = Block()\n"
        with imported(write(source)) as module:
            one, other = module.Config(), module.Config()
            assert one.block.width == 3 and one.block is not other.block
        with pytest.raises(ValueError, match="mutable default"):
            exec(f"from dataclasses import dataclass\n{source}", {"__name__": __name__})


class TestNamesOfTorch:
    def test_what_its_modules_had(self, write: Write) -> None:
        source = "from torch.nn.modules.linear import _LinearWithBias as L\nfrom torch.nn.modules.conv import Union\n"
        assert model_of(write(source + net("width=3", "self.layer = L(width, 1)")))[0].layer.in_features == 3
        assert not hasattr(torch.nn.modules.linear, "_LinearWithBias")


class TestNoGpu:
    @pytest.mark.parametrize(
        ("source", "cpu"),
        [
            ("x.cuda(non_blocking=True)", "x.cpu()"),
            ("x.to('cuda:1')", "x.to('cpu')"),
            ("torch.device('cuda')", "torch.device('cpu')"),
            ("torch.zeros(3, device='cuda')", "torch.zeros(3, device='cpu')"),
            ("torch.cuda.FloatTensor(3)", "torch.FloatTensor(3)"),
            ("def f(x, device='cuda'):\n    pass", "def f(x, device='cpu'):\n    pass"),
            ("torch.version.cuda.split('.')", "'0.0'.split('.')"),
            ("y.to(x.get_device())", "y.to(x.device)"),
            ("import dist\ny.to(dist.get_device())", "import dist\ny.to(dist.get_device())"),
        ],
    )
    def test_what_asks_for_one_asks_for_the_cpu(self, source: str, cpu: str) -> None:
        assert rewritten(source) == cpu

    @pytest.mark.parametrize(
        "source",
        [
            "x.device.type == 'cuda'",
            "torch.cuda.is_available()",
            "torch.autocast('cuda')",
            "torch.version.cuda is None",
            "def f(a='cuda'):\n    a",
        ],
    )
    def test_what_only_names_one_stays(self, source: str) -> None:
        assert rewritten(source) == source

    def test_so_are_files_from_elsewhere_in_the_repository(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("")
        write("import torch\nMAJOR = int(torch.version.cuda.split('.')[0])\n", "more/versions_of_it.py")
        with imported(write("from versions_of_it import MAJOR\n" + net(""), "src/net.py")) as module:
            assert module.MAJOR == 0

    def test_files_of_the_repository_are_loaded_so_and_nothing_is_written(self, write: Write, tmp_path: Path) -> None:
        write("SIZE = torch.ones(3, device='cuda')\n", "parts.py")
        path = write("from parts import SIZE\n" + net("", "self.size = SIZE.cuda()"))
        with imported(path, (notes := []).append) as module:
            assert module.GPT().size.device.type == "cpu"
        assert notes == ["no GPU here: what its files put on cuda is on the CPU"]
        assert not list(tmp_path.rglob("*.pyc")) and "parts" not in sys.modules


class TestOlderNames:
    def test_are_there_while_the_file_is(self, write: Write) -> None:
        lines = "from torch._six import container_abcs, string_classes, inf\nimport collections\nimport numpy as np\n"
        body = "assert isinstance([], container_abcs.Iterable) and isinstance((), collections.Sequence)\n"
        body += "        self.seen = np.float(3), np.int(inf > 3)"
        assert model_of(write(lines + net("", body)))[0].seen == (3.0, 1)
        assert not hasattr(collections, "Sequence") and "int" not in vars(np) and "torch._six" not in sys.modules


class TestModulesElsewhere:
    def test_are_found_in_the_repository(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("")
        write("WIDTH = 6\n", "src/tools/odd_sizes.py")
        path = write("from odd_sizes import WIDTH\n" + net("", "self.layer = nn.Linear(WIDTH, 1)"), "src/models/gpt.py")
        before = list(sys.path)
        notes: list[str] = []
        assert model_of(path, notes)[0].layer.in_features == 6 and notes == []
        assert sys.path == before and "odd_sizes" not in sys.modules

    def test_a_folder_whose_files_import_each_other_comes_first(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("")
        write("", "src/net/__init__.py")
        write("WIDTH = 1\n", "src/tools_of_it.py")
        write("WIDTH = 6\n", "src/net/tools_of_it.py")
        write("from tools_of_it import WIDTH\n", "src/net/part_of_it.py")
        source = "from part_of_it import WIDTH\n" + net("", "self.layer = nn.Linear(WIDTH, 1)")
        assert model_of(write(source, "src/net/gpt.py"))[0].layer.in_features == 6

    def test_a_part_in_a_file_beside_it(self, write: Write) -> None:
        write(net("width=4", "self.layer = nn.Linear(width, 1)", "Encoder"), "encoder.py")
        model, _ = model_of(write(net("encoder", "self.encoder = encoder")))
        assert model.encoder.layer.in_features == 4


class TestSpelledInputs:
    def test_of_a_readme(self, write: Write, tmp_path: Path) -> None:
        text = "```python\nmodel = GPT(width=3)\nsize = 5\nimages = torch.randn(2, size, 3)\n"
        text += "out = model(images, flag=True)\n```"
        (tmp_path / "README.md").write_text(text)
        with imported(write(net("width"))) as module:
            ((args, kwargs),) = inputs_of(module.GPT, vars(module), Path(str(module.__file__)))
        assert [list(a.shape) for a in args] == [[2, 5, 3]] and kwargs == {"flag": True}

    def test_what_the_text_does_not_give_is_passed_over(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("```\nmodel = GPT(3)\nmodel(load('cat.png'))\nmodel(3)\n```")
        with imported(write(net("width"))) as module:
            assert list(inputs_of(module.GPT, vars(module), Path(str(module.__file__)))) == []

    @pytest.mark.parametrize(
        ("imports", "counts"),
        [
            ("from net import GPT", True),
            ("from package.net import GPT", True),
            ("from package import GPT", True),
            ("from .net import GPT", True),
            ("from . import GPT", True),
            ("from package.net import *", True),
            ("import package.net as net", True),
            ("from package import net", True),
            ("from other import GPT", False),
            ("from other.models import GPT", False),
            ("from other import *", False),
        ],
    )
    def test_of_a_script_that_has_the_class_from_this_file(
        self, imports: str, counts: bool, write: Write, tmp_path: Path
    ) -> None:
        write("", "package/__init__.py")
        (tmp_path / "README.md").write_text("")
        script = f"import torch\n{imports}\nmodel = GPT(3)\nmodel(torch.randn(2, 5, 3))\n"
        write(script, "package/run.py")
        with imported(write(net("width"), "package/net.py")) as module:
            found = list(inputs_of(module.GPT, vars(module), Path(str(module.__file__))))
        assert len(found) == counts


def test_masks_of_bytes(write: Write) -> None:
    notes: list[str] = []
    body = "mask = torch.ones(2, 2, dtype=torch.uint8).tril()\n        self.filled = torch.zeros(2, 2)"
    source = net("", f"{body}.masked_fill(mask, 1.0).masked_fill_(mask > 1, 2.0)")
    with imported(write(source), notes.append) as module:
        assert module.GPT().filled.tolist() == [[1, 0], [1, 1]]
    assert notes == ["masks of bytes are Boolean here, which this torch asks for"]
    with pytest.raises(RuntimeError, match="boolean"):
        torch.zeros(2).masked_fill(torch.ones(2, dtype=torch.uint8), 1.0)


@pytest.mark.parametrize("name", ["", "encoder_layer="])
def test_a_layer_that_knows_no_is_causal(write: Write, name: str) -> None:
    source = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.self_attn = nn.Linear(4, 4), nn.MultiheadAttention(4, 1, batch_first=True)
    def forward(self, src, src_mask=None, src_key_padding_mask=None):
        return self.layer(src)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(NAME Layer(), num_layers=2, enable_nested_tensor=False)
    def forward(self, x):
        return self.encoder(x)
""".replace("NAME ", name)
    notes: list[str] = []
    construct = torch.nn.TransformerEncoder.__init__
    with imported(write(source), notes.append) as module:
        assert module.Net()(torch.ones(1, 3, 4)).shape == (1, 3, 4)
    assert notes == ["Layer is of an older torch: is_causal is not passed to it, its mask says as much"]
    assert torch.nn.TransformerEncoder.__init__ is construct


@pytest.fixture
def transformers_5(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A library as transformers 5 is, whose models make the table of tied weights in post_init alone."""

    class PreTrainedModel(torch.nn.Module):
        dtype = torch.float32

        def init_weights(self) -> None:
            assert not self.all_tied_weights_keys

    made = types.ModuleType("transformers.modeling_utils")
    made.PreTrainedModel = PreTrainedModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_model_of_an_older_transformers(write: Write, transformers_5: types.ModuleType) -> None:
    source = "from transformers.modeling_utils import PreTrainedModel\n" + net("", "self.init_weights()")
    model, _ = model_of(write(source.replace("nn.Module", "PreTrainedModel")))
    assert model.get_head_mask(None, 2) == [None, None]
    seen = torch.tensor([[1, 1, 0]])
    assert model.invert_attention_mask(seen).tolist() == [[[[0.0, 0.0, torch.finfo(torch.float32).min]]]]
    assert model.invert_attention_mask(seen[:, None]).shape == (1, 1, 1, 3)
    with pytest.raises(NotImplementedError):
        model.get_head_mask(torch.ones(2), 2)


def test_tied_weights_in_a_list(write: Write, transformers_5: types.ModuleType) -> None:
    def expanded(self: object, all_submodels: bool = False) -> dict[str, str]:
        return {**self._tied_weights_keys}  # type: ignore[attr-defined]

    transformers_5.PreTrainedModel.get_expanded_tied_weights_keys = expanded  # type: ignore[attr-defined]
    source = "from transformers.modeling_utils import PreTrainedModel\n" + net(
        "", "self._tied_weights_keys = ['head.weight']; assert self.get_expanded_tied_weights_keys() == {}"
    )
    model, _ = model_of(write(source.replace("nn.Module", "PreTrainedModel")))
    model._tied_weights_keys = {"head.weight": "table.weight"}
    assert model.get_expanded_tied_weights_keys() == {"head.weight": "table.weight"}


@pytest.fixture
def pytorch_lightning(library: Callable[..., None]) -> object:
    library("pytorch_lightning/__init__.py", "from torch import nn\nclass LightningModule(nn.Module):\n    kept = 3\n")
    library("pytorch_lightning/callbacks.py", "class Callback: ...")
    yield
    for name in [name for name in sys.modules if "lightning" in name.partition(".")[0]]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["lightning as L", "lightning.pytorch as L"])
def test_lightning_by_its_other_name(write: Write, pytorch_lightning: object, name: str) -> None:
    if "lightning" in sys.modules or importlib.machinery.PathFinder.find_spec("lightning") is not None:
        pytest.skip("lightning is installed")
    source = f"import {name}\nfrom lightning.pytorch.callbacks import Callback\n" + net(
        "width=2", "self.layer = nn.Linear(width, self.kept)"
    )
    model, _ = model_of(write(source.replace("nn.Module", "L.LightningModule")))
    assert model.layer.out_features == 3
