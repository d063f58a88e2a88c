"""Constructors that load weights, configs that lack entries, and models of which only one way of building runs."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from attn_fuse.explain.building.choose_entry import candidates
from attn_fuse.explain.building.weights import random_weights
from attn_fuse.explain.command import main
from attn_fuse.explain.opening.open_file import imported
from tests.model_files import Write, model_of, net

LOADS = """self.layer = nn.Linear(3, 4)
        self.load_state_dict({name.removeprefix('module.'): value for name, value in STATE.items()})"""


class TestWeights:
    @pytest.mark.parametrize(
        "state",
        [
            "torch.load('/nowhere/gpt.pth')",
            "torch.load('/nowhere/gpt.pth', map_location='cpu')['model']['ema']",
            "torch.hub.load_state_dict_from_url('https://nowhere.invalid/gpt.pth')",
        ],
    )
    def test_that_are_not_there_stay_random(self, write: Write, state: str) -> None:
        notes: list[str] = []
        model, _ = model_of(write(net("", LOADS.replace("STATE", state))), notes)
        assert model.layer.in_features == 3 and notes == ["random weights in place of gpt.pth"]

    def test_whose_keys_the_constructor_asks_for(self, write: Write) -> None:
        body = """self.layer = nn.Linear(3, 4)
        missing, unexpected = self.load_state_dict(state_dict=torch.load("/nowhere/gpt.pth"), strict=True)
        assert not missing and not unexpected"""
        assert model_of(write(net("", body)))[0].layer.in_features == 3

    def test_that_the_constructor_takes_apart_by_name(self, write: Write) -> None:
        body = """self.layer = nn.Linear(3, 4)
        weights = {name: value for name, value in torch.load("/nowhere/gpt.pth")["state"].items()}
        del weights["layer.bias"]
        assert weights["layer.weight"].shape == (4, 3)
        self.load_state_dict(weights)"""
        notes: list[str] = []
        assert model_of(write(net("", body)), notes)[0].layer.in_features == 3
        assert notes == ["random weights in place of gpt.pth"]

    def test_that_are_there_are_loaded(self, tmp_path: Path) -> None:
        given, other = nn.Linear(3, 4), nn.Linear(3, 4)
        torch.save(given.state_dict(), tmp_path / "gpt.pth")
        with random_weights(lambda note: None):
            other.load_state_dict(torch.load(tmp_path / "gpt.pth"))
            with pytest.raises(RuntimeError, match="Missing key"):
                other.load_state_dict({})
        torch.testing.assert_close(given.weight, other.weight)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A library as transformers is, whose weights cannot be fetched."""

    class Config:
        width = 5

    class Model(nn.Module):
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__()
            self.layer = nn.Linear(config.width, 1)

        @classmethod
        def from_pretrained(cls, name: str) -> Model:
            raise OSError(f"cannot connect for {name}")

    made = types.ModuleType("transformers.modeling_utils")
    made.PreTrainedModel = Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_model_of_a_library_that_cannot_be_fetched(library: types.ModuleType) -> None:
    notes: list[str] = []
    with random_weights(notes.append):
        assert library.PreTrainedModel.from_pretrained("gpt2").layer.in_features == 5
    assert notes == ["random weights in place of gpt2, the defaults of Model"]
    with pytest.raises(OSError, match="cannot connect"):
        library.PreTrainedModel.from_pretrained("gpt2")


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A library as transformers is, that chooses a config by the checkpoint, which cannot be fetched."""

    class BertConfig:
        width = 5

    class AutoConfig:
        @classmethod
        def from_pretrained(cls, name: str) -> BertConfig:
            raise OSError(f"cannot connect for {name}")

    made = types.ModuleType("transformers.models.auto.configuration_auto")
    made.AutoConfig = AutoConfig  # type: ignore[attr-defined]
    made.CONFIG_MAPPING_NAMES = {"bert": "BertConfig", "be": "Gone"}  # type: ignore[attr-defined]
    whole = types.ModuleType("transformers")
    whole.BertConfig = BertConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", whole)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_config_that_is_chosen_by_the_checkpoint(auto: types.ModuleType) -> None:
    notes: list[str] = []
    with random_weights(notes.append):
        assert auto.AutoConfig.from_pretrained("google/bert-base-uncased").width == 5
        with pytest.raises(OSError, match="cannot connect for facebook/opt"):
            auto.AutoConfig.from_pretrained("facebook/opt-125m")
    assert notes == ["random weights in place of bert-base-uncased, the defaults of BertConfig"]


def test_weights_of_timm_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_pretrained(model: nn.Module) -> None:
        raise OSError("cannot connect")

    made = types.ModuleType("timm.models._builder")
    made.load_pretrained = load_pretrained  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    notes: list[str] = []
    with random_weights(notes.append):
        made.load_pretrained(nn.Linear(2, 2))
    assert notes == ["random weights in place of timm's of Linear"] and made.load_pretrained is load_pretrained


def test_an_entry_that_a_config_lacks(write: Write) -> None:
    config = "class Config:\n    width = 3\n"
    body = "assert config.flavour == 'sweet' or config.flavour == 'sour'\n"
    body += "        self.layer = nn.Linear(config.width, config.n_embd)"
    notes: list[str] = []
    model, _ = model_of(write(config + net("config: Config", body)), notes)
    assert model.layer.out_features == 256
    assert notes == ["entries that the config lacks: flavour='sweet', n_embd=256"]


def test_a_part_does_not_stand_in_for_a_model(write: Write) -> None:
    source = net("", "self.attention = softmax", "GPT") + "    def forward(self, x): pass\n"
    for name in ("PatchEmbeddings", "Other"):
        source += net("", "self.layer = nn.Linear(3, 3)", name) + "    def forward(self, x): return self.layer(x)\n"
    with imported(write(source)) as module:
        assert [cls.__name__ for cls in candidates(module)] == ["GPT"]


def test_another_way_of_building_where_the_first_does_not_run(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    forward = "    def forward(self, x):\n        return self.layer(self.act(x))\n"
    body = "self.act, self.layer = act, nn.Linear(3, 3)"
    source = net("act=None", body) + forward + "def gpt_small():\n    return GPT(nn.ReLU())\n"
    assert main([str(write(source))]) == 0
    assert "built by gpt_small()" in capsys.readouterr().out
