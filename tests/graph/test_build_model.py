"""The model of a file: which class, from which config and sizes, and what is said where that is open."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.build import TooLarge
from attn_fuse.explain.building.choose_entry import candidates, outermost
from attn_fuse.explain.building.find_file import file_in
from attn_fuse.explain.building.sizes import value_for
from attn_fuse.explain.opening.open_file import imported
from tests.model_files import Write, model_of, net


def outermost_name(path: Path) -> str:
    with imported(path) as module:
        return outermost(module).__name__


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
            model_of(write(CONFIG + net("flavour: str, width: int, kind, config, depth=2", "kind.of(flavour)")))

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
        message = r"cannot build GPT: AssertionError: assert config.width < 0 \(model.py:\d+\); build it with"
        with pytest.raises(ExplainError, match=message):
            model_of(write(CONFIG + net("config", "assert config.width < 0")))


class TestSizes:
    @pytest.mark.parametrize(
        ("signature", "note"),
        [
            ("vocab_size, d_model, n_heads", "vocab_size=1000, d_model=256, n_heads=4"),
            ("dim, depth, num_heads=12", "dim=768, depth=2"),
            ("n_embd=96, *, n_head", "n_head=4"),
            (
                "embed_dim, num_heads, mlp_ratio: float, drop_rate",
                "embed_dim=256, num_heads=4, mlp_ratio=4.0, drop_rate=0.0",
            ),
            ("img_size, patch_size, in_chans, num_classes", "img_size=64, patch_size=16, in_chans=3, num_classes=10"),
            ("image_size, patch_size=14", "image_size=112"),
            ("im_size, mask_ratio, num_layers", "im_size=64, mask_ratio=0.5, num_layers=2"),
            ("d_model, heads_count", "d_model=256, heads_count=4"),
            (
                "src_pad_idx, max_len, d_ff, device, use_bias",
                "src_pad_idx=0, max_len=128, d_ff=1024, device='cpu', use_bias=False",
            ),
        ],
    )
    def test_small_and_fitting_by_name(self, write: Write, signature: str, note: str) -> None:
        notes: list[str] = []
        model_of(write(net(signature)), notes)
        assert notes == [f"sizes by name: GPT({note})"]

    @pytest.mark.parametrize("name", ["flavour", "encoder", "tokenizer", "foo"])
    def test_a_name_that_says_nothing_has_none(self, name: str) -> None:
        assert value_for(name) is None

    def test_a_string_is_never_a_number(self) -> None:
        assert value_for("embed", str) is None

    def test_the_fields_of_a_config(self, write: Write) -> None:
        notes: list[str] = []
        config = (
            "@dataclass\nclass ModelDimensions:\n    n_vocab: int\n    n_text_head: int\n    n_text_state: int = 96\n"
        )
        model, _ = model_of(
            write(config + net("dims: ModelDimensions", "self.layer = nn.Linear(dims.n_text_state, 1)")), notes
        )
        assert model.layer.in_features == 96
        assert notes == ["sizes by name: ModelDimensions(n_vocab=1000, n_text_head=4)"]

    def test_a_config_that_leaves_its_vocabulary_open(self, write: Write) -> None:
        config = "@dataclass\nclass ModelArgs:\n    dim: int = 8\n    vocab_size: int = -1\n"
        body = "self.layer = nn.Embedding(args.vocab_size, args.dim)"
        assert model_of(write(config + net("args: ModelArgs", body)))[0].layer.num_embeddings == 1000

    def test_a_config_in_which_no_model_has_a_size(self, write: Write) -> None:
        fields = "n_embd: int = 0\n    vocab_size: int = 0\n    n_kv_head: int = 0\n    skip: int = 0"
        body = "self.args = args; self.layer = nn.Embedding(args.vocab_size, args.n_embd)"
        path = write(f"@dataclass\nclass ModelArgs:\n    {fields}\n" + net("args: ModelArgs", body))
        model = model_of(path)[0]
        assert model.layer.num_embeddings == 1000 and model.layer.embedding_dim > 0
        assert model.args.n_kv_head == model.args.skip == 0

    def test_an_inherited_field_that_is_open(self, write: Write) -> None:
        config = (
            "@dataclass\nclass Base:\n    vocab_size: int = -1\n@dataclass\nclass ModelArgs(Base):\n    dim: int = 8\n"
        )
        body = "self.layer = nn.Embedding(args.vocab_size, args.dim)"
        assert model_of(write(config + net("args: ModelArgs", body)))[0].layer.num_embeddings == 1000

    def test_a_named_tuple_that_leaves_one_open(self, write: Write) -> None:
        config = (
            "from typing import NamedTuple\nclass Config(NamedTuple):\n    vocab_size: int = None\n    dim: int = 8\n"
        )
        body = "self.layer = nn.Embedding(cfg.vocab_size, cfg.dim)"
        assert model_of(write(config + net("cfg: Config", body)))[0].layer.num_embeddings == 1000

    def test_fields_that_may_be_none_and_are_not(self, write: Write) -> None:
        config = (
            "@dataclass\nclass Args:\n    dim: int = 8\n    n_heads: int | None = None\n    top: int | None = None\n"
        )
        body = "assert args.top is None; self.layer = nn.Linear(args.dim // args.n_heads, 1)"
        assert model_of(write(config + net("args: Args", body)))[0].layer.in_features == 8 // 4

    def test_fields_of_choices_and_a_guess(self, write: Write) -> None:
        config = """
