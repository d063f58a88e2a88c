"""Arguments of models changed as errors ask: while the model is built, and when it runs."""

from __future__ import annotations

import types
import weakref
from pathlib import Path

import pytest
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain import subject
from attn_fuse.explain.building.build import built
from attn_fuse.explain.building.built_with import class_called
from attn_fuse.explain.building.choose_entry import outermost
from attn_fuse.explain.building.other_arguments import Arguments, other_arguments
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.problems import without_frames
from attn_fuse.explain.repairing.asked import Asked
from attn_fuse.explain.running import both
from tests.model_files import Write, model_of, net
from tests.subjects import found_in


class TestWhileBuilt:
    def test_two_sequences_of_different_lengths(self, write: Write) -> None:
        body = """assert depth == len(heads) == len(features) - 1, "lengths"
        self.layers = nn.ModuleList(nn.Linear(features[i], features[i + 1] * heads[i]) for i in range(depth))"""
        model, _ = model_of(write(net("depth, heads, features", body)))
        assert len(model.layers) == 2

    def test_a_number_for_each_of_the_layers(self, write: Write) -> None:
        body = """self.ratio = ratio; count = len(depths)
        self.layers = nn.ModuleList([nn.Linear(8, int(8 * self.ratio[i])) for i in range(count)])"""
        model, _ = model_of(write(net("ratio=2.0, depths=(2, 2, 6, 2)", body)))
        assert [layer.out_features for layer in model.layers][:2] == [16, 16]

    def test_lists_where_a_tuple_does_not_do(self, write: Write) -> None:
        body = "self.layers = nn.ModuleList([nn.Linear(n, 8) for n in [8] + width])"
        assert model_of(write(net("width", f"len(width); {body}")))[0].layers[1].in_features == 256

    def test_a_text_that_the_code_knows(self, write: Write) -> None:
        body = """self.kind = kind
        if self.kind == "scaled": self.layer = nn.Linear(8, 8)
        elif self.kind == "average": self.layer = nn.Identity()
        else: raise ValueError(kind)"""
        assert model_of(write(net("kind", body)))[0].kind == "scaled"

    def test_a_text_that_a_function_knows(self, write: Write) -> None:
        text = """
def layer(way):
    if way not in ("wide", "narrow"):
        raise NotImplementedError(way)
    return nn.Linear(8, 16)
"""
        assert model_of(write(text + net("kind", "self.layer = layer(kind)")))[0].layer.out_features == 16

    def test_a_flag_under_which_something_absent_is_reached(self, write: Write) -> None:
        header = "try:\n    from no_such_kernels import FastAttention\nexcept ImportError:\n    pass\n"
        body = """self.fast = FastAttention(width) if False else None
        if use_fast:
            self.fast = FastAttention(width)
        self.layer = nn.Linear(width, width)"""
        notes: list[str] = []
        model, _ = model_of(write(header + net("width=8, use_fast=True, causal=True", body)), notes)
        assert model.layer.in_features == 8 and "as its errors ask: use_fast=False" in notes

    def test_what_must_not_be_none(self, write: Write) -> None:
        body = "self.size = size; assert self.size is not None\n        self.layer = nn.Linear(8, self.size)"
        assert model_of(write(net("size=None, other=None", body)))[0].size is not None

    def test_a_guess_by_the_kind_of_number(self, write: Write) -> None:
        body = """assert num_wings % 4 == 0 and covering_size >= 100 and num_wings < 8
        self.layer = nn.Linear(covering_size, num_wings)"""
        assert model_of(write(net("num_wings, covering_size", body)))[0].layer.out_features == 4

    @pytest.mark.parametrize("hint", ["nn.Module", "nn.Linear | Callable[[torch.Tensor], torch.Tensor]"])
    def test_any_module_that_will_do(self, hint: str, write: Write) -> None:
        source = "from collections.abc import Callable\n"
        body = "self.end = end; self.layer = nn.Linear(8, 8)"
        assert isinstance(model_of(write(source + net(f"end: {hint}", body)))[0].end, nn.Identity)

    def test_a_key_of_a_table(self, write: Write) -> None:
        table = 'LAYERS = {"gelu": nn.GELU, "silu": nn.SiLU}\n'
        model, _ = model_of(write(table + net("config", 'self.act = LAYERS[config["act_fn"]]()')))
        assert type(model.act).__name__ in ("GELU", "SiLU")

    def test_an_entry_of_a_config(self, write: Write) -> None:
        config = "@dataclass\nclass Config:\n    width: int\n    n_heads: int = 48\n"
        body = """assert config.width % config.n_heads == 0
        self.layer = nn.Linear(config.width, config.n_heads)"""
        model, _ = model_of(write(config + net("config: Config", body)))
        assert model.layer.in_features % model.layer.out_features == 0

    def test_the_files_own_config_stays_as_it_is(self, write: Write) -> None:
        config = "SETTINGS = dict(width=48, n_heads=5, depth=2)\n"
        body = """assert config["width"] % config["n_heads"] == 0
        self.layer = nn.Linear(config["width"], config["depth"])"""
        with imported(write(config + net("config", body))) as module:
            made = built(outermost(module), vars(module))
            assert made.model.layer.out_features == 2 and made.arguments.changed
            assert module.SETTINGS == {"width": 48, "n_heads": 5, "depth": 2}

    def test_a_flag_that_is_asserted(self, write: Write) -> None:
        body = """assert qk_norm
        assert not bare
        self.n = 3"""
        assert model_of(write(net("qk_norm=False, bare=True", body)))[0].n == 3

    def test_a_key_of_the_keywords(self, write: Write) -> None:
        body = "self.layer = nn.Linear(params['embedding_dim'], params['tanh_clipping'])"
        model, _ = model_of(write(net("**params", body)))
        assert (model.layer.in_features, model.layer.out_features) == (256, 8)

    @pytest.mark.parametrize("default", ["", "=None"])
    def test_a_class_that_is_called(self, write: Write, default: str) -> None:
        source = (
            net("width", "self.layer = nn.Linear(width, width)", "Mlp")
            + net("dim, heads=4", "self.layer = nn.Linear(dim, heads)", "Attention")
            + net("dim, attn_target", "self.attn = attn_target(dim=dim)", "Block")
            + net(f"attn_target{default}, embed_dim=8", "self.block = Block(embed_dim, attn_target=attn_target)")
        )
        assert type(model_of(write(source))[0].block.attn).__name__ == "Attention"

    @pytest.mark.parametrize("use", ["attn_target(dim=dim)", "(attn_target, dim)"])
    def test_no_class_is_chosen_that_nothing_says(self, write: Write, use: str) -> None:
        several = net("dim", "pass", "Mlp") + net("dim", "pass", "Norm")
        one = net("dim", "pass", "Attention") if "=" not in use else ""
        path = write(several + one + net("attn_target, dim=8", f"self.kept = {use}"))
        with imported(path) as module:
            assert class_called(module.GPT, "attn_target") is None

    def test_fewer_layers_and_what_an_error_asks_for(self, write: Write) -> None:
        body = """assert qk_norm
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))"""
        notes: list[str] = []
        model, _ = model_of(write(net("qk_norm=False, depth=48", body)), notes, most=20_000)
        assert len(model.layers) == 2 and notes == ["as its errors ask: depth=2, qk_norm=True"]

    def test_one_of_two_configs(self, write: Write) -> None:
        body = """if args is None:
            if config is None: raise ValueError("either args or config is needed")
            args = argparse.Namespace(**config)
        elif config is not None: raise ValueError("args and config cannot both be given")
        self.layer = nn.Linear(args.d_model, 1)"""
        model, _ = model_of(write("import argparse\n" + net("args=None, config=None", body)))
        assert model.layer.in_features == 256

    def test_what_none_of_the_changes_mends(self, write: Write) -> None:
        with pytest.raises(ExplainError, match="cannot build GPT: ValueError: no kind"):
            model_of(write(net("width, depth", 'raise ValueError("no kind")')))


