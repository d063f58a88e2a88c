"""Calls that run the kernels with bulk copies in the emulator, and the other kernels in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from attn_fuse.expression.nodes import Score
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.simplify import inside
from tests.graph.chunked_cases import CASE, CAUSAL, SAME_DOCUMENT, Case, K, Q, S, Sizes, where

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_fuse.kernels.triton.flash import facts as flash_facts
from attn_fuse.kernels.triton.flash import launch as flash
from attn_fuse.kernels.triton.flash.bulk import Bulk
from attn_fuse.kernels.triton.flash.configs import Config
from attn_fuse.kernels.triton.flash.facts import CallFacts, call_facts
from attn_fuse.kernels.triton.flash.spans import spans
from attn_fuse.kernels.triton.launch import Launch
from tests.triton.gluon_emulator import emulate

# The positions of each kernel's results among its arguments.
MADE = {"bulk_forward": (3, 4, 5), "bulk_query": (4,)}


class EmulatedLaunch(Launch):
    """A launch that emulates kernels in Gluon. names: the emulated kernels. seed: chooses the order of events."""

    names: ClassVar[list[str]] = []
    seed = 0

    def __call__(self, stream: int, misaligned: tuple[bool, ...], *arguments: Any) -> None:
        name = self.kernel.fn.__name__
        if name not in MADE:
            super().__call__(stream, misaligned, *arguments)
            return
        EmulatedLaunch.names.append(name)
        for place in MADE[name]:
            made = arguments[place]
            (made[0] if isinstance(made, tuple) else made).fill_(math.nan)
        emulate(self.kernel, self.programs, *arguments, *self.constants, seed=EmulatedLaunch.seed)


@dataclass
class Attention:
    """One call, and its facts and results."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    inputs: Sequence[Tensor]
    numbers: Sequence[int]
    program: ScoreProgram
    table: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def facts(self) -> CallFacts:
        return call_facts(self.given, self.table)

    @property
    def given(self) -> Operands:
        how = self.inputs, self.numbers, None, 0.0, self.program.dumps()
        return Operands(self.query, self.key, self.value, *how)

    @property
    def taken(self) -> Bulk | None:
        """The tiles of the forward kernel with bulk copies, or None if the call does not use it."""
        return self.facts.bulk.get("forward")

    def results(self, backward: bool) -> dict[str, Tensor]:
        made = flash.attend(self.given, self.table)
        found = dict(zip(("out", "max", "sum"), made, strict=False))
        if backward:
            wanted = [False] * len(self.inputs)
            gradients = flash.attend_backward(self.given, self.table, made, self.grad_out, wanted)
            found |= zip(("dq", "dk", "dv"), gradients, strict=False)
        return found

    def in_bulk(self, seed: int = 0, how: Bulk | None = None, backward: bool = False) -> dict[str, Tensor]:
        """The results of the kernels with bulk copies. how: tiles in place of the shipped ones."""
        facts = self.facts
        kernels = ["forward", *(("query",) if backward else ())]
        assert facts.bulk.keys() >= {*kernels}
        if how is not None:
            facts.bulk.update(dict.fromkeys(facts.bulk, how))
        facts.launches.clear()
        EmulatedLaunch.seed = seed
        EmulatedLaunch.names.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flash, "Launch", EmulatedLaunch)
            found = self.results(backward)
        assert facts.bulk.keys() >= {*kernels} and EmulatedLaunch.names == [f"bulk_{x}" for x in kernels], "given up"
        return found

    def in_others(self, backward: bool = False) -> dict[str, Tensor]:
        """The results of the kernels without bulk copies, in tiles of the same sizes."""
        facts = self.facts
        for kernel, how in [*facts.bulk.items()]:
            facts.configs[kernel] = Config(how.block_m, how.block_n, 8, 1)
            facts.give_up(kernel, RuntimeError("the others are wanted"))
        found = self.results(backward)
        flash_facts._known.clear()
        return found

    def check(self, seed: int = 0, how: Bulk | None = None, backward: bool = False) -> dict[str, Tensor]:
        """The results of both kinds of kernels, which must be the same."""
        found = self.in_bulk(seed, how, backward)
        rounded = self.facts.rescaled
        same(found, self.in_others(backward), rounded)
        return found