import enum
from typing import Literal, NamedTuple
class Kind(enum.Enum):
    RECURRENT = 1
    ATTENTION = 2
class Config(NamedTuple):
    width: int
    kinds: tuple[Kind, ...]
    norm: Literal["rms", "layer"]
    cap: float
    span: int | None
"""
        body = """assert [kind.name for kind in config.kinds] == ["RECURRENT", "ATTENTION"] and config.norm == "rms"
        assert config.cap > 0 and config.span is None
        self.layer = nn.Linear(config.width, 1)"""
        notes: list[str] = []
        assert model_of(write(config + net("config: Config", body)), notes)[0].layer.in_features == 256
        assert any("guesses, for names that say nothing: Config(cap=2, span=None)" in note for note in notes)

    def test_a_config_that_is_annotated_as_a_dict(self, write: Write) -> None:
        text = "from typing import Any\n" + net("config: dict[str, Any]", 'self.layer = nn.Linear(config["dim"], 1)')
        assert model_of(write(text))[0].layer.in_features == 256

    def test_one_letter_of_which_attributes_are_read(self, write: Write) -> None:
        assert model_of(write(net("c", "self.layer = nn.Linear(c.hidden_size, c.n_heads)")))[0].layer.out_features == 4

    def test_a_width_is_no_multiple_of_the_size_of_a_head(self) -> None:
        assert value_for("dim", None, {"dim_head": 64, "heads": 8}) == 512
        assert value_for("vae_codebook_size") == 1000

    def test_one_letter_that_is_handed_on(self, write: Write) -> None:
        inner = net("width, c", "self.layer = nn.Linear(c.hidden_size, c.n_heads); c.n_layers, c.dropout", "Inner")
        model = model_of(write(inner + net("width, c", "self.inner = Inner(width, c)")))[0]
        assert model.inner.layer.in_features == 256

    def test_an_activation_by_name(self) -> None:
        assert value_for("activation", str) == value_for("act_fn", str) == "relu" and value_for("kind", str) is None
        found = value_for("activation")
        assert found == "relu" and found(nn.Parameter(-nn.Linear(1, 1).weight.abs())).max() == 0

    def test_what_is_counted_may_stand_first(self) -> None:
        assert value_for("layers_num") == value_for("num_layers") and value_for("heads_count") == value_for("heads")
        assert value_for("num_patches", None, {"image_size": 32, "patch_size": 4}) == 64
        assert value_for("patch_num") == (64 // value_for("patch_size")) ** 2

    def test_sizes_that_its_errors_ask_for(self, write: Write) -> None:
        body = """self.norm = nn.GroupNorm(32, in_channels)
        self.layers = nn.ModuleList(nn.Linear(context_dim[i], heads) for i in range(2))
        assert in_channels // heads == 16"""
        notes: list[str] = []
        model, _ = model_of(write(net("in_channels, heads, context_dim=None", body)), notes)
        assert model.norm.num_channels == 64 and model.layers[1].in_features == 256
        assert any(re.search(r"as its errors ask: .*in_channels=64", note) for note in notes)

    def test_sizes_that_nothing_mends(self, write: Write) -> None:
        with pytest.raises(ExplainError, match=r"cannot build GPT: ValueError: num_channels \(3\) must be divisible"):
            model_of(write(net("in_channels", "nn.GroupNorm(32, 3 + 0 * in_channels)")))

    def test_fewer_layers_of_a_config_of_any_class(self, write: Write) -> None:
        config = """
class Settings:
    def __init__(self, n_layer=30, n_embd=64):
        self.n_layer, self.n_embd = n_layer, n_embd
"""
        body = "self.h = nn.ModuleList(nn.Linear(config.n_embd, config.n_embd) for _ in range(config.n_layer))"
        model, _ = model_of(write(config + net("config: Settings", body)), most=20_000)
        assert len(model.h) == 2


