"""Configs for a constructor, from what a repository spells out: command lines, Python settings, YAML, JSON, TOML."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.configs import SmallConfig
from attn_fuse.explain.reading.config_files import plain_yaml
from tests.model_files import Write, model_of, net


class TestConfigsWithoutAClass:
    BODY = "self.layer = nn.Linear(configs.seq_len, configs.d_model)"

    def test_small_numbers_as_attributes_and_keys(self, write: Write) -> None:
        notes: list[str] = []
        model, _ = model_of(write(net("configs", "self.layer = nn.Linear(configs.seq_len, configs['d_model'])")), notes)
        assert (model.layer.in_features, model.layer.out_features) == (128, 256)
        assert notes == ["configs: small numbers by name"]

    def test_the_command_line_of_a_script_beside_it(self, write: Write) -> None:
        write(
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--seq_len', type=int, default=24)\n"
            "p.add_argument('--d-model', default=6)\np.add_argument('--causal', action='store_true')\np.parse_args()\n",
            "run.py",
        )
        notes: list[str] = []
        model, _ = model_of(write(net("configs", f"assert configs.causal is False; {self.BODY}")), notes)
        assert (model.layer.in_features, model.layer.out_features) == (24, 6)
        assert notes == ["configs: the defaults of run.py, and small numbers by name for the rest"]

    def test_a_command_line_whose_arguments_share_an_option(self, write: Write) -> None:
        write(
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--fast', action='store_true')\n"
            "p.add_argument('--no-fast', dest='fast', action='store_false')\np.add_argument('--seq_len', default=24)\n"
            "p.add_argument('--d_model', type=int)\np.set_defaults(d_model=6)\n",
            "run.py",
        )
        model, _ = model_of(write(net("configs", f"assert configs.fast is False; {self.BODY}")))
        assert (model.layer.in_features, model.layer.out_features) == (24, 6)

    def test_a_dict_of_the_file(self, write: Write) -> None:
        notes: list[str] = []
        body = "self.layer = nn.Linear(cfg['emb_dim'], 1)"
        model, _ = model_of(write("GPT_CONFIG = {'emb_dim': 12}\n" + net("cfg", body)), notes)
        assert model.layer.in_features == 12 and notes == ["cfg: GPT_CONFIG, as the file has it"]

    @pytest.mark.parametrize("annotation", ["", ": argparse.Namespace"])
    def test_what_a_function_beside_it_gives(self, write: Write, annotation: str) -> None:
        write(
            "import argparse\ndef parsed(): raise SystemExit(2)\ndef make_config(size):\n    return {'emb_dim': 3}\n"
            "def small_config(index=1):\n    return argparse.Namespace(emb_dim=12, flavour=index)\n",
            "configs_of_it.py",
        )
        notes: list[str] = []
        body = "self.layer = nn.Linear(cfg.emb_dim, cfg.flavour)"
        model, _ = model_of(write("import argparse\n" + net(f"cfg{annotation}", body)), notes)
        assert (model.layer.in_features, model.layer.out_features) == (12, 1)
        assert notes == ["cfg: small_config(), as the file has it"]

    def test_configs_that_a_config_makes_of_mappings(self, write: Write) -> None:
        source = """
class PartConfig:
    def __init__(self, hidden_size, num_heads=2, **kwargs):
        self.hidden_size = hidden_size
class WholeConfig:
    def __init__(self, part_config=None, width=5):
        self.part = PartConfig(**part_config)
        self.width = width
