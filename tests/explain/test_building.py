"""The model of a file: from its defaults, or from small values that its errors change."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building import TooLarge
from attn_fuse.explain.steps import now
from tests.explain.repository import (
    Case,
    Write,
    built,
    check,
    net,
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
        net("zork", "self.size = 192 // zork"), lambda m: m.size == 3, ("guesses, for names that say nothing: zork=64",)
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

FROM_PARTS = {
    "of the file": Case(
        net("d_model, n_layers", "self.layer = nn.Linear(d_model, 1)", "Encoder")
        + net("encoder: Encoder", "self.part = encoder", "Seq2Seq")
        + RUNS,
        lambda model: model.part.layer.in_features == 256,
        ("encoder.d_model=256, encoder.n_layers=2",),
    ),
    "of a file beside it": Case(
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
TABLES = (FROM_CONFIGS, BY_NAME, GUESSED, FROM_PARTS, AS_ERRORS_ASK, LARGE)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for table in TABLES for name, case in table.items()])
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
