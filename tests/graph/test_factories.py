"""Functions that give a model: told by what they return, in the model's own file and in those that import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.choose_entry import outermost
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.reading.factories import factories_of
from tests.model_files import Write, model_of, net

GPT = net("width, flavour", "self.layer = nn.Linear(width, 1)")


@pytest.fixture
def names(write: Write) -> Iterator[Callable[[str], list[str]]]:
    """The names of the factories of a file with GPT and more source."""

    def found(source: str) -> list[str]:
        path = write(GPT + source)
        with imported(path) as module:
            return [factory.__name__ for factory in factories_of(outermost(module), vars(module), path)]

    yield found


@pytest.mark.parametrize(
    "body",
    [
        "return GPT(3, 'x')",
        "model = GPT(3, 'x')\n    return model",
        "model = GPT(3, 'x').eval()\n    return model.float(), 5",
        "made = other(3)\n    return made",
        "return wrapped(GPT, 3)",
    ],
)
def test_what_it_returns_makes_a_factory(names: Callable[[str], list[str]], body: str) -> None:
    helpers = "def other(n):\n    return GPT(n, 'x')\ndef wrapped(kind, *args):\n    return kind(*args, 'x')\n"
    assert names(f"{helpers}def anything():\n    {body}\n")[0] == "anything"


@pytest.mark.parametrize(
    "function",
    [
        "def run():\n    model = GPT(3, 'x')\n    model(1)\n",
        "def width_of():\n    return GPT(3, 'x').layer\n",
        "def build_other():\n    return nn.Linear(3, 3)\n",
        "def train_gpt():\n    return GPT(3, 'x')\n",
        "def from_pretrained():\n    return GPT(3, 'x')\n",
        "def gpt_large(pretrained=True):\n    return GPT(3, 'x')\n",
    ],
)
def test_what_is_none(names: Callable[[str], list[str]], function: str) -> None:
    assert names(function) == []


def test_small_ones_without_arguments_come_first(names: Callable[[str], list[str]]) -> None:
    source = "".join(f"def {name}:\n    return GPT(1, 'x')\n" for name in ("gpt_xl()", "gpt_b(width)", "gpt_s()"))
    assert names(source) == ["gpt_s", "gpt_xl", "gpt_b"]


def test_of_a_file_that_imports_the_class(write: Write) -> None:
    write("from model import GPT\ndef make(flavour='x'):\n    return 5, GPT(7, flavour)\n", "makes_models.py")
    notes: list[str] = []
    assert model_of(write(GPT), notes)[0].layer.in_features == 7 and notes == ["built by make()"]


@pytest.mark.parametrize(
    "other",
    [
        "class GPT: pass\ndef make():\n    return GPT()\n",
        "from elsewhere.thing import GPT\ndef make():\n    return GPT(7, 'x')\n",
        "from model import GPT\nfor _ in range(3):\n    raise SystemExit\ndef make():\n    return GPT(7, 'x')\n",
        "from model import GPT\nimport not_there\nnot_there.go\ndef make():\n    return GPT(7, 'x')\n",
    ],
)
def test_another_files_class_of_the_name_and_programs_are_left_alone(write: Write, other: str) -> None:
    write(other, "makes_models.py")
    path = write(GPT)
    with imported(path) as module:
        assert list(factories_of(outermost(module), vars(module), path)) == []


def test_its_config_is_found_as_a_constructors_is(write: Write, tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text('{"MODEL": {"SIZE": {"width": 6}}}')
    notes: list[str] = []
    factory = "def get_gpt(config, **kwargs):\n    return GPT(config.MODEL.SIZE.width, 'x', **kwargs)\n"
    model, _ = model_of(write(GPT + factory), notes)
    assert model.layer.in_features == 6 and notes == ["built by get_gpt", "config: small.json"]


def test_groups_of_settings_that_a_python_file_assigns(write: Write) -> None:
    write("_C = make()\n_C.MODEL = make()\n_C.MODEL.WIDTH = 6\n_C.MODEL.HEAD.TOP = 5\n", "config/defaults.py")
    body = "self.layer = nn.Linear(cfg.MODEL.WIDTH, cfg.MODEL.HEAD.TOP)\n        self.more = cfg.DATA.NUM_LAYERS"
    model: Any = model_of(write(net("cfg", body)))[0]
    assert (model.layer.in_features, model.layer.out_features, model.more) == (6, 5, 2)


def test_settings_under_short_names_and_a_file_over_them(write: Write) -> None:
    defaults = "def get_default():\n    config = make()\n    config.data = data = make()\n    data.num_channels = 5\n"
    defaults += "    model = config.model = make()\n    model.width = 7\n    return config\n"
    write(defaults, "configs/default_small.py")
    over = "from configs.default_small import get_default\ndef get_config():\n    config = get_default()\n"
    for name, kind in (("model", "Swish"), ("other", "elu")):
        write(
            f"{over}    model = config.model\n    model.kind = {kind!r}\n    return config\n", f"configs/{name}/ten.py"
        )
    body = "self.layer = nn.Linear(config.model.width, config.data.num_channels)\n"
    body += "        self.kind = config.model.kind.lower()"
    model: Any = model_of(write(net("config", body)))[0]
    assert (model.layer.in_features, model.layer.out_features, model.kind) == (7, 5, "swish")


def test_capitals_that_are_read_as_small_letters(write: Write) -> None:
    write("_C = make()\n_C.NET = make()\n_C.NET.D_WIDTH = 2**3\n_C.NET.NAMES = ['self', 'cross'] * 2\n", "config.py")
    body = "self.layers = nn.ModuleList(nn.Linear(config['d_width'], 1) for name in config['names'] if name == 'self')"
    model: Any = model_of(write(net("config", body)))[0]
    assert [layer.in_features for layer in model.layers] == [8, 8]


def test_the_text_of_a_sequence_on_a_command_line(write: Write) -> None:
    write(
        "p = make()\np.add_argument('--window', type=str, default='[4, 6]')\np.add_argument('--width', default=3)\n",
        "run.py",
    )
    model: Any = model_of(write(net("args", "self.layer = nn.Linear(args.width, args.window[1])")))[0]
    assert (model.layer.in_features, model.layer.out_features) == (3, 6)


def test_a_command_line_of_the_project_around(write: Write, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    write("p = make()\np.add_argument('--hidden_size', default=24)\n", "main.py")
    path = write(net("hyp_params", "self.layer = nn.Linear(hyp_params.hidden_size, 1)"), "src/model.py")
    (path.parent / "README.md").touch()
    assert model_of(path)[0].layer.in_features == 24


def test_one_that_builds_another_class(write: Write) -> None:
    other = net("", "self.layer = nn.Linear(7, 1)", "Block")
    source = f"{other}{GPT}KINDS = dict(block=Block, gpt=GPT)\n"
    source += "def build(kind='block') -> GPT:\n    return KINDS[kind]()\n"
    assert type(model_of(write(source))[0]).__name__ == "GPT"


def test_what_a_constructor_hands_on_to_the_one_above(write: Write) -> None:
    base = net("width, depth", "self.width, self.depth = width, depth", "Base")
    over = "class GPT(Base):\n    def __init__(self, d_model, **kwargs):\n"
    over += "        super().__init__(width=2 * d_model, **kwargs)\n"
    model: Any = model_of(write(base + over))[0]
    assert (model.width, model.depth) == (512, 2)


def test_sequences_where_the_constructor_reads_entries(write: Write) -> None:
    body = "self.width = sum(n_layers) + dims[2]\n        self.side = img_size[0]"
    source = net("n_layers, dims, img_size", body).replace("super()", "img_size = (img_size, 1)\n        super()")
    model: Any = model_of(write(source))[0]
    assert (model.width, model.side) == (2 + 2 + 256, 64)


def test_a_config_as_another_file_calls_it(write: Write) -> None:
    config = "@dataclass\nclass Params:\n    flavour: str\n    width: int\n"
    write("from model import Params\nKINDS = {'dev': dict(params=Params(flavour='x', width=6))}\n", "util.py")
    notes: list[str] = []
    model, _ = model_of(write(config + net("params: Params", "self.layer = nn.Linear(params.width, 1)")), notes)
    assert model.layer.in_features == 6 and notes == ["Params: as in util.py"]


def test_a_config_that_leaves_its_whole_numbers_open(write: Write) -> None:
    config = "@dataclass\nclass Config:\n    block_size: int = None\n    name: str = None\n    n_embd2: int = 24\n"
    notes: list[str] = []
    body = "self.seen = (config.block_size, config.name)"
    assert model_of(write(config + net("config", body)), notes)[0].seen == (128, None)
    assert notes == ["sizes by name: Config(block_size=128)"]


class TestStandIns:
    def test_a_dataclass_that_inherits_one(self, write: Write) -> None:
        source = "from not_installed import Serializable\n@dataclass\nclass Config(Serializable):\n    width: int = 6\n"
        body = "self.layer = nn.Linear(config.width, 1)\n        self.found = getattr(config, 'depth', 3)"
        model: Any = model_of(write(source + net("config: Config", body)))[0]
        assert model.layer.in_features == 6 and model.found == 3

    def test_a_submodule_of_git_that_was_not_fetched(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "third_party" / "midi").mkdir(parents=True)
        source = "from third_party.midi.notes import RANGE\nLAST = RANGE + 1\n"
        notes: list[str] = []
        with imported(write(source + net("width", "pass")), notes.append):
            pass
        assert notes == ["not installed, and stood in for: third_party.midi.notes"]


def test_what_a_constructor_hands_on_to_a_module_of_the_file(write: Write) -> None:
    inner = net("width, depth", "self.width, self.depth = width, depth", "Blocks")
    over = "class GPT(nn.Module):\n    def __init__(self, d_model, **kwargs):\n        super().__init__()\n"
    model: Any = model_of(write(inner + over + "        self.blocks = Blocks(d_model, **kwargs)\n"))[0]
    assert (model.blocks.width, model.blocks.depth) == (256, 2)


def test_a_config_file_with_a_part_of_the_arguments(write: Write, tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text('{"model": {"rates": [8, 2], "sizes": [3, 7], "flavour": "1"}}')
    notes: list[str] = []
    model: Any = model_of(
        write(net("rates, sizes, flavour, n_layers", "self.seen = (rates, flavour, n_layers)")), notes
    )[0]
    assert model.seen == ([8, 2], "1", 2)
    assert notes == ["as in base.json: model", "sizes by name: GPT(n_layers=2)"]


def test_an_embedding_as_an_argument(write: Write) -> None:
    model: Any = model_of(write(net("words: nn.Embedding, d_model=32", "self.words = words")))[0]
    assert isinstance(model.words, nn.Embedding)


def test_a_readmes_call_without_its_weights(write: Write, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("```\nmodel = GPT('b16', pretrained=True)\n```\n")
    model: Any = model_of(write(net("kind, pretrained", "self.seen = (kind, pretrained)")))[0]
    assert model.seen == ("b16", False)


def test_a_file_of_factories_is_about_what_they_give(write: Write, tmp_path: Path) -> None:
    write(GPT, "parts.py")
    source = "from parts import GPT\ndef anything():\n    return GPT(3, 'x')\n"
    with imported(write(source)) as module:
        assert outermost(module).__name__ == "GPT"
    source = "from parts import GPT\ndef train():\n    GPT(3, 'x')\n"
    with imported(write(source, "other.py")) as module, pytest.raises(ExplainError, match=r"it defines no nn\.Module"):
        outermost(module)


@pytest.mark.parametrize("place", ["model.py", "encoders.py"])
def test_a_part_by_the_last_word_of_its_class(write: Write, place: str) -> None:
    parts = net("width", "self.layer = nn.Linear(width, 1)", "MeshedEncoder") + net("width", "pass", "EncoderLayer")
    whole = net("encoder", "self.encoder = encoder", "Whole")
    if place != "model.py":
        write(parts, place)
    model, _ = model_of(write(whole + (parts if place == "model.py" else "")))
    assert type(model.encoder).__name__ == "MeshedEncoder"


BLOCK = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ self.layer(x)
"""


