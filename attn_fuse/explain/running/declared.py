"""Sizes that a model, its config or its constructor's arguments declare: lengths, sides of pictures, widths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from attn_fuse.explain.building.configs import CONFIG_NAMES
from attn_fuse.explain.building.sizes import LENGTH_NAME

LENGTH_NAMES = (
    "block_size",
    "n_positions",
    "max_position_embeddings",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "seq_len",
    "seq_length",
    "sequence_length",
    "context_length",
    "context_size",
    "context_len",
    "n_ctx",
    "n_text_ctx",
    "n_tokens",
    "max_len",
    "max_length",
)
AUDIO_LENGTH_NAMES = ("n_audio_ctx", "audio_ctx")
PICTURE_NAMES = ("image_size", "img_size", "input_size", "resolution", "input_resolution", "image_resolution")
VOLUME_NAMES = (*PICTURE_NAMES, "img_shape", "image_shape", "input_shape", "vol_size", "volume_size", "spatial_size")
INPUT_WIDTH_NAME = (
    r"enc_in|data_dim|^c_in$|in(put)?_(dim|feat|channels)|dim_in|n_?feats?$|feature_dim|n(um)?_(vars|features)"
    r"|^z_?dim$|latent_dim|noise_dim|^nz$"
)
# Sequence lengths: of a first cheap run, and for a model that declares none.
SHORT, USUAL = 8, 64
# The max length that is tried unasked, and how many further sizes are.
LONGEST, MOST_NUMBERS = 1024, 4


@dataclass(frozen=True)
class Sizes:
    """What is declared, and what the user asked for.

    length: of sequences; asked: that which the user gave. sound: length of sounds. picture: side of pictures.
    volume: the three sides of volumes, or the frames and the sides of videos.
    lengths, widths: further ones, tried where the others fail.
    """

    length: int | None
    asked: int | None
    sound: int | None
    picture: int | None
    batch: int
    volume: tuple[int, int, int] | None = None
    lengths: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, holders: Sequence[object], length: int | None, batch: int) -> Sizes:
        """The sizes for `model`, from it and the configs and arguments that it was built from."""
        own = [getattr(model, name) for name in CONFIG_NAMES if hasattr(model, name)]
        known = [model, *holders, *own]
        return cls(
            length or _declared(known, LENGTH_NAMES),
            length,
            _declared(known, AUDIO_LENGTH_NAMES),
            _declared(known, PICTURE_NAMES) or _declared(list(model.modules()), PICTURE_NAMES),
            batch,
            _volume(known),
            _numbers(known, rf"{LENGTH_NAME}|^input_size$") if length is None else (),
            _numbers(known, INPUT_WIDTH_NAME),
        )


def _declared(holders: Sequence[object], names: Sequence[str]) -> int | None:
    # The first positive whole number that one of the holders has under one of the names.
    for name in names:
        for holder in holders:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if isinstance(value, (tuple, list)) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _volume(holders: Sequence[object]) -> tuple[int, int, int] | None:
    # The first three sides that one of the holders has.
    for name in VOLUME_NAMES:
        for holder in holders:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            match value:
                case (int(depth), int(height), int(width)) if min(depth, height, width) > 3:
                    return depth, height, width
    return None


def _numbers(holders: Sequence[object], pattern: str) -> tuple[int, ...]:
    # The different whole numbers, from two to LONGEST, that the holders have under names like `pattern`.
    found: dict[int, None] = {}
    for holder in holders:
        values = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
        for name, value in values.items():
            is_count = isinstance(value, int) and not isinstance(value, bool) and 1 < value <= LONGEST
            if isinstance(name, str) and is_count and re.search(pattern, name.lower()):
                found[value] = None
    return tuple(found)[:MOST_NUMBERS]
