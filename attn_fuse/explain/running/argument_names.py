"""What the names of the arguments of a forward say of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_fuse.explain.reading.signatures import annotation_of
from attn_fuse.explain.running.declared import LONGEST, SHORT, USUAL, Sizes

TOKENS = re.compile(
    r"token|input_ids|^ids?$|idx|text|^src$|^tgt$|^trg$|src_seq|trg_seq|tgt_seq|source|target|caption|inputs?_ids|word|sent"
)
PICTURES = re.compile(r"image|img|pixel|picture|frame|photo|latent|sample")
SOUNDS = re.compile(r"mel|audio|wav|spec|speech|sound")
TIMES = re.compile(r"^t$|^ts$|^guidance$|time_?steps?$|^time$|^steps?$|noise_level|sigma|^times$|timestep")
LABELS = re.compile(r"^y$|label|class|^cond$")
LENGTHS = re.compile(r"len(gth)?s?$")
MARKS = re.compile(r"mark")
CONTEXTS = re.compile(r"context|cond|memory|encoder_(hidden|out)|enc_out|^enc|cross|prompt|query_embed|pos")
CACHES = re.compile(r"^(setup|init|reset|build|create|allocate|make|set)_?\w*cache", re.I)
# Arguments that change what is computed: left out where they may be.
LEFT_OUT = re.compile(r"target|label|loss|past|cache|return|output_|states?$|head_mask|grad")
POSITIONS = re.compile(r"start_pos|input_pos|^pos$|offset|past_len|^step$|cache_pos")


class Makes(Protocol):
    """What makes tensors that a model may take."""

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device

    @property
    def vocabulary(self) -> int:
        """The fewest rows that an embedding of the model has; 0 without one."""

    def tokens(self, length: int) -> Tensor:
        """Tokens of its vocabulary, [batch, length]."""

    def narrow(self, most: int) -> list[int]:
        """Up to `most` widths that its linear layers take."""

    def contexts(self, batch: int) -> Iterator[Tensor]:
        """Sequences of these widths, [batch, length, width]."""


def values_by_name(parameter: inspect.Parameter, first: Tensor, makes: Makes) -> Iterator[Any]:
    """What a parameter of a forward may be given beside `first` by its name and annotation, the likeliest first."""
    name, batch = parameter.name.lower(), first.shape[0] if first.dim() else 1
    hint = annotation_of(parameter)
    long = first.shape[1] if first.dim() > 1 else 1
    if hint in (bool, "bool"):
        yield False
    elif LENGTHS.search(name) and not POSITIONS.search(name) and (hint in (int, "int") or name.startswith("max")):
        yield from (long, 0)
    elif hint in (int, "int") or POSITIONS.search(name):
        if hint not in (int, "int") and first.dim() > 1:
            yield torch.arange(first.shape[1], device=makes.device)
        yield 0
    elif hint in (float, "float"):
        yield 0.5
    elif re.search(r"mask.*pos|positions?$|_index$|indices", name) and not first.is_floating_point():
        yield first.clamp(max=first.shape[-1] - 1)
        yield None
    elif "mask" in name:
        yield None
        if first.dim() == 4:
            yield torch.zeros(batch, *first.shape[2:], dtype=torch.bool, device=makes.device)
        if first.dim() > 1:
            length = first.shape[1]
            for shape in ((length, length), (1, length), (batch, 1, length), (batch, 1, 1, length)):
                yield torch.ones(shape, device=makes.device)
    elif LENGTHS.search(name):
        yield torch.full((batch,), long, device=makes.device)
        yield first
        yield long
    elif TIMES.search(name):
        yield torch.ones(batch, dtype=torch.long, device=makes.device)
        yield torch.ones(batch, dtype=makes.dtype, device=makes.device)
        yield from (torch.ones(batch, width, dtype=makes.dtype, device=makes.device) for width in makes.narrow(3))
        yield first
    elif LABELS.search(name) and first.is_floating_point():
        yield torch.zeros(batch, dtype=torch.long, device=makes.device)
        yield first
        yield from makes.contexts(batch)
    elif MARKS.search(name):
        yield None
        yield from (torch.zeros(*first.shape[:2], n, dtype=makes.dtype, device=makes.device) for n in (4, 5, 3, 6))
    elif (TOKENS.search(name) or "text" in name) and first.is_floating_point() and makes.vocabulary:
        yield makes.tokens(min(makes.sizes.length or USUAL, LONGEST)).to(makes.device)
        yield from (first, makes.tokens(SHORT).to(makes.device))
    elif CONTEXTS.search(name) and first.is_floating_point():
        yield first
        yield from makes.contexts(batch)
        yield None
    else:
        yield first
        if first.is_floating_point() and makes.vocabulary:
            yield makes.tokens(first.shape[1] if first.dim() == 3 else SHORT).to(makes.device)
        if not first.is_floating_point():
            yield from makes.contexts(batch)