class TestParts:
    """Constructors that take other modules of the file."""

    PARTS = net("d_model, n_layers", "self.layer = nn.Linear(d_model, 1)", "Encoder")

    @pytest.mark.parametrize("signature", ["encoder", "encoder: Encoder", "encoder: nn.Module, n_classes"])
    def test_a_module_by_its_name_or_annotation(self, write: Write, signature: str) -> None:
        name = signature.split(":")[0].split(",")[0]
        notes: list[str] = []
        model, _ = model_of(write(self.PARTS + net(signature, f"self.part = {name}", "Seq2Seq")), notes)
        assert model.part.layer.in_features == 256
        assert notes[0] == "sizes by name: Encoder(d_model=256, n_layers=2)"

    def test_one_that_no_class_is_named_after(self, write: Write) -> None:
        message = "its constructor needs reader; pass --entry 'Seq2Seq(reader=...)'"
        with pytest.raises(ExplainError, match=re.escape(message)):
            model_of(write(self.PARTS + net("reader", "self.part = Encoder(reader(3), 2)", "Seq2Seq")))


class TestWays:
    BODY = "self.layer = nn.Linear(width, 1)"

    def test_as_a_readme_builds_it(self, write: Write, tmp_path: Path) -> None:
        text = "# GPT\n```python\nsize = 4\nmodel = GPT(\n    width=3 * size,\n)\n```\n"
        (tmp_path / "README.md").write_text(text)
        notes: list[str] = []
        model, _ = model_of(write(net("width", self.BODY)), notes)
        assert model.layer.in_features == 12 and notes == ["as in README.md: GPT(width=3 * size)"]

    def test_as_a_readme_builds_its_parts(self, write: Write, tmp_path: Path) -> None:
        write(
            "class Encoder(nn.Module):\n    def __init__(self, n):\n        super().__init__()\n        self.n = n\n",
            "parts_of_it.py",
        )
        text = "```python\nfrom parts_of_it import Encoder\nfrom model import GPT\nencoder = Encoder(7)\n"
        (tmp_path / "README.md").write_text(text + "gpt = GPT(width=3, reads=encoder)\n```\n")
        notes: list[str] = []
        model, _ = model_of(
            write(net("width, reads", f"assert isinstance(reads, nn.Module); self.n = reads.n; {self.BODY}")), notes
        )
        assert model.n == 7 and notes == ["as in README.md: GPT(width=3, reads=encoder)"]

    def test_as_a_docstring_builds_it(self, write: Write) -> None:
        source = """
class GPT(nn.Module):
    \'\'\'A model.

    Examples
    --------
    >>> from anywhere import GPT
    >>> names = ["a", "b"]
    >>> table = {name: i for i, name in enumerate(names)}
    >>> model = GPT(table=table)
    \'\'\'

    def __init__(self, table):
        super().__init__()
        self.layer = nn.Linear(len(table), table["b"])
"""
        notes: list[str] = []
        model, _ = model_of(write(source.replace("\\'", "'")), notes)
        assert model.layer.in_features == 2 and notes == ["as in GPT's docstring: GPT(table=table)"]

    def test_as_main_builds_it(self, write: Write) -> None:
        main = "if __name__ == '__main__':\n    model = GPT(width=5)\n"
        assert model_of(write(net("width", self.BODY) + main))[0].layer.in_features == 5

    def test_with_a_config_that_the_readme_fills(self, write: Write, tmp_path: Path) -> None:
        text = "```\nconfig = GPT.defaults()\nconfig.flavour = 7\nmodel = GPT(config)\n```\n"
        (tmp_path / "README.md").write_text(text)
        # A config may be used once only, as of a model that writes into it.
        body = "config.seen = not hasattr(config, 'seen')\n        assert config.seen\n"
        body += "        self.layer = nn.Linear(config.flavour, 1)"
        make = "    @staticmethod\n    def defaults():\n        import types\n"
        make += "        return types.SimpleNamespace(flavour=None)\n"
        assert model_of(write(net("config", body) + make))[0].layer.in_features == 7

    def test_by_a_factory_the_small_one_first(self, write: Write) -> None:
        factories = "".join(f"def gpt_{n}():\n    return GPT({w}, 'x')\n" for n, w in (("large", 9), ("small", 3)))
        notes: list[str] = []
        model, _ = model_of(write(net("width, flavour", self.BODY) + factories), notes)
        assert model.layer.in_features == 3 and notes == ["built by gpt_small()"]

    def test_by_a_factory_from_sizes(self, write: Write) -> None:
        factory = "def build_gpt(d_model) -> GPT:\n    return GPT(d_model, 'x')\n"
        notes: list[str] = []
        model, _ = model_of(write(net("width, flavour", self.BODY) + factory), notes)
        assert model.layer.in_features == 256 and notes[1:] == ["sizes by name: build_gpt(d_model=256)"]

    def test_too_large_a_default_gets_fewer_layers(self, write: Write) -> None:
        body = "self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(n_layer))"
        notes: list[str] = []
        model, _ = model_of(write(net("n_layer=50", body)), notes, most=1000)
        assert len(model.layers) == 2 and notes == ["fewer layers, since its defaults are too large: n_layer=2"]

    def test_too_large_a_layer_gets_fewer_experts_and_words(self, write: Write) -> None:
        body = """self.words = nn.Embedding(vocab_size, 10)
        self.layers = nn.ModuleList(nn.Linear(10, 10 * num_experts) for _ in range(n_layer))
        assert num_experts > experts_per_token"""
        notes: list[str] = []
        source = net("n_layer=50, num_experts=64, experts_per_token=4, vocab_size=100_000", body)
        model, _ = model_of(write(source), notes, most=20_000)
        assert [len(model.layers), model.layers[0].out_features, model.words.num_embeddings] == [2, 80, 1000]
        assert notes == [
            "fewer layers, experts and words, since its defaults are too large: "
            "n_layer=2, num_experts=8, vocab_size=1000"
        ]

    def test_too_large_a_config_that_stands_for_none(self, write: Write) -> None:
        source = "@dataclass\nclass Config:\n    n_layers: int = 50\n    flavour: str = 'x'\n"
        body = """config = Config() if config is None else config
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(config.n_layers))"""
        notes: list[str] = []
        model, _ = model_of(write(source + net("config: Config | None = None, strategy=max", body)), notes, most=1000)
        assert len(model.layers) == 2 and notes == ["fewer layers, since its defaults are too large: n_layers=2"]

    def test_an_option_that_is_off_by_none_stays_so(self, write: Write) -> None:
        source = "class Config:\n    def __init__(self):\n        self.vocab_size = -1\n        self.width = 6\n"
        body = """assert pre_trained is None
        self.layer = nn.Embedding(config.vocab_size, config.width)"""
        model, _ = model_of(write(source + net("config=None, pre_trained=None", body)))
        assert (model.layer.num_embeddings, model.layer.embedding_dim) == (1000, 6)

    def test_a_constructor_that_wants_all_memory(self, write: Write) -> None:
        body = "self.mask = torch.ones(1 << 20, 1 << 20, dtype=torch.uint8)[0]"
        with pytest.raises(ExplainError, match=r"cannot build GPT: .*(alloc|memory)"):
            model_of(write(net("", body)), most=1 << 20)

    def test_too_large_altogether(self, write: Write) -> None:
        # Memory for it would not be had.
        with pytest.raises(TooLarge, match=r"GPT has 1e\+15 parameters, more than 1e\+09; build a smaller one with"):
            model_of(write(net("width=10**15", self.BODY)))


class TestDirectories:
    def test_the_file_with_the_model(self, write: Write, tmp_path: Path) -> None:
        write("class Net(nn.Module): pass\n", "tests/model.py")
        write("class Loss(nn.Module): pass\n", "loss.py")
        write("def train(): pass\n", "train.py")
        write("class Net(nn.Module): pass\n# softmax\n", "core/other.py")
        path = write("class Net(nn.Module): pass\n# softmax\n", "core/model.py")
        notes: list[str] = []
        assert file_in(tmp_path, notes.append) == path
        assert notes == ["of 3 files with models, core/model.py is taken; others: core/other.py, loss.py"]

    def test_one_without_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(ExplainError, match=r"no Python file in it defines an nn\.Module class; pass the file"):
            file_in(tmp_path)


def test_the_method_that_runs_in_place_of_a_forward_is_said(write: Write) -> None:
    source = net("width=3", "self.layer = nn.Linear(width, 1)") + "    def finetune(self, x): return self.layer(x)\n"
    notes: list[str] = []
    model_of(write(source), notes)
    assert notes == ["no forward: in its place finetune"]