"""
        body = "self.layer = nn.Linear(config.width, config.part.hidden_size)"
        model, _ = model_of(write(source + net("config: WholeConfig", body)))
        assert (model.layer.in_features, model.layer.out_features) == (5, 256)

    def test_an_entry_that_is_none_and_must_not_be(self, write: Write) -> None:
        source = "CONFIG = dict(width=4, actions=None)\n"
        body = "self.layer = nn.Embedding(config['actions'], config['width'])"
        assert model_of(write(source + net("config", body)))[0].layer.num_embeddings == 8

    def test_another_dict_of_the_file_where_the_first_does_not_do(self, write: Write) -> None:
        tables = "CONFIGS = {'large': dict(dim=64, grid=0), 'small': dict(dim=8, grid=2), 'plain': dict(dim=4)}\n"
        body = 'self.layer = nn.Linear(config["dim"], 8 // config["grid"])'
        notes: list[str] = []
        model, _ = model_of(write(tables + net("config", body)), notes)
        assert model.layer.in_features == 8 and "config: CONFIGS['small'], as the file has it" in notes

    def test_an_entry_that_a_script_sets(self, write: Write) -> None:
        write(
            "import argparse\nparser = argparse.ArgumentParser()\n"
            "parser.add_argument('--n_skip', type=int, default=3)\nparser.add_argument('--lr', default=1.0)\n",
            "train.py",
        )
        tables = "import types\nCONFIGS = {'small': types.SimpleNamespace(dim=8)}\n"
        body = "self.layer = nn.Linear(config.dim, config.n_skip)"
        notes: list[str] = []
        model, _ = model_of(write(tables + net("config", body)), notes)
        assert model.layer.out_features == 3 and "entries that the config lacks: n_skip=3" in notes

    def test_a_string_that_the_code_compares_it_with(self, write: Write) -> None:
        body = f"assert configs.task in ('forecast', 'classify'); {self.BODY}"
        source = net("configs", body).replace("super()", "if configs.task == 'forecast': pass\n        super()")
        assert model_of(write(source))[0].layer.in_features == 128

    @pytest.mark.parametrize(
        "condition",
        [
            "if configs.flavour: raise RuntimeError",
            "if not (configs.flavour or False) and configs['flavour']: raise RuntimeError",
            "self.kept = configs.flavour\n        if self.kept: raise RuntimeError",
        ],
    )
    def test_an_entry_that_the_code_only_tests_is_off(self, write: Write, condition: str) -> None:
        model, _ = model_of(write(net("configs", f"{condition}\n        {self.BODY}")))
        assert model.layer.in_features == 128

    @pytest.mark.parametrize(
        "use", ["len(configs.flavour)", "self.kept = configs.flavour", "self.kept(configs.flavour)"]
    )
    def test_one_that_it_uses_otherwise_too_is_not_known(self, write: Write, use: str) -> None:
        body = (
            f"if configs.flavour: raise RuntimeError\n        {use}\n        self.layer = nn.Linear(len(self.kept), 1)"
        )
        with pytest.raises(ExplainError, match=r"none is known for configs\.flavour"):
            model_of(write(net("configs", body)))

    def test_a_string_that_an_attribute_with_the_entry_is_compared_with(self, write: Write) -> None:
        body = (
            "self.task = configs['task']\n        if self.task != 'forecast': assert self.task == 'b' or self.task[0]"
        )
        source = net("configs", f"{body}\n        {self.BODY}")
        assert model_of(write(source))[0].task == "b"

    def test_what_the_constructor_of_a_settings_class_sets(self, write: Write) -> None:
        write(
            "class Small:\n    def __init__(self, width=6, *, flavour=4, **kwargs):\n"
            "        self.seq_len = kwargs.pop('seq_len', 12)\n        self.d_model = width\n"
            "        self.flavour: int = flavour\n        self.path = find()\n",
            "my_config.py",
        )
        body = f"{self.BODY}\n        assert configs.flavour == 4"
        model, _ = model_of(write(net("configs", body)))
        assert (model.layer.in_features, model.layer.out_features) == (12, 6)

    def test_an_entry_that_nothing_tells(self, write: Write) -> None:
        with pytest.raises(
            ExplainError, match=r"config is made up of small numbers, and none is known for config\.flavour"
        ):
            model_of(write(net("config", "config.flavour + []")))

    def test_the_command_lines_of_other_scripts_fill_in(self, write: Write) -> None:
        script = "import argparse\np = argparse.ArgumentParser()\n"
        write(script + "p.add_argument('--seq_len', default=24)\np.add_argument('--d_model', default=6)\n", "run.py")
        write(script + "p.add_argument('--flavour', default=3)\n", "other.py")
        body = f"assert configs.flavour == 3; {self.BODY}"
        assert model_of(write(net("configs", body)))[0].layer.in_features == 24

    def test_a_settings_module_and_a_class_of_one(self, write: Write) -> None:
        write("seq_len = 24\nclass Small:\n    seq_len = 12\n    d_model: int = 6\n", "my_config.py")
        notes: list[str] = []
        assert model_of(write(net("configs", self.BODY)), notes)[0].layer.in_features == 12
        assert notes == ["configs: the defaults of Small in my_config.py, and small numbers by name for the rest"]

    def test_an_object_with_keys_in_a_table_of_the_file(self, write: Write) -> None:
        source = "class Held(dict):\n    __getattr__ = dict.__getitem__\n"
        source += "CONFIGS = {'none': 3, 'b16': Held(seq_len=7, d_model=5)}\n"
        notes: list[str] = []
        assert model_of(write(source + net("configs", self.BODY)), notes)[0].layer.in_features == 7
        assert notes == ["configs: CONFIGS['b16'], as the file has it"]

    def test_what_code_asks_for_with_a_default_need_not_be_known(self) -> None:
        config = SmallConfig("config", {}, {"inner": {"width": 3}})
        assert getattr(config, "flavour", 5) == 5 and not hasattr(config, "flavour")
        assert config.inner.width == config["inner"]["width"] == 3 and config.inner.n_layer == 2

    def test_no_gpu_is_asked_for(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        write("device = 'cuda:0'\nuse_cuda = True\n", "config.py")
        body = "self.seen = (args.device, args.use_cuda)"
        assert model_of(write(net("args", body)))[0].seen == ("cpu", False)


class TestConfigFiles:
    BODY = "self.layer = nn.Linear(config['width'], config['flavour_of_it'])"
    YAML = "data:\n  path: x  # where\nmodel:\n  width: 12\n  flavour_of_it: 3\n"
    TEXTS = (
        ("conf/small.yaml", YAML),
        ("conf.json", '{"data": {}, "model": {"width": 12, "flavour_of_it": 3}}'),
        ("conf.toml", "[data]\n[model]\nwidth = 12\nflavour_of_it = 3\n"),
        ("my_config.py", "other = run()\nmodel = {'width': 12, 'flavour_of_it': 3}\n"),
        ("conf/params.py", "model = dict(width=12, flavour_of_it=3)\n"),
        ("conf/defaults.py", "model = CfgNode()\nmodel.width = 12\nmodel.flavour_of_it = 3\nmodel.seen = run()\n"),
    )

    @pytest.mark.parametrize(("name", "text"), TEXTS, ids=[name for name, _ in TEXTS])
    def test_a_mapping_in_a_file_beside_it(self, write: Write, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / "conf").mkdir()
        (tmp_path / name).write_text(text)
        notes: list[str] = []
        model, _ = model_of(write(net("config", self.BODY)), notes)
        assert (model.layer.in_features, model.layer.out_features) == (12, 3)
        assert notes == [f"config: {name}: model"]

    GROUPS = "self.layer = nn.Linear(cfg.MODEL.WIDTH, cfg.MODEL.FLAVOUR_OF_IT * len(cfg.STEPS))"
    DEFAULTS = "_C = CN()\n_C.MODEL = CN()\n_C.MODEL.WIDTH = None\n_C.MODEL.FLAVOUR_OF_IT = 3\n_C.STEPS = [1, 2]\n"

    def test_groups_that_a_python_file_sets_and_a_file_over_it(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "my_config.py").write_text(self.DEFAULTS)
        (tmp_path / "of_nothing.yaml").write_text("MODEL:\n  WIDTH: 7\nOTHER: 3\n")
        (tmp_path / "tiny.yaml").write_text("MODEL:\n  WIDTH: 5\n")
        notes: list[str] = []
        model, _ = model_of(write(net("cfg", self.GROUPS)), notes)
        assert (model.layer.in_features, model.layer.out_features) == (5, 6)
        assert notes == ["cfg: my_config.py: _C, and tiny.yaml over it"]

    def test_groups_that_a_function_of_a_python_file_sets(self, write: Write, tmp_path: Path) -> None:
        body = self.DEFAULTS.replace("None", "9").replace("\n", "\n    ").replace("_C", "c")
        (tmp_path / "my_config.py").write_text(f"import torch\ntorch.seen = 3\ndef tiny():\n    {body}return c\n")
        notes: list[str] = []
        model, _ = model_of(write(net("cfg", self.GROUPS)), notes)
        assert model.layer.in_features == 9 and notes == ["cfg: my_config.py: tiny"]

    def test_the_class_of_the_config_is_an_attribute(self, write: Write) -> None:
        config = "class Other:\n    pass\nclass Sizes:\n    def __init__(self, width=4): self.width = width\n"
        source = net("config", "self.layer = nn.Linear(config.width, 2)").replace(
            ":\n", ":\n    config_class = Sizes\n", 1
        )
        assert model_of(write(config + source))[0].layer.in_features == 4

    def test_a_class_that_a_constructor_only_asks_about_is_not_demanded(self, write: Write) -> None:
        other = "class Mapped:\n    def __init__(self, content): pass\n"
        body = "self.layer = nn.Linear(config.d_model if not isinstance(config, Mapped) else 1, 2)"
        asks = "if not isinstance(config, Mapped):\n            config = config\n        "
        source = other + net("config", asks + body)
        assert model_of(write(source))[0].layer.in_features == 256

    @pytest.mark.parametrize(
        "demand",
        ["assert isinstance(config, Sizes)", "if not isinstance(config, Sizes):\n            raise ValueError"],
        ids=["assert", "raise"],
    )
    def test_the_class_of_the_config_is_checked_in_a_base(self, write: Write, demand: str) -> None:
        config = "class OtherConfig:\n    pass\nclass Sizes:\n    def __init__(self, width=4): self.width = width\n"
        base = (
            f"class Base(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n        {demand}\n"
        )
        net = (
            "class Net(Base):\n    def __init__(self, config):\n        super().__init__(config)\n"
            "        self.layer = nn.Linear(config.width, 2)\n    def forward(self, x): return self.layer(x)\n"
        )
        assert model_of(write(config + base + net))[0].layer.in_features == 4

    def test_of_equal_ones_that_which_is_named_as_the_argument(self, write: Write, tmp_path: Path) -> None:
        for name, width in (("a", 5), ("of_text", 6)):
            (tmp_path / f"{name}.json").write_text(f'{{"width": {width}}}')
        model, _ = model_of(write(net("text_config", "self.layer = nn.Linear(text_config['width'], 1)")))
        assert model.layer.in_features == 6

    def test_the_fields_of_a_config_class(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("_target_: models.Config\nwidth: 9\nflavour: sweet\nother: 1\n")
        config = "@dataclass\nclass Config:\n    width: int\n    flavour: str\n"
        body = "self.layer = nn.Linear(config.width, len(config.flavour))"
        model, _ = model_of(write(config + net("config: Config", body)))
        assert (model.layer.in_features, model.layer.out_features) == (9, 5)

    def test_the_arguments_of_the_constructor(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("net:\n  target: models.GPT\n  params:\n    flavour: 4\n    width: 3\n")
        notes: list[str] = []
        model, _ = model_of(write(net("flavour, width=1", "self.layer = nn.Linear(flavour, width)")), notes)
        assert (model.layer.in_features, model.layer.out_features) == (4, 3)
        assert notes == ["as in a.yaml: net"]

    def test_a_file_that_is_no_config_is_passed_over(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text("{ nothing")
        (tmp_path / "b.yaml").write_text("a: [1\n- b: {{ x }}")
        (tmp_path / "c.toml").write_text("= 3")
        with pytest.raises(ExplainError, match=re.escape("none is known for config.flavour_of_it")):
            model_of(write(net("config", "config['flavour_of_it'].sweeten()")))


class TestSequences:
    @pytest.mark.parametrize(
        ("hint", "given"),
        [("tuple[int, int, int]", "(2, 2, 2)"), ("tuple[int, ...]", "(2, 2)"), ("list[int]", "[2, 2]"), ("int", "2")],
    )
    def test_an_annotation_says_how_many(self, write: Write, hint: str, given: str) -> None:
        body = "self.depths = depths\n        self.layer = nn.Linear(1, 1)"
        assert repr(model_of(write(net(f"depths: {hint}", body)))[0].depths) == given

    def test_a_constructor_that_reads_more(self, write: Write) -> None:
        body = "self.layer = nn.Linear(depths[2], 1)"
        assert model_of(write(net("depths: tuple[int, ...]", body)))[0].layer.in_features == 2


class TestPlainYaml:
    def test_what_configs_use(self) -> None:
        text = """
