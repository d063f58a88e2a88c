"""Small values for arguments without a default, by their names, such that they fit one another and the defaults.

A name that says nothing has no value here; whoever asks then says that it is missing.
"""

from __future__ import annotations

import copy
import enum
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

VOCABULARY, WIDTH, HEAD, LENGTH, DEPTH, CLASSES, CHANNELS, PICTURE, PATCH = 1000, 256, 64, 128, 2, 10, 3, 64, 16
SERIES, MELS, STRIDE, KERNEL, WINDOW, COUNT = 7, 80, 8, 3, 8, 4

HEADS_NAME = (
    r"(^|_)(n_?|num_?|attn_|attention_)?(kv_|query_|q_|key_value_)?heads?(_num|_count)?$|^h$|nheads?$|n_?head(s|$)"
)
HEAD_NAME = r"head_?(dim|size|channels|width)|dim_?(per_)?head|d_head|^d_?[kvq]$|^dim_[kvq]$|^d_qk$"
WIDTH_NAME = (
    r"d_?model|n_embd|emb(ed)?(ding)?s?_?(dim|size)|^emb(ed)?$|hidden|width|(^|_)dims?$|model_?(dim|size)|state$"
    r"|^features$|d_word_vec|dim_model|n_units|^size$|embed|^d$|^c$|n_?inp$|n_?hid$|^emb"
)
INNER_NAME = (
    r"d_?ff|ff_?(dim|size|hidden)|ffn|dim_?ff|mlp_?(dim|hidden|size)|inner|feed_?forward|intermediate|d_hid|pf_dim"
)
DEPTH_NAME = (
    r"n_?layers?$|_layers?$|num_?layers|^layers$|depth|n_?blocks?$|num_(res_)?blocks|^n$|nlayers|_blocks$|repeat"
)
LENGTH_NAME = (
    r"(max|seq|src|tgt|trg|pred|label|context|ctx|block|sequence|input|out|time).*len|_len(gth)?$|block_size|n_positions|max_pos|_ctx$|n_ctx"
    r"|context_(size|window)|(segment|chunk)_size|max_position|max_tokens|^length$|seq_size|num_pos|n_position|timesteps?|num_frames|^n_seq"
)
PICTURE_NAME = r"(img|image|(^|_)im)_?(size|resolution)|resolution"
OUTPUT_NAME = r"class|n_?cls$|n_?labels|num_?(labels|outputs)|n_out|(output|out)_(dim|size)|dim_out(put)?$"
SERIES_NAME = r"(enc|dec)_in|c_out|(n|num)_?(vars|features|series|variables)"
INPUT_NAME = r"(input|feature|feat)_?(dim|size)|dim_in(put)?$|^n_?feats?$"
# A guess that is by the kind of number: what a name ends or begins with says the kind, and not of what.
BY_KIND = object()
KINDS = (
    (r"(^|_)groups?$", 1), (r"^(n|num)_|_(num|count)$|_num_", COUNT), (r"_(size|dim)s?$|^dims?_|width$", WIDTH),
)  # fmt: skip
# What there is a table of: an embedding has a row for each.
THINGS = r"user|item|movie|product|entity|entitie|relation|speaker|symbol|phoneme|char|token_type"