def test_an_entry_that_configs_within_a_config_have_taken_over() -> None:
    vision, text = types.SimpleNamespace(width=8, heads=2), types.SimpleNamespace(width=9)
    config = types.SimpleNamespace(width=8, vision=vision, text=text)
    Arguments(entries={"width": 4, "heads": 1}).with_entries((config,))
    assert (config.width, vision.width, text.width, vision.heads) == (4, 4, 9, 2)


def test_no_change_is_made_twice() -> None:
    asked = Asked(sizes=((4, 8), (4, 8)), near=frozenset({"heads"}))
    found = [*other_arguments(Arguments(), asked, ({"heads": 4, "width": 6},))]
    assert [one.given for one in found] == [{"heads": 8}, {"width": 12}]


ENCODER_AND_DECODER = """
class Encoder(nn.Module):
    def __init__(self, d_model, n_layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(n_layers))
    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers], 1)

class Net(nn.Module):
    def __init__(self, d_model, n_layers):
        super().__init__()
        self.encoder = Encoder(d_model, n_layers)
        self.out = nn.Linear(d_model, d_model)
    def forward(self, x):
        levels = self.encoder(x)
        return self.out(levels[:, 0] + levels[:, 1] + levels[:, 2]).softmax(-1)
"""


def test_arguments_that_only_a_run_shows_to_be_wrong(write: Write) -> None:
    found = found_in(write(ENCODER_AND_DECODER))
    assert len(found.model.encoder.layers) == 3
    assert any("as its errors ask: n_layers=3" in note for note in found.said)