def same(found: dict[str, Tensor], wanted: dict[str, Tensor], rounded: bool = False) -> None:
    """Assert equal results. rounded: allow for rounding in float32, because the forward kernel with bulk copies scores
    its first block like one cut by the mask, in another unit than the whole blocks if those are rescaled."""
    assert found.keys() == wanted.keys()
    for name, got in found.items():
        relative = 2 * torch.finfo(got.dtype).eps if rounded else 0.0
        near = {"rtol": 8 * relative, "atol": relative, "equal_nan": True}
        torch.testing.assert_close(got, wanted[name], **near, msg=lambda text, name=name: f"{name}: {text}")


def operands(s: Sizes, dtype: torch.dtype) -> list[Tensor]:
    """query, key, value and the gradient of the output, in memory [B, L, H, D]."""
    shapes = (s.q_len, s.heads, s.head_dim), (s.kv_len, s.kv_heads, s.head_dim), (s.kv_len, s.kv_heads, s.value_dim)
    shapes = *shapes, (s.q_len, s.heads, s.value_dim)
    return [torch.randn(s.batch, *shape, dtype=dtype).transpose(1, 2) for shape in shapes]


def made(case: Case, s: Sizes, dtype: torch.dtype = torch.float16) -> Attention:
    return Attention(*operands(s, dtype), case.inputs(s), case.numbers(s), case.program)


def with_spans(attention: Attention, inner: bool = True) -> Attention:
    """The same call with the spans of its mask. inner: whether the spans say where every key is seen."""
    program = attention.program
    only = program.hides_only_if_others_seen
    visible = program.visible if only else inside(program.visible, program)
    text = ScoreProgram(Score(), visible=visible, hides_only_if_others_seen=only).dumps()
    (batch, heads, q_len, _), kv_len = attention.query.shape, attention.key.shape[2]
    how = batch, heads, q_len, kv_len, text, attention.query.device, inner
    return replace(attention, table=spans(attention.inputs, attention.numbers, *how))


# The programs of `chunked_cases` that run with bulk copies.
TAKEN = (
    "plain", "scaled", "causal", "window", "prefix", "documents", "documents filled with -1e+09",
    "documents filled with -3.4e+38", "added fill", "bias of the keys", "bias of the queries", "bias of the heads",
    "alibi", "regions", "softcap", "clamp", "temperature", "sink", "sink of each head", "sink from a table",
)  # fmt: skip
LOWEST = torch.finfo(torch.float32).min
SOFTLY = ["and", CAUSAL, ["input", 0]]


def in_order(s: Sizes) -> list[Tensor]:
    """Ids of packed documents, the last of which has no query."""
    ids = torch.arange(max(s.q_len, s.kv_len)) // 70
    ids = (ids + torch.arange(s.batch)[:, None]).view(s.batch, 1, -1)
    return [ids[:, :, : s.q_len, None].contiguous(), ids[:, :, None, : s.kv_len].contiguous()]


def padded(s: Sizes) -> list[Tensor]:
    """Which keys are present: all in the first batch entry, fewer and fewer in the next, and none in the last."""
    first = torch.arange(s.batch) * s.kv_len // max(s.batch - 1, 1)
    return [(torch.arange(s.kv_len) >= first[:, None])[:, None, None, :]]


def seen_by(name: str, visible: list[Any]) -> Case:
    return replace(CASE[name], name=f"{name} by spans", program=replace(CASE[name].program, visible=visible))


IN_ORDER = replace(seen_by("documents", SAME_DOCUMENT), inputs=in_order)
# The mask of Hugging Face's models, whose fully masked queries get the mean of the values.
SOFT = Case(
    "softly",
    ScoreProgram(where(SOFTLY, S, LOWEST), visible=SOFTLY, hides_only_if_others_seen=True),
    lambda s, at, keep: s,
    padded,
    lambda s: [s.kv_len - s.q_len],
)
HARD = replace(SOFT, name="hard", program=ScoreProgram(where(SOFTLY, S), visible=SOFTLY))
SPANNED = [
    IN_ORDER,
    SOFT,
    HARD,
    seen_by("documents", SAME_DOCUMENT),
    seen_by("prefix", ["or", ["ge", Q, K], ["lt", K, ["number", 0]]]),
    replace(
        IN_ORDER,
        name="sink and spans",
        program=ScoreProgram(where(SAME_DOCUMENT, S), visible=SAME_DOCUMENT, sink=["const", 0.5]),
    ),
]