class Activation(str):
    """The name of a function of torch.nn.functional, which may be called as that function, too."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", getattr(nn.functional, self)(x))


@dataclass(frozen=True)
class Known:
    """The sizes that an argument must fit: of the defaults beside it, or the usual ones."""

    heads: int | None = None
    width: int | None = None
    head: int | None = None
    picture: int | None = None
    patch: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Known:
        """What the values in `given`, by name, fix."""

        def found(pattern: str) -> int | None:
            values = [v for name, v in given.items() if _is_count(v) and re.search(pattern, name.lower())]
            return values[0] if values else None

        head = found(HEAD_NAME)
        inside = f"{HEAD_NAME}|{INNER_NAME}|{OUTPUT_NAME}|{SERIES_NAME}|{INPUT_NAME}"
        others = {name: v for name, v in given.items() if not re.search(inside, name.lower())}
        widths = [v for name, v in others.items() if _is_count(v) and re.search(WIDTH_NAME, name.lower())]
        # `dim_head` ends as `num_head` does.
        heads = [
            v
            for name, v in given.items()
            if _is_count(v) and re.search(HEADS_NAME, name.lower()) and not re.search(HEAD_NAME, name.lower())
        ]
        return cls(
            math.lcm(*heads) if heads else None,
            widths[0] if widths else None,
            head,
            found(rf"{PICTURE_NAME}|input_size"),
            found(r"patch_?(size)?$"),
        )

    @property
    def model_width(self) -> int:
        """A width that the heads divide."""
        return self.width or (self.heads * (self.head or HEAD) if self.heads else WIDTH)

    @property
    def head_count(self) -> int:
        """A number of heads that divides the width."""
        if self.heads:
            return self.heads
        if self.head and self.model_width % self.head == 0:
            return self.model_width // self.head
        if self.model_width % HEAD == 0:
            return self.model_width // HEAD
        return next(n for n in (4, 3, 2, 1) if self.model_width % n == 0)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def value_for(name: str, hint: Any = None, given: Mapping[str, Any] | None = None) -> Any:
    """A small value for an argument of this name, or None where the name says nothing.

    hint: its annotation, if any. given: the values beside it, with which it has to fit.
    """
    if (choices := _choices(hint)) is not None:
        return choices
    # Some write a value in place of an annotation.
    if isinstance(hint, nn.Module):
        return copy.deepcopy(hint)
    name = name.lower().strip("_")
    known = Known.of(given or {})
    if hint is bool or re.match(
        r"(use|with|is|has|do|enable|return|share|tie|learned|pre|apply|scale_by|should|include)_|pretrained$|output_(attn|attention|hidden|weight|score|all)"
        r"|.*(causal|bias|inverse)$",
        name,
    ):
        return False
    if hint in (None, str) and re.search(r"^(hidden_)?act(ivation)?(_(fn|func|function|name|type))?$", name):
        return Activation("relu")
    if hint is str and name != "device":
        return None
    table = _table(known)
    # What is counted may stand first: layers_num.
    counted = re.fullmatch(r"(?P<what>\w+?)_(num|number|count)", name)
    for spelled in (name, f"num_{counted['what']}") if counted else (name,):
        for pattern, value in table:
            if re.search(pattern, spelled):
                return float(value) if hint is float and isinstance(value, int) else value
    return None


def guess_for(name: str, guess: Any) -> Any:
    """The guess at an argument of which no name says anything; for BY_KIND one that fits the kind of number it is."""
    if guess is not BY_KIND:
        return guess
    return next((value for pattern, value in KINDS if re.search(pattern, name.lower())), DEPTH)


def may_be_none(hint: Any) -> bool:
    """Whether an annotation allows None."""
    return type(None) in typing.get_args(hint)


def _choices(hint: Any) -> Any:
    # The first of the values that an annotation lists, or all of them for a sequence of such; None where it lists none.
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint), None)
    options = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return options[0]
    is_sequence = typing.get_origin(hint) in (tuple, list, Sequence)
    if is_sequence and options and isinstance(options[0], type) and issubclass(options[0], enum.Enum):
        return tuple(options[0])
    return None


def _table(known: Known) -> tuple[tuple[str, Any], ...]:
    # The first row whose pattern stands in the name decides.
    width, heads = known.model_width, known.head_count
    picture = known.picture or (PICTURE if PICTURE % (known.patch or 1) == 0 else 8 * (known.patch or 1))
    patch = known.patch or next(n for n in (PATCH, 14, 8, 7, 4, 2, 1) if picture % n == 0)
    return (
        (r"^device$", "cpu"),
        (r"^norm_(layer|class|cls)$", nn.LayerNorm),
        (r"^act(ivation)?_(layer|class|cls)$", nn.GELU),
        (r"(layer|block|depth|stage).*(idx|id|index|number)$", 0),
        (r"dtype", torch.float32),
        (r"batch_?size$", 1),
        (r"seed$", 0),
        (r"(pad|bos|eos|sos|unk|cls|sep|mask|ignore).*(idx|id|index|token)|^padding$", 0),
        (r"drop|^p$", 0.0),
        (r"^eps|_eps$|epsilon", 1e-5),
        (r"(^|_)(lr|learning_rate|weight_decay)$", 1e-3),
        (r"^alpha$|^beta$|slope$|momentum|std$|^(init|weight)_(std|scale|range)|initializer_range", 0.1),
        (r"temperature|^temp$|^tau$|^gamma$|^(softmax_)?scale$|_weight$", 1.0),
        (r"(mask\w*|keep|noise|prun\w+|sampl\w+|select\w*|token)_?(ratio|rate)$", 0.5),
        (r"(ratio|mult|factor|expansion|expand)$", 4),
        (r"codebook_?size|num_codes", VOCABULARY),
        (r"vocab|voc_size|n_?um_?tokens|^n_?tokens?$|^tokens$|num_embeddings|dictionary|n?_?words$", VOCABULARY),
        (rf"^(n|num)_?({THINGS})s?$|^({THINGS})s?_?(n|num|count|size)$", VOCABULARY),
        (HEAD_NAME, known.head or width // heads),
        (HEADS_NAME, heads),
        (INNER_NAME, 4 * width),
        (DEPTH_NAME, DEPTH),
        (r"(attention|attn)_resolutions", (2, 4, 8, 16)),
        (rf"{PICTURE_NAME}|(img|image|spatial)_?(size|resolution|dim|height|width|h|w)|input_size", picture),
        (r"^(n|num)_?patch(es)?$", (picture // patch) ** 2),
        (r"patch_?(size|len|length|height|width)?$|^patch", patch),
        (r"n_?mels?|mel_(bins|dim)", MELS),
        (r"window_?(size|len)?$|^temporal_size$", WINDOW),
        (r"soft_?cap", 30.0),
        (LENGTH_NAME, LENGTH),
        (r"(model|base|init|start)_(channels|dim|ch)|^nf$|^ngf$", HEAD),
        (r"(embed\w*|hidden|feat\w*)_(channels|ch)$", width),
        (r"in_?(ch|chans|channels?)$|channels?$|in_planes|c_in$", CHANNELS),
        (OUTPUT_NAME, CLASSES),
        (SERIES_NAME, SERIES),
        (INPUT_NAME, SERIES),
        (r"stride", STRIDE),
        (r"kernel", KERNEL),
        (WIDTH_NAME, width),
    )  # fmt: skip


def in_words(values: Mapping[str, object]) -> str:
    """The values by name, with commas between, as one writes arguments."""
    said = {name: value.__name__ if isinstance(value, type) else repr(value) for name, value in values.items()}
    return ", ".join(f"{name}={value}" for name, value in said.items())
