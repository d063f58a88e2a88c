"""What names say: the table names.toml row by row, and values that fit one another."""

from __future__ import annotations

import enum
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from torch import nn

from attn_fuse.explain import names
from attn_fuse.explain.names import kinds_of, says, value_for

TABLE = tomllib.loads((Path(names.__file__).parent / "names.toml").read_text(encoding="utf-8"))
ROWS = [(part, number) for part, rows in TABLE.items() for number in range(len(rows))]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"


def row_of(part: str, name: str) -> int | None:
    """The first row whose pattern stands in a name."""
    cut = name.lower().strip("_")
    return next((n for n, (pattern, _) in enumerate(TABLE[part]) if cut and re.search(pattern, cut)), None)


def test_the_table_has_the_parts_that_are_read() -> None:
    assert TABLE.keys() == {"constructor", "forward"} and all(len(row) == 2 for rows in TABLE.values() for row in rows)


@pytest.mark.parametrize(("part", "number"), ROWS)
def test_each_row_decides_for_a_name_and_says_something(part: str, number: int) -> None:
    pattern, value = TABLE[part][number]
    quiet = settings(max_examples=5000, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    # Raises NoSuchExample where earlier rows take every name.
    drawn = st.from_regex(re.compile(pattern, re.ASCII), alphabet=LETTERS)
    name = find(drawn, lambda text: row_of(part, text.strip()) == number, settings=quiet).strip()
    if part == "forward":
        assert kinds_of(name) == value and all(isinstance(kind, str) for kind in value) and value
    else:
        assert says(name, value) and value_for(name) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "vocab_size": 1000,
        "n_tokens": 1000,
        "d_model": 256,
        "n_heads": 4,
        "dim_head": 64,
        "d_ff": 1024,
        "mlp_ratio": 4,
        "depth": 2,
        "img_size": 64,
        "patch_size": 16,
        "in_chans": 3,
        "num_classes": 10,
        "block_size": 128,
        "dropout": 0.0,
        "src_pad_idx": 0,
        "device": "cpu",
        "use_bias": False,
        "act_fn": "relu",
        "mask_ratio": 0.5,
        "output_attentions": False,
        "output_dim": 10,
        "n_mels": 80,
        "layer_norm_eps": 1e-5,
        "patch_num": 16,
        "window_size": 8,
        "flavour": None,
        "tokenizer": None,
    }.items(),
)
def test_small_values(name: str, value: Any) -> None:
    found = value_for(name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "beside", "value"),
    [
        ("dim", {"dim_head": 64, "heads": 8}, 512),
        ("dim", {"num_heads": 12}, 768),
        ("num_heads", {"d_model": 96}, 4),
        ("n_head", {"n_embd": 128}, 2),
        ("head_dim", {"d_model": 96, "n_heads": 3}, 32),
        ("d_ff", {"d_model": 48}, 192),
        ("image_size", {"patch_size": 14}, 112),
        ("patch_size", {"image_size": 28}, 14),
        ("num_patches", {"image_size": 32, "patch_size": 4}, 64),
    ],
)
def test_values_that_fit_those_beside_them(name: str, beside: dict[str, int], value: int) -> None:
    assert value_for(name, None, beside) == value


@pytest.mark.parametrize("width", range(1, 130))
def test_heads_divide_every_width(width: int) -> None:
    beside = {"d_model": width}
    heads = value_for("n_heads", None, beside)
    assert heads > 0 and width % heads == 0
    assert value_for("head_dim", None, {**beside, "n_heads": heads}) * heads == width


@pytest.mark.parametrize("picture", [7, 14, 28, 32, 60, 224, 256])
def test_patches_fill_every_picture(picture: int) -> None:
    assert picture % value_for("patch_size", None, {"img_size": picture}) == 0


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


@pytest.mark.parametrize(
    ("name", "hint", "value"),
    [
        ("embed", str, None),
        ("kind", str, None),
        ("activation", str, "relu"),
        ("anything", bool, False),
        ("mlp_ratio", float, 4.0),
        ("kind", Kind, Kind.FIRST),
        ("norm", Literal["rms", "layer"], "rms"),
        ("embed", nn.Module, None),
        ("depths", tuple[int, int, int], (2, 2, 2)),
        ("depths", tuple[int, ...], (2, 2)),
        ("depths", list[int], [2, 2]),
        ("depths", int, 2),
    ],
)
def test_annotations_say_more_than_names(name: str, hint: Any, value: Any) -> None:
    found = value_for(name, hint)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "input_ids": "tokens",
        "idx": "tokens",
        "src": "tokens",
        "images": "picture",
        "pixel_values": "picture",
        "mel": "sound",
        "timesteps": "time",
        "src_lengths": "lengths",
        "position_ids": "positions",
        "attention_mask": "none",
        "memory": "like",
        "labels": "label",
        "start_pos": "zero",
        "return_dict": "false",
        "token_type_ids": "zeros",
    }.items(),
)
def test_kinds_of_inputs(name: str, kind: str) -> None:
    assert kinds_of(name)[0] == kind


def test_a_name_that_says_no_kind() -> None:
    assert kinds_of("x") == kinds_of("zork") == []
