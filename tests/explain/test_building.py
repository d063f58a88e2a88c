"""The model of a file: from its defaults, as its repository builds it, or from small values that its errors change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building import TooLarge, all_built
from attn_fuse.explain.choose import candidates
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.opening.stand_ins import MissingPackage
from attn_fuse.explain.steps import now
from tests.explain.repository import (
    Case,
    Write,
    built,
    built_in,
    check,
    net,
    parameters,
    size_of_layer,
    width,
)

CONFIG = """
@dataclass
class GPTConfig:
    block_size: int = 12
    width: int = 6
"""
RUNS = "    def forward(self, x): return x\n"
LAYER = "self.layer = nn.Linear(width, 1)"
OF_CONFIG = "self.layer = nn.Linear(config.width, 1)"


def test_nothing_is_made_up_where_the_defaults_build(write: Write) -> None:
    write("```\nfrom model import GPT\nGPT(width=7)\n```", "README.md")
    write("width: 9\n", "config.yaml")
    made = built(write(net("width=5, kind='x', depth: int | None = None", LAYER)))
    assert made.model.layer.in_features == 5 and made.notes == ()


def test_nothing_is_made_up_where_there_is_nothing_to_pass(write: Write) -> None:
    made = built(write("class Net(nn.Module): pass\n"))
    assert type(made.model).__name__ == "Net" and made.notes == () and made.slots == {}


FROM_CONFIGS = {
    **{
        f"GPT({signature})": Case(
            CONFIG + net(signature, f"self.layer = nn.Linear({signature.split(':')[0].strip('*, ')}.width, 1)"),
            width(6),
        )
        for signature in (
            "config",
            "config: GPTConfig",
            "config: 'GPTConfig'",
            "config: GPTConfig | None",
            "anything: GPTConfig",
            "cfg",
            "args",
            "*, config",
        )
    },
    "a plain class of settings": Case("class Config:\n    width = 7\n" + net("config", OF_CONFIG), width(7)),
    "the one that has what is read, of several": Case(
        f"@dataclass\nclass TrainConfig:\n    steps: int = 1\n{CONFIG}" + net("config", OF_CONFIG), width(6)
    ),
    "the results of a model are none": Case(
        "@dataclass\nclass Output:\n    loss: int\n" + CONFIG + net("config", OF_CONFIG), width(6)
    ),
    "config_class, as transformers has it": Case(
        "class Other:\n    pass\nclass Sizes:\n    def __init__(self, width=4): self.width = width\n"
        + net("config", OF_CONFIG).replace(":\n", ":\n    config_class = Sizes\n", 1),
        width(4),
    ),
    "a field without a default": Case(
        "@dataclass\nclass Dimensions:\n    n_vocab: int\n    n_state: int = 96\n"
        + net("dims: Dimensions", "self.layer = nn.Embedding(dims.n_vocab, dims.n_state)"),
        lambda model: (model.layer.num_embeddings, model.layer.embedding_dim) == (1000, 96),
        ("small values by name: dims.n_vocab=1000",),
    ),
    "fields of choices": Case(
        "import enum\nfrom typing import Literal, NamedTuple\nclass Kind(enum.Enum):\n    A = 1\n    B = 2\n"
        "class Config(NamedTuple):\n    width: int\n    kind: Kind\n    norm: Literal['rms', 'layer']\n"
        + net("config: Config", f"assert config.kind.name == 'A' and config.norm == 'rms'\n        {OF_CONFIG}"),
        width(256),
        ("small values by name: config.width=256, config.kind=<Kind.A: 1>, config.norm='rms'",),
    ),
    "a vocabulary that is left open": Case(
        "@dataclass\nclass ModelArgs:\n    dim: int = 8\n    vocab_size: int = -1\n"
        + net("args: ModelArgs", "self.layer = nn.Embedding(args.vocab_size, args.dim)"),
        lambda model: model.layer.num_embeddings > 1,
        ("as its errors ask: args.vocab_size=",),
    ),
    "a config within a config": Case(
        "@dataclass\nclass PartConfig:\n    d_model: int\n    n_heads: int = 2\n"
        "@dataclass\nclass Config:\n    encoder_config: PartConfig\n"
        + net("config: Config", "self.layer = nn.Linear(config.encoder_config.d_model, 1)"),
        width(128),
        ("small values by name: config.encoder_config.d_model=128",),
    ),
    "an entry that the class lacks": Case(
        "class Config:\n    width = 3\n" + net("config: Config", "self.layer = nn.Linear(config.width, config.n_embd)"),
        lambda model: size_of_layer(model) == (3, 256),
        ("as its errors ask: config.n_embd=256",),
    ),
    "a mapping annotated as one": Case(
        "from typing import Any\n" + net("config: dict[str, Any]", "self.layer = nn.Linear(config['dim'], 1)"),
        width(256),
        ("config.dim=256",),
    ),
    "attributes and keys without a class": Case(
        net("configs", "self.layer = nn.Linear(configs.seq_len, configs['d_model'])"),
        lambda model: size_of_layer(model) == (128, 256),
        ("small values by name: configs.seq_len=128, configs.d_model=256",),
    ),
    "one letter of which attributes are read": Case(
        net("c", "self.layer = nn.Linear(c.hidden_size, c.n_heads)"),
        lambda model: size_of_layer(model) == (256, 4),
        ("c.hidden_size=256, c.n_heads=4",),
    ),
    "the default of getattr stays": Case(
        net("opts", "self.layer = nn.Linear(getattr(opts, 'flavour', 12), opts.d_model)"),
        lambda model: size_of_layer(model) == (12, 256),
        ("opts.d_model=256",),
    ),
    "keywords": Case(
        net("**params", "self.layer = nn.Linear(params['embedding_dim'], 2)"),
        width(256),
        ("embedding_dim=256",),
    ),
}

BY_NAME = {
    signature: Case(net(signature), lambda model: True, (f"small values by name: {note}",))
    for signature, note in {
        "vocab_size, d_model, n_heads": "vocab_size=1000, d_model=256, n_heads=4",
        "dim, depth, num_heads=12": "dim=768, depth=2",
        "n_embd=96, *, n_head": "n_head=4",
        "embed_dim, mlp_ratio: float, drop_rate": "embed_dim=256, mlp_ratio=4.0, drop_rate=0.0",
        "img_size, patch_size, in_chans": "img_size=64, patch_size=16, in_chans=3",
        "image_size, patch_size=14": "image_size=112",
        "src_pad_idx, max_len, d_ff, device, use_bias": "src_pad_idx=0, max_len=128, d_ff=1024, device='cpu', "
        "use_bias=False",
        "depths: tuple[int, int, int]": "depths=(2, 2, 2)",
        "depths: list[int]": "depths=[2, 2]",
    }.items()
}

GUESSED = {
    "by division": Case(
        net("zork", "self.size = 6 // zork"), lambda m: m.size == 3, ("guesses, for names that say nothing: zork=2",)
    ),
    "an assertion on a number": Case(net("zork: int", "assert zork == 8"), lambda m: True, ("zork=8",)),
    "a flag": Case(net("zork", "assert zork is False"), lambda m: True, ("zork=False",)),
    "a sequence": Case(net("zork", "self.size = zork[0] + zork[2]"), lambda m: m.size > 0, ("zork=",)),
    "any module that will do": Case(
        net("end: nn.Module", "self.end, self.layer = end, nn.Linear(8, 8)"),
        lambda m: isinstance(m.end, nn.Identity),
        ("guesses, for names that say nothing: end=",),
    ),
}

PART = net("d_model, n_layers", "self.layer = nn.Linear(d_model, 1)", "Encoder")
FROM_PARTS = {
    **{
        f"Seq2Seq({signature})": Case(
            PART + net(signature, f"self.part = {signature.split(':')[0]}", "Seq2Seq") + RUNS,
            lambda model: model.part.layer.in_features == 256,
            ("encoder.d_model=256, encoder.n_layers=2",),
        )
        for signature in ("encoder", "encoder: Encoder", "encoder: nn.Module")
    },
    "by the last word of its class": Case(
        net("encoder", "self.encoder = encoder", "Whole") + RUNS + net("width", "pass", "MeshedEncoder"),
        lambda model: type(model.encoder).__name__ == "MeshedEncoder",
        ("encoder.width=256",),
    ),
    "in a file beside it": Case(
        "from parts_of_it import Encoder\n" + net("encoder: Encoder", "self.encoder = encoder"),
        lambda model: model.encoder.layer.in_features == 4,
        files={"parts_of_it.py": net("width=4", LAYER, "Encoder")},
    ),
}

AS_ERRORS_ASK = {
    "a group that must divide": Case(
        net("in_channels", "self.norm = nn.GroupNorm(32, in_channels)"),
        lambda model: model.norm.num_channels % 32 == 0,
        ("as its errors ask: in_channels=",),
    ),
    "a width that heads must divide": Case(
        net("width=30, heads=8", f"assert width % heads == 0\n        {LAYER}"),
        lambda model: True,
        ("as its errors ask: ",),
    ),
    "an entry of a config": Case(
        "@dataclass\nclass Config:\n    width: int\n    n_heads: int = 48\n"
        + net("config: Config", f"assert config.width % config.n_heads == 0\n        {OF_CONFIG}"),
        lambda model: True,
        ("small values by name: config.width=3072",),
    ),
    "a text that the code compares": Case(
        net(
            "kind",
            "self.kind = kind\n        if self.kind == 'scaled': self.layer = nn.Linear(8, 8)\n"
            "        elif self.kind == 'average': self.layer = nn.Identity()\n        else: raise ValueError(kind)",
        ),
        lambda model: model.kind in ("scaled", "average"),
        ("as its errors ask: kind='",),
    ),
    "a text that a function knows": Case(
        "def layer(way):\n    if way not in ('wide', 'narrow'):\n        raise NotImplementedError(way)\n"
        "    return nn.Linear(8, 16)\n" + net("kind", "self.layer = layer(kind)"),
        width(8),
        ("as its errors ask: kind='",),
    ),
    "a key of a table": Case(
        "LAYERS = {'gelu': nn.GELU, 'silu': nn.SiLU}\n" + net("flavour", "self.act = LAYERS[flavour]()"),
        lambda model: type(model.act) in (nn.GELU, nn.SiLU),
        ("as its errors ask: flavour='gelu'",),
    ),
    "a key of a table for the entry of a config": Case(
        "LAYERS = {'gelu': nn.GELU, 'silu': nn.SiLU}\n" + net("config", "self.act = LAYERS[config['act_fn']]()"),
        lambda model: type(model.act) in (nn.GELU, nn.SiLU),
        ("as its errors ask: config.act_fn='gelu'",),
    ),
    "flags that are asserted": Case(
        net("qk_norm=False, bare=True", "assert qk_norm\n        assert not bare\n        self.n = 3"),
        lambda model: model.n == 3,
        ("as its errors ask: ",),
    ),
    "what must not be None": Case(
        net(
            "size=None, other=None",
            "self.size = size; assert self.size is not None\n        self.layer = nn.Linear(8, self.size)",
        ),
        lambda model: model.size is not None,
        ("as its errors ask: size=",),
    ),
    "a flag under which something absent is reached": Case(
        "try:\n    from no_such_kernels import Fast\nexcept ImportError:\n    pass\n"
        + net("width=8, use_fast=True", f"self.fast = Fast(width) if use_fast else None\n        {LAYER}"),
        width(8),
        ("as its errors ask: use_fast=False",),
    ),
    "a pair": Case(
        net("resolution", "self.layer = nn.Linear(resolution[0], resolution[1])"),
        lambda model: size_of_layer(model) == (64, 64),
        ("as its errors ask: resolution=(64, 64)",),
    ),
    "a pair that goes through an attribute": Case(
        net("sizes", "self.layer = nn.Linear(sizes[0], sizes[1])", "Inner")
        + net("size", "self.size = size; self.layer = Inner(self.size).layer"),
        lambda model: size_of_layer(model) == (256, 256),
        ("as its errors ask: size=(256, 256)",),
    ),
    "a number for each layer": Case(
        net("ratio=2.0", "self.layers = nn.ModuleList(nn.Linear(8, int(8 * ratio[i])) for i in range(2))"),
        lambda model: model.layers[1].out_features == 16,
        ("as its errors ask: ratio=",),
    ),
    "lists where a tuple does not do": Case(
        net("width", "self.layers = nn.ModuleList(nn.Linear(n, 8) for n in [8] + width)"),
        lambda model: model.layers[1].in_features == 256,
        ("as its errors ask: width=[256",),
    ),
}


WEIGHTS = {
    **{
        f"{state}": Case(
            net(
                "",
                "self.layer = nn.Linear(3, 4)\n        self.load_state_dict({name.removeprefix('module.'): value "
                f"for name, value in {state}.items()}})",
            ),
            width(3),
            ("random weights in place of ",),
        )
        for state in (
            "torch.load('/nowhere/gpt.pth')",
            "torch.load('/nowhere/gpt.pth', map_location='cpu')['model']['ema']",
            "torch.hub.load_state_dict_from_url('https://nowhere.invalid/gpt.pth')",
        )
    },
    "whose keys the constructor asks for": Case(
        net(
            "",
            "self.layer = nn.Linear(3, 4)\n        missing, unexpected = self.load_state_dict(state_dict="
            "torch.load('/nowhere/gpt.pth'), strict=True)\n        assert not missing and not unexpected",
        ),
        width(3),
        ("random weights in place of /nowhere/gpt.pth",),
    ),
}

LARGE = {
    "fewer layers": Case(
        net("n_layer=50", "self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(n_layer))"),
        lambda model: len(model.layers) == 2,
        ("as its errors ask: n_layer=2",),
        most=1000,
    ),
    "fewer layers of a config": Case(
        "class Settings:\n    def __init__(self, n_layer=30, n_embd=64):\n"
        "        self.n_layer, self.n_embd = n_layer, n_embd\n"
        + net(
            "config: Settings", "self.h = nn.ModuleList(nn.Linear(config.n_embd, 64) for _ in range(config.n_layer))"
        ),
        lambda model: len(model.h) == 2,
        ("as its errors ask: config.n_layer=2",),
        most=20_000,
    ),
    "fewer layers, and what an error asks for": Case(
        net(
            "qk_norm=False, depth=48",
            "assert qk_norm\n        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))",
        ),
        lambda model: len(model.layers) == 2,
        ("as its errors ask: ",),
        most=20_000,
    ),
}
TABLES = (FROM_CONFIGS, BY_NAME, GUESSED, FROM_PARTS, AS_ERRORS_ASK, WEIGHTS, LARGE)


@pytest.mark.parametrize("case", parameters({name: case for table in TABLES for name, case in table.items()}))
def test_built(write: Write, case: Case) -> None:
    check(write, case)


FAILS = {
    "a name that says nothing": (
        net("flavour: str", "flavour.of()"),
        r"its constructor needs flavour; pass --entry 'GPT\(flavour=\.\.\.\)'",
    ),
    "one beside others": (
        net("flavour: str, width: int, depth=2", "flavour.of(width)"),
        r"its constructor needs flavour; pass --entry 'GPT\(flavour=\.\.\., width=256\)'",
    ),
    "a string": (net("zork: str", "zork.lower()"), "its constructor needs zork"),
    "what no guess is": (net("zork", "assert zork < 0"), "its constructor needs zork; pass --entry"),
    "a constructor that raises": (
        net("width=3", "raise ValueError('no kind')"),
        r"ValueError: no kind \(model.py:\d+\)",
    ),
    "sizes that nothing mends": (
        net("in_channels", "nn.GroupNorm(32, 3 + 0 * in_channels)"),
        r"ValueError: num_channels \(3\) must be divisible",
    ),
    "a config that raises": (
        CONFIG + "    def __post_init__(self):\n        raise ValueError('no')\n" + net("config: GPTConfig"),
        r"ValueError: no \(model.py:\d+\)",
    ),
    "a program that ends": (net("width=3", "raise SystemExit(3)"), "SystemExit: 3"),
    "what comes out as another thing": (
        net("width=3", LAYER) + "    def __new__(cls, width=3): return 5\n",
        "cannot build GPT: its constructor gives a value of type int",
    ),
    "more memory than there may be": (
        net("", "self.mask = torch.ones(1 << 20, 1 << 20, dtype=torch.uint8)[0]"),
        "cannot build GPT: .*(alloc|memory)",
    ),
}


@pytest.mark.parametrize(("source", "message"), FAILS.values(), ids=FAILS)
def test_what_cannot_be_built_ends_in_one_line(write: Write, source: str, message: str) -> None:
    with pytest.raises(ExplainError, match=message) as raised:
        built(write(source))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "layer",
    [
        "nn.Linear(10**15, 1)",
        "nn.ModuleList(nn.Linear(1000, 1000) for _ in range(10**9))",
    ],
)
def test_too_large_altogether(write: Write, layer: str) -> None:
    """Neither memory for the one nor time for the other would be had: the first layer that is one too many raises."""
    with pytest.raises(TooLarge, match=r"GPT has .* parameters, more than 3e\+06; build a smaller one with"):
        built(write(net("", f"self.layers = {layer}")), most=3_000_000)


def test_parameters_that_several_modules_share_count_once(write: Write) -> None:
    body = "one = nn.Linear(100, 100)\n        self.layers = nn.ModuleList(nn.Sequential(one) for _ in range(9))"
    assert len(built(write(net("", body)), most=20_000).model.layers) == 9


def test_parameters_that_are_gone_do_not_count(write: Write) -> None:
    body = "for _ in range(9): self.layer = nn.Linear(100, 100)"
    assert built(write(net("", body)), most=30_000).model.layer.in_features == 100


def test_each_way_that_works_is_given_in_turn(write: Write) -> None:
    write("```\nGPT(width=7)\n```\n```\nGPT(width=9)\n```\n", "README.md")
    with imported(write(net("width", LAYER))) as module:
        ways = [*all_built(candidates(module)[0], module, 10**6, now() + 30)]
    assert [way.model.layer.in_features for way in ways] == [7, 9, 256]
    assert [way.notes for way in ways] == [
        ("as in README.md: GPT(width=7)",),
        ("as in README.md: GPT(width=9)",),
        ("small values by name: width=256",),
    ]


def test_again_with_other_values(write: Write) -> None:
    with built_in(write(net("width, n_layers=3", LAYER))) as made:
        assert made.again is not None
        other = made.again({"width": 5})
    assert other.model.layer.in_features == 5 and other.slots == {"width": 5, "n_layers": 3}
    assert other.notes == ("as its errors ask: width=5",)


def test_the_files_own_values_stay_as_they_are(write: Write) -> None:
    """A config that a model writes into, as `config.n_heads = ...`, is a copy."""
    write("```\nfrom model import GPT, SETTINGS\nmodel = GPT(SETTINGS)\n```\n", "README.md")
    body = "config['seen'] = 1\n        self.layer = nn.Linear(config['width'], config['depth'])"
    with imported(write("SETTINGS = dict(width=48, depth=2)\n" + net("config", body))) as module:
        made = next(all_built(candidates(module)[0], module, 10**6, now() + 30))
        assert size_of_layer(made.model) == (48, 2) and module.SETTINGS == {"width": 48, "depth": 2}


def test_a_search_ends_at_its_time(write: Write) -> None:
    path = write("import time\n" + net("zork, quux", "time.sleep(0.1)\n        raise ValueError(zork)"))
    start = now()
    with pytest.raises(ExplainError, match="cannot build GPT"):
        built(path, seconds=1.0)
    assert now() - start < 10


def test_a_constructor_writes_nothing_and_stays_in_its_folder(write: Write, tmp_path: Path) -> None:
    before = Path.cwd()
    body = f"import os; os.chdir({str(tmp_path)!r})\n        with open('weights.bin', 'w') as f: f.write('x')"
    with pytest.raises(ExplainError, match="PermissionError"):
        built(write(net("", body)))
    assert not (tmp_path / "weights.bin").exists() and Path.cwd() == before


HOLDS = "import no_such_tokens\n" + net(
    "width=3", "self.tokens = no_such_tokens.get_encoding('gpt2'); self.layer = nn.Linear(width, 3)"
)


class TestHeld:
    """What a missing package gives: a model may hold it, and never computes with it."""

    def test_a_value_that_forward_never_uses(self, write: Write) -> None:
        with built_in(write(f"{HOLDS}    def forward(self, x):\n        return self.layer(x)\n")) as made:
            assert made.model(torch.ones(3)).shape == (3,)

    @pytest.mark.parametrize(
        "use",
        [
            "self.tokens(x)",
            "self.tokens.encode(x)",
            "x if self.tokens == 'gpt2' else 2 * x",
            "x if self.tokens else 2 * x",
            "x + self.tokens",
            "self.tokens + x",
            "x * self.tokens.scale",
            "x[self.tokens]",
            "x[: len(self.tokens)]",
            "torch.cat([x, *self.tokens])",
            "torch.zeros(self.tokens)",
            "self.layer(x) @ self.tokens",
            "torch.softmax(x, self.tokens)",
            "x.view(-1, int(self.tokens))",
            "x * float(self.tokens.scale)",
            "x.to(self.tokens.dtype)",
        ],
    )
    def test_a_value_that_forward_uses(self, write: Write, use: str) -> None:
        with (
            built_in(write(f"{HOLDS}    def forward(self, x):\n        return {use}\n")) as made,
            pytest.raises(Exception),  # noqa: B017
        ):
            made.model(torch.ones(3))

    @pytest.mark.parametrize(
        "use",
        [
            "nn.Linear(self.tokens.count, 3)",
            "nn.Sequential(nn.Linear(3, 3), self.tokens)",
            "self.register_buffer('table', self.tokens)",
            "[n for n in self.tokens]",
            "nn.Linear(3 + self.tokens.count, 3)",
        ],
    )
    def test_a_value_that_the_constructor_uses(self, write: Write, use: str) -> None:
        with pytest.raises(MissingPackage, match=r"the model uses no_such_tokens\.get_encoding.* is not installed"):
            built(write(f"{HOLDS.rstrip()}; {use}\n"))

    def test_another_problem_is_told_as_it_is(self, write: Write) -> None:
        with pytest.raises(ExplainError, match="cannot build GPT: ValueError: no kind"):
            built(write(f"{HOLDS.rstrip()}; raise ValueError('no kind')\n"))

    def test_a_class_of_a_missing_package_is_none_that_is_there(self, write: Write) -> None:
        body = "self.several = type(sizes) == ListConfig; self.layer = nn.Linear(3, 3)"
        made = built(write(f"from no_such_config import ListConfig\n{net('sizes=(2, 4)', body)}"))
        assert made.model.several is False and isinstance(made.model.layer, nn.Linear)

    def test_annotations_of_a_missing_package_say_nothing(self, write: Write) -> None:
        source = "from no_such_types import Float, Union\n" + net("width: Union[int, tuple], heads: Float = 2", LAYER)
        assert built(write(source)).model.layer.in_features == 128