ANNOTATED = """
from no_such_types import Float, Union
class Net(nn.Module):
    def __init__(self, dim: Union[int, tuple], heads: Float = 2):
        super().__init__()
        self.layer = nn.Linear(dim, dim)
    def forward(self, x: Float[torch.Tensor, "b n d"], scale: Union[float, None], shift: Float = None):
        return self.layer(x).softmax(-1)
"""


def test_annotations_of_a_package_that_is_not_installed(write: Write) -> None:
    found = found_in(write(ANNOTATED))
    assert found.inputs.args[0].shape[-1] == found.model.layer.in_features


PADDED = """
class Net(nn.Module):
    def __init__(self, vocab_size, src_pad_idx=None, use_cache=None):
        super().__init__()
        self.pad, self.cache = src_pad_idx, use_cache
        self.words, self.out = nn.Embedding(vocab_size, 8), nn.Linear(8, 8)
    def forward(self, ids):
        mask = (ids == self.pad).unsqueeze(-1)
        return self.out(self.words(ids)).masked_fill(mask, 0.0).softmax(-1)
"""


def test_inputs_that_the_user_gives_are_for_the_whole(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both, "LARGE", 100_000)
    monkeypatch.setattr(subject, "RUN_SECONDS", 3.0)
    found = found_in(write(f"PAUSE = 0.2\n{DEEP}"), "--inputs", "torch.randn(1, 4, 64)")
    assert len(found.model.layers) == 40 and not any("fewer layers" in note for note in found.said)


def test_an_index_that_is_none_by_default_is_0(write: Write) -> None:
    found = found_in(write(PADDED))
    assert found.model.pad == 0 and found.model.cache is None


OF_ONE_WIDTH = """
class Net(nn.Module):
    def __init__(self, d_model=512):
        super().__init__()
        self.front, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
    def forward(self, x):
        x = self.front(x)
        places = torch.ones(x.shape[1], 256)
        return (x + self.out(places)).softmax(-1)
"""


