"""Every spelling is recognised and every look-alike refused with its reason, without a kernel or a compiler.

That each also computes the same is for tests/cpu/test_spellings.py, which takes minutes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.attention.attention import Attention, Refusal
from tests.models.collection import LOOKALIKES, RARE, SPELLINGS, Spelling
from tests.recognised import recognised

GROUPS = dict.fromkeys(spelling.group for spelling in (*SPELLINGS, *RARE))
ATTENTIONS = [spelling for spelling in (*SPELLINGS, *RARE) if spelling.exception is None]


def answers(spelling: Spelling, training: bool) -> list[Attention | Refusal]:
    torch.manual_seed(0)
    program, args = spelling.program(), spelling.inputs(spelling.dtype)
    if isinstance(program, nn.Module):
        program.train(training)
    if training:
        args = tuple(a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    with torch.set_grad_enabled(training):
        return recognised(program, *args, dynamic=spelling.dynamic)


# Every fifth of each group; make recall and the thorough tests take all.
EVERY_DAY = [s for group in GROUPS for s in [s for s in ATTENTIONS if s.group == group][::5]]


@pytest.mark.parametrize(
    "training", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["inference", "training"]
)
@pytest.mark.parametrize(
    "spelling",
    [pytest.param(s, id=s.name, marks=() if s in EVERY_DAY else pytest.mark.thorough) for s in ATTENTIONS],
)
def test_every_spelling(spelling: Spelling, training: bool) -> None:
    if training and not spelling.training:
        pytest.skip("has no gradients")
    found = answers(spelling, training)
    assert [x for x in found if not isinstance(x, Attention)] == []
    # The program may call SDPA itself, which says nothing that is not known already.
    assert len(found) <= spelling.sites


@pytest.mark.parametrize("spelling", [s for s in LOOKALIKES if s.reason], ids=lambda s: s.name)
def test_every_lookalike_is_refused_with_its_reason(spelling: Spelling) -> None:
    refused = [found for found in answers(spelling, training=True) if isinstance(found, Refusal)]
    assert any(spelling.reason in found.reason for found in refused), [found.reason for found in refused]


def test_a_refusal_has_its_operation_and_line() -> None:
    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        weights = scores.softmax(-1)
        mixed = weights.softmax(-1)
        return mixed @ v

    q = torch.randn(2, 3, 7, 16)
    (found,) = recognised(doubled, q, q, q)
    assert isinstance(found, Refusal) and found.reason == "the scores pass through a second softmax"
    assert "weights = scores.softmax(-1)" in found.node.location.code and found.node.op == "softmax"