class TestChains:
    """Functions that give an `nn.Sequential` of the file's modules."""

    def test_one_is_the_files_model(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text(
            "```python\nfrom model import Net\nnet = Net(tokens=50, width=12, n=3)\n```"
        )
        source = "def Net(tokens: int, width: int, n=2):\n    net = nn.Sequential(nn.Embedding(tokens, width), "
        notes: list[str] = []
        model, _ = model_of(write(BLOCK + source + "*[Block(width) for _ in range(n)])\n    return net\n"), notes)
        assert type(model) is nn.Sequential and len(model) == 4 and model[0].num_embeddings == 50
        assert notes == ["as in README.md: Net(tokens=50, width=12, n=3)"]

    def test_a_librarys_model_by_name_where_the_file_has_no_class(self, write: Write) -> None:
        write("def create_model(name, pretrained=False):\n    return nn.Linear(3, 4)\n", "explained_zoo.py")
        source = (
            "def net(classes=10):\n    made = explained_zoo.create_model('vit', pretrained=True)\n    return made\n"
        )
        model, _ = model_of(write(f"import explained_zoo\n{source}"))
        assert type(model) is nn.Linear and model.out_features == 4

    def test_its_sizes_by_name(self, write: Write) -> None:
        source = BLOCK + "def Net(*, dim: int, depth):\n    return nn.Sequential(*[Block(dim) for _ in range(depth)])\n"
        model, _ = model_of(write(source))
        assert [block.layer.in_features for block in model] == [256, 256]

    @pytest.mark.parametrize(
        "source",
        [
            "def Block2(width):\n    return nn.Sequential(Block(width))\n"
            + net("width=3", "self.b = Block2(width)", "Net"),
            "def load_net():\n    return nn.Sequential(Block(3))\n",
            "def linear():\n    return nn.Sequential(nn.Linear(3, 3))\n",
        ],
    )
    def test_what_is_none(self, write: Write, source: str) -> None:
        with imported(write(BLOCK + source)) as module:
            assert outermost(module).__name__ in ("Block", "Net")


class TestPairs:
    """Numbers by name that the code takes for several."""

    INNER = net("sizes", "self.layer = nn.Linear(sizes[0], sizes[1])", "Inner")

    def test_a_pair_that_goes_through_an_attribute(self, write: Write) -> None:
        notes: list[str] = []
        source = self.INNER + net("size", "self.inner = Inner(size)", "Middle")
        source += net("depth, resolution", "self.size = resolution; self.inner = Middle(self.size).inner")
        assert model_of(write(source), notes)[0].inner.layer.weight.shape == (64, 64)
        assert "as its errors ask: resolution=(64, 64)" in notes

    def test_two_of_them(self, write: Write) -> None:
        source = self.INNER + net("resolution, dim", "self.inner, self.other = Inner(dim), Inner(resolution)")
        model, _ = model_of(write(source))
        assert model.inner.layer.weight.shape == (256, 256) and model.other.layer.weight.shape == (64, 64)

    def test_beside_a_name_that_says_nothing(self, write: Write) -> None:
        source = self.INNER + net("resolution, quux", "self.inner = Inner(resolution); self.q = nn.Linear(quux, 1)")
        assert model_of(write(source))[0].inner.layer.weight.shape == (64, 64)

    def test_another_error_is_told(self, write: Write) -> None:
        source = self.INNER + net("dim", "self.inner = Inner(5)")
        with pytest.raises(ExplainError, match="'int' object is not subscriptable"):
            model_of(write(source))