# a comment
name: net   # another
lr: 1e-4
on: true
none:
sizes: [1, 2, 3]
words: [a, b]
inner:
    deep:
        x: -1.5
items:
- a: 1
  b: 2
- 3
quoted: "a: b"
"""
        assert plain_yaml(text) == {
            "name": "net",
            "lr": 1e-4,
            "on": True,
            "none": None,
            "sizes": [1, 2, 3],
            "words": ["a", "b"],
            "inner": {"deep": {"x": -1.5}},
            "items": [{"a": 1, "b": 2}, 3],
            "quoted": "a: b",
        }

    def test_more_than_that_is_left_alone(self) -> None:
        assert plain_yaml("a: 1\n  b: 2\nc") is None

    def test_stands_in_where_pyyaml_is_missing(
        self, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # An entry of None there is how Python marks a module that cannot be imported.
        monkeypatch.setitem(sys.modules, "yaml", None)
        (tmp_path / "a.yaml").write_text(TestConfigFiles.YAML)
        assert model_of(write(net("config", TestConfigFiles.BODY)))[0].layer.in_features == 12


class TestWhatTheCodeSays:
    def test_the_default_of_getattr(self, write: Write) -> None:
        body = """self.layer = nn.Linear(getattr(opts, "width", 12), getattr(opts, "wide.flavour", 5))
        self.loss = None if opts.weights is None else nn.Linear(opts.weights.size(0), 1)
        if opts.d_model is None: raise ValueError(opts)"""
        model, _ = model_of(write(net("opts", body)))
        assert (model.layer.in_features, model.layer.out_features) in ((12, 5), (256, 5)) and model.loss is None

    PATHS = """