def test_a_width_that_the_code_takes_for_granted(write: Write) -> None:
    found = found_in(write(OF_ONE_WIDTH))
    assert found.model.front.in_features == 256 and found.inputs.args[0].shape[-1] == 256


DEEP = """
import time
class Net(nn.Module):
    def __init__(self, depth=40, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
    def forward(self, x):
        for layer in self.layers:
            time.sleep(PAUSE)
            x = layer(x).softmax(-1)
        return x
"""


@pytest.mark.parametrize("pause, layers", [(0.0, 40), (0.2, 2)])
def test_a_large_model_is_tried_with_fewer_layers(
    pause: float, layers: int, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(both, "LARGE", 100_000)
    monkeypatch.setattr(subject, "RUN_SECONDS", 3.0)
    found = found_in(write(f"PAUSE = {pause}\n{DEEP}"))
    assert len(found.model.layers) == layers
    notes = [note for note in found.said if "layers" in note]
    assert notes == (["fewer layers, since it runs for long: depth=2"] if layers == 2 else [])


def test_errors_hold_no_models() -> None:
    class Model:
        pass

    def raises() -> None:
        model = Model()
        gone.append(weakref.ref(model))
        try:
            raise ValueError("first")
        except ValueError as error:
            raise ExplainError("second") from error

    gone: list[weakref.ref[Model]] = []
    with pytest.raises(ExplainError) as raised:
        raises()
    kept = without_frames(raised.value)
    del raised
    assert str(kept) == "second" and gone[0]() is None


STAGES = """
import types
class Net(nn.Module):
    def __init__(self, opt):
        super().__init__()
        self.stages = {"Trans": opt.stage}
        if opt.stage == "Affine":
            self.affine = nn.Linear(6, 6)
        if opt.deep:
            self.more = nn.Linear(6, 6)
        self.out = nn.Linear(6, 6)
    def forward(self, x):
        if self.stages["Trans"]:
            x = self.affine(x)
        return self.more(self.out(x)).softmax(-1)

OPT = types.SimpleNamespace(stage="x", deep=False)
"""


def test_conditions_on_an_attribute_that_a_run_lacks(write: Write) -> None:
    found = found_in(write(STAGES))
    assert hasattr(found.model, "affine") and hasattr(found.model, "more")


def test_a_model_that_runs_in_training_alone(write: Write) -> None:
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
    def forward(self, x):
        assert self.training, "only for its loss"
        return self.layer(x).softmax(-1).sum()
"""
    found = found_in(write(source))
    assert found.train and found.model.training and "in training mode: it does not run otherwise" in found.said
    other = found_in(write(source.replace("self.training", "x.dim() == 3")))
    assert not other.train and not other.model.training


def test_a_number_that_is_rounded_down_to_nothing(write: Write) -> None:
    body = """patch = img_size // 16 // 16
        self.count = img_size // patch
        self.layer = nn.Linear(self.count, 3)"""
    model, _ = model_of(write(net("img_size=224", body)))
    assert model.count == 448


IDLE = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
    def forward(self, x):
        return self.layer(x)

class Net(nn.Module):
    def __init__(self, width=6, mode=""):
        super().__init__()
        self.layer, self.mode = nn.Linear(width, width), mode
    def forward(self, x):
        return self.layer(x).softmax(-1) @ x.mT if self.mode == "deep" else x
"""


def test_a_way_that_attends_comes_before_one_that_does_not(write: Write, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "options.json").write_text('{"network": {"type": "Net", "width": 8, "mode": "deep"}, "type": "Other"}')
    found = found_in(write(IDLE))
    assert found.model.mode == "deep" and found.model.layer.in_features == 8
    assert any("as in options.json: network" in note for note in found.said)


def test_what_attends_to_nothing_is_the_subject_where_nothing_else_runs(write: Write) -> None:
    assert type(found_in(write(IDLE.replace("class Head", "class First"), "other.py")).model).__name__ in (
        "First",
        "Net",
    )
