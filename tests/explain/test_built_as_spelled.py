"""The model of a file, built as the other files of its repository say: settings, command lines, calls in texts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.explain.repository import Case, Write, check, net, parameters, size_of_layer, width

RUNS = "    def forward(self, x): return x\n"
LAYER = "self.layer = nn.Linear(width, 1)"
OF_CONFIG = "self.layer = nn.Linear(config.width, 1)"
CONFIG = """
@dataclass
class GPTConfig:
    block_size: int = 12
    width: int = 6
"""
DEFAULTS_OF = "import argparse\np = argparse.ArgumentParser()\n"
OF_KEYS = net("config", "self.layer = nn.Linear(config['width'], config['flavour'])")
YAML = "data:\n  path: x  # where\nmodel:\n  width: 12\n  flavour: 3\n"
GROUPS = net("cfg", "self.layer = nn.Linear(cfg.MODEL.WIDTH, cfg.MODEL.HEAD.TOP)")


def of_12_and_3(model: Any) -> bool:
    return size_of_layer(model) == (12, 3)


FROM_FILES = {
    "a command line": Case(
        net("configs", "assert configs.causal is False; self.layer = nn.Linear(configs.seq_len, configs.d_model)"),
        lambda model: size_of_layer(model) == (24, 6),
        ("as in run.py",),
        {
            "run.py": f"{DEFAULTS_OF}p.add_argument('--seq_len', type=int, default=24)\n"
            "p.add_argument('--d-model', default=6)\np.add_argument('--causal', action='store_true')\n"
        },
    ),
    "a command line, and names for the rest": Case(
        net("configs", "self.layer = nn.Linear(configs.seq_len, configs.d_model * configs.n_heads // 4)"),
        lambda model: size_of_layer(model) == (24, 256),
        ("as in run.py", "configs.n_heads=4"),
        {"run.py": f"{DEFAULTS_OF}p.add_argument('--seq_len', default=24)\np.add_argument('--d_model', default=256)\n"},
    ),
    "a dict of the file": Case("CONFIG = {'width': 12, 'flavour': 3}\n" + OF_KEYS, of_12_and_3, ("as in model.py",)),
    "a function of another file": Case(
        OF_KEYS,
        of_12_and_3,
        ("as in sizes_of_it.py",),
        {"sizes_of_it.py": "def small():\n    return dict(width=12, flavour=3)\n"},
    ),
    "the attributes of a class of settings": Case(
        OF_KEYS,
        of_12_and_3,
        ("as in my_config.py",),
        {"my_config.py": "class Small:\n    width = 12\n    flavour: int = 3\n"},
    ),
    "what the constructor of a class of settings assigns": Case(
        OF_KEYS,
        of_12_and_3,
        ("as in my_config.py",),
        {
            "my_config.py": "class Small:\n    def __init__(self, path):\n        self.words = open(path).read()\n"
            "        self.width, self.flavour = 12, 3\n        self.width = 12\n        self.flavour = 3\n"
        },
    ),
    **{
        name: Case(OF_KEYS, of_12_and_3, (f"as in {name.rpartition('/')[2]}",), {name: text})
        for name, text in {
            "conf/small.yaml": YAML,
            "conf.json": '{"data": {}, "model": {"width": 12, "flavour": 3}}',
            "conf.toml": "[data]\n[model]\nwidth = 12\nflavour = 3\n",
            "my_config.py": "other = run()\nmodel = {'width': 12, 'flavour': 3}\n",
            "defaults.py": "model = CfgNode()\nmodel.width = 12\nmodel.flavour = 3\nmodel.seen = run()\n",
            "sweep.yaml": "width:\n  value: 12\n  desc: how wide\nflavour:\n  value: 3\n",
        }.items()
    },
    "groups of settings": Case(
        GROUPS,
        of_12_and_3,
        ("as in small.yaml",),
        {"small.yaml": "MODEL:\n  WIDTH: 12\n  HEAD:\n    TOP: 3\n"},
    ),
    "groups of settings that a Python file assigns": Case(
        GROUPS,
        of_12_and_3,
        ("as in defaults.py",),
        {"defaults.py": "_C = make()\n_C.MODEL = make()\n_C.MODEL.WIDTH = 12\n_C.MODEL.HEAD.TOP = 3\n"},
    ),
    "the fields of a config class": Case(
        "@dataclass\nclass Config:\n    width: int\n    flavour: int\n"
        + net("config: Config", "self.layer = nn.Linear(config.width, config.flavour)"),
        of_12_and_3,
        ("as in a.yaml",),
        {"a.yaml": "_target_: models.Config\nwidth: 12\nflavour: 3\nother: 1\n"},
    ),
    "the arguments of the constructor": Case(
        net("flavour, width", "self.layer = nn.Linear(width, flavour)"),
        of_12_and_3,
        ("as in a.yaml",),
        {"a.yaml": "net:\n  target: models.GPT\n  params:\n    flavour: 3\n    width: 12\n"},
    ),
    "half of the arguments": Case(
        net("rates, flavour, n_layers", "self.seen = (rates, flavour, n_layers)"),
        lambda model: model.seen == ([8, 2], "sweet", 2),
        ("as in base.json", "small values by name: n_layers=2"),
        {"base.json": '{"model": {"rates": [8, 2], "flavour": "sweet"}}'},
    ),
    "not of fewer than half of them": Case(
        net("flavour, width, n_layers", "self.seen = (width, n_layers)"),
        lambda model: model.seen == (256, 2),
        ("small values by name: width=256, n_layers=2",),
        {"base.json": '{"flavour": 5}'},
    ),
    "files that are no configs": Case(
        net("config", "self.layer = nn.Linear(config['width'], 1)"),
        width(256),
        ("small values by name: config.width=256",),
        {"a.json": "{ nothing", "b.yaml": "a: [1\n- b: {{ x }}", "c.toml": "= 3", "d.py": "def f(:\n"},
    ),
    "no GPU is asked for": Case(
        net("args", "self.device, self.layer = torch.zeros(1, device=args.device), nn.Linear(args.width, 1)"),
        width(3),
        ("as in config.py",),
        {"config.py": "device = 'cuda:0'\nwidth = 3\n"},
    ),
}

SPELLED = {
    "a README": Case(
        net("width", LAYER),
        width(12),
        ("as in README.md: GPT(width=3 * size)",),
        {"README.md": "# GPT\n```python\nsize = 4\nmodel = GPT(\n    width=3 * size,\n)\n```\n"},
    ),
    "a README with parts": Case(
        net("width, reads", f"assert isinstance(reads, nn.Module); {LAYER}"),
        width(3),
        ("as in README.md: GPT(width=3, reads=encoder)",),
        {
            "README.md": "```python\nfrom parts_of_it import Encoder\nencoder = Encoder(7)\n"
            "gpt = GPT(width=3, reads=encoder)\n```\n",
            "parts_of_it.py": net("n", "self.n = n", "Encoder"),
        },
    ),
    "a docstring": Case(
        net("table", "self.layer = nn.Linear(len(table), table['b'])").replace(
            ":\n",
            ':\n    """A model.\n\n    >>> names = ["a", "b"]\n'
            '    >>> model = GPT(table={n: i for i, n in enumerate(names)})\n    """\n',
            1,
        ),
        lambda model: size_of_layer(model) == (2, 1),
        ("as in a docstring of model.py: GPT(",),
    ),
    "under __main__": Case(
        net("width", LAYER) + "if __name__ == '__main__':\n    model = GPT(width=5)\n",
        width(5),
        ("as in model.py: GPT(width=5)",),
    ),
    "a script": Case(
        net("width, flavour", "self.layer = nn.Linear(width, flavour)"),
        lambda model: size_of_layer(model) == (6, 5),
        ("as in check.py: GPT(6, flavour=5)",),
        {
            "scripts/check.py": "from model import GPT\ndef check():\n    return GPT(6, flavour=5)\n",
            "scripts/another.py": "from elsewhere import GPT\ndef check():\n    return GPT(60, flavour=50)\n",
            "README.md": "",
        },
    ),
    "a config that is filled": Case(
        "import types\n" + net("config", "self.layer = nn.Linear(config.flavour, 1)"),
        width(7),
        ("as in README.md: GPT(config)",),
        {
            "README.md": "```\nimport types\nconfig = types.SimpleNamespace()\nconfig.flavour = 7\n"
            "model = GPT(config)\n```\n"
        },
    ),
    "a config as another file calls it": Case(
        "@dataclass\nclass Params:\n    flavour: str\n    width: int\n"
        + net("params: Params", "self.layer = nn.Linear(params.width, len(params.flavour))"),
        lambda model: size_of_layer(model) == (6, 3),
        ("as in util.py",),
        {"util.py": "from model import GPT, Params\ndef dev():\n    return GPT(Params(flavour='xyz', width=6))\n"},
    ),
    "a factory of the file": Case(
        net("width, flavour", LAYER) + "def gpt_small():\n    return GPT(3, 'x')\n",
        width(3),
        ("as in model.py: GPT(3, 'x')",),
    ),
    "a class method by a name": Case(
        net("width, flavour", "self.layer = nn.Linear(width, flavour)")
        + "    @classmethod\n    def from_name(cls, name):\n        return cls(*{'small': (6, 2)}[name])\n",
        lambda model: size_of_layer(model) == (6, 2),
        ("as in README.md",),
        {"README.md": "```python\nfrom model import GPT\nmodel = GPT.from_name('small')\n```\n"},
        not_yet="calls of class methods are not found",
    ),
    "only in part": Case(
        net("n_words, zork, width", "self.bias, self.layer = zork.sum(1), nn.Linear(width, n_words)"),
        lambda model: model.bias.shape == (6,) and size_of_layer(model) == (6, 1000),
        ("as in train_it.py", "small values by name: n_words=1000"),
        {
            "helps.py": "def table(n):\n    return torch.zeros(n, 4)\ndef read():\n    return open('x')\n",
            "train_it.py": "from model import GPT\nfrom helps import table, read\nsize = 6\nbias = table(size)\n"
            "model = GPT(len(read().words), zork=bias, width=size)\n",
        },
    ),
    "not what another class of that name is built with": Case(
        net("width, n_layers", LAYER),
        width(256),
        ("small values by name: width=256, n_layers=2",),
        {"other.py": net("width, n_layers", "pass") + "def make():\n    return GPT(7, 1)\n"},
    ),
}


@pytest.mark.parametrize("case", parameters({**FROM_FILES, **SPELLED}))
def test_built(write: Write, case: Case) -> None:
    check(write, case)