class Config:
    def __init__(self, dataset):
        self.names = open(dataset + "/names.txt").readlines()
        self.num_classes = len(self.names)
        self.n_vocab = 0
        self.hidden, self.dim_model = 1024, 300
        self.dim_model = 30
        self.device = torch.device("cpu")
        self.half = self.dim_model // 2
"""

    def test_what_a_config_of_files_assigns(self, write: Write) -> None:
        body = """self.embed = nn.Embedding(config.n_vocab, config.dim_model)
        self.out = nn.Linear(config.half, config.num_classes)"""
        notes: list[str] = []
        model, _ = model_of(write(self.PATHS + net("config", body)), notes)
        assert (model.embed.num_embeddings, model.embed.embedding_dim) == (1000, 30)
        assert (model.out.in_features, model.out.out_features) == (15, 10)
        assert notes == ["config: what Config assigns, and small numbers by name for the rest"]

    def test_a_config_within_a_config(self, write: Write) -> None:
        configs = """
@dataclass
class PartConfig:
    d_model: int
    n_heads: int = 2
@dataclass
class Config:
    encoder_config: PartConfig
    decoder_config: PartConfig
"""
        model, _ = model_of(
            write(configs + net("config: Config", "self.layer = nn.Linear(config.encoder_config.d_model, 1)"))
        )
        assert model.layer.in_features == 128

    def test_the_results_of_a_model_are_no_config(self, write: Write) -> None:
        results = "@dataclass\nclass Output:\n    loss: int\n@dataclass\nclass OtherOutput:\n    loss: int\n"
        config = "class GPTConfig:\n    def __init__(self, width=12):\n        self.width = width\n"
        model, _ = model_of(write(results + config + net("config", "self.layer = nn.Linear(config.width, 1)")))
        assert model.layer.in_features == 12

    def test_a_bag_of_entries_is_no_class_of_configs(self, write: Write) -> None:
        bag = "class DictConfig(dict):\n    def __init__(self, content):\n        super().__init__(content)\n"
        model, _ = model_of(write(bag + net("cfg: DictConfig", "self.layer = nn.Linear(cfg.d_model, 1)")))
        assert model.layer.in_features == 256

    def test_fewer_layers_of_several_stages(self, write: Write) -> None:
        body = """self.layers = nn.ModuleList(nn.Linear(64, 64) for stage in blocks for n in stage for _ in range(n))"""
        notes: list[str] = []
        model, _ = model_of(write(net("blocks=[[8, 24], [24, 8]], depths=(1, 2)", body)), notes, most=40_000)
        assert len(model.layers) == 8
        assert notes == ["fewer layers, since its defaults are too large: blocks=[[2, 2], [2, 2]]"]

    @pytest.mark.parametrize("default", ["", " = Config()"])
    def test_fewer_layers_of_a_config_within_a_config(self, default: str, write: Write) -> None:
        configs = """
@dataclass(frozen=True)
class PartConfig:
    num_layers: int = 40
@dataclass(frozen=True)
class Config:
    part: PartConfig = PartConfig()
"""
        body = "self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(config.part.num_layers))"
        notes: list[str] = []
        model, _ = model_of(write(configs + net(f"config: Config{default}", body)), notes, most=20_000)
        assert len(model.layers) == 2
        assert notes == ["fewer layers, since its defaults are too large: num_layers=2"]


class TestTokenizers:
    """An argument of which the code reads a few entries and the length, which is that of a vocabulary."""

    def test_its_length(self, write: Write) -> None:
        body = "self.table = nn.Embedding(len(tokenizer), 8, tokenizer.pad_token_id)"
        model, _ = model_of(write(net("tokenizer", body)))
        assert (model.table.num_embeddings, model.table.padding_idx) == (1000, 0)

    def test_a_config_has_the_length_of_its_entries(self, write: Write) -> None:
        write("", "config.yaml").write_text("d_model: 6\nn_layers: 3\n")
        body = "self.layer = nn.Linear(config.d_model, config.n_layers); assert len(dict(config)) == 2"
        assert model_of(write(net("config", body)))[0].layer.in_features == 6


class TestEmptyDefaults:
    """A config whose default is an empty mapping, with which nothing can be built."""

    BODY = "self.layer = nn.Linear(config['d_model'], config['n_layers'])"

    def test_a_file_beside_it(self, write: Write) -> None:
        write("", "config.yaml").write_text("d_model: 6\nn_layers: 3\n")
        model, _ = model_of(write(net("model=None, config={}", self.BODY)))
        assert (model.layer.in_features, model.layer.out_features) == (6, 3)

    def test_small_numbers(self, write: Write) -> None:
        model, _ = model_of(write(net("config={}", self.BODY)))
        assert model.layer.in_features == 256

    def test_one_that_serves_stays(self, write: Write) -> None:
        model, _ = model_of(write(net("config={}", "self.layer = nn.Linear(config.get('d_model', 5), 1)")))
        assert model.layer.in_features == 5


def test_entries_that_other_files_read_do_not_hide_the_own(write: Write) -> None:
    write("", "config.yaml").write_text("model: {d_model: 6}\nproject: here\n")
    others = "; ".join(f"config.entry_{n}" for n in range(9))
    write(f"def other(config):\n    {others}\n", "other.py")
    source = "import other\n" + net("config", "self.layer = nn.Linear(config['model']['d_model'], 1)")
    model, _ = model_of(write(source))
    assert model.layer.in_features == 6
