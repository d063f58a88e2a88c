"""Every spelling in the collection is fused, in inference and in training, and computes the same, gradients included.

Those with an exception and the look-alikes compute the same, whatever becomes of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_fuse.report import collecting
from tests.harness import Outcome, check, compiled
from tests.models.collection import LOOKALIKES, SPELLINGS, Spelling

pytestmark = pytest.mark.thorough

DONE = ("fused", "already fused")


def name(spelling: Spelling) -> str:
    return spelling.name


def ran(spelling: Spelling, training: bool) -> Outcome:
    """The spelling checked against float64 in one mode, with the gradients in training."""
    torch.manual_seed(0)
    program = spelling.program()
    args = spelling.inputs(spelling.dtype)
    if isinstance(program, nn.Module):
        program.train(training and not spelling.dropout)
    return check(program, *args, backward=training, dynamic=spelling.dynamic)


def assert_all_fused(spelling: Spelling, outcome: Outcome) -> None:
    # One line can hold several attentions, so they are counted in the graphs.
    sites = [site for graph in outcome.graphs for site in graph.sites]
    assert len(sites) == spelling.sites, str(outcome) or "no attention was found"
    assert all(site.status in DONE for site in sites), str(outcome)


ATTENTIONS = [spelling for spelling in SPELLINGS if spelling.exception is None]
OTHERS = [*LOOKALIKES, *(spelling for spelling in SPELLINGS if spelling.exception is not None)]


@pytest.mark.parametrize("spelling", ATTENTIONS, ids=name)
def test_inference(spelling: Spelling) -> None:
    assert_all_fused(spelling, ran(spelling, training=False))


@pytest.mark.parametrize("spelling", [s for s in ATTENTIONS if s.training], ids=name)
def test_training(spelling: Spelling) -> None:
    assert_all_fused(spelling, ran(spelling, training=True))


@pytest.mark.parametrize("spelling", [s for s in ATTENTIONS if s.dropout], ids=name)
def test_dropout(spelling: Spelling) -> None:
    program = spelling.program().train()
    args = tuple(a.requires_grad_(a.is_floating_point()) for a in spelling.inputs(spelling.dtype))
    with collecting() as graphs:
        first, second = (compiled(program)(*args) for _ in range(2))
    assert not torch.equal(first, second)
    first.sum().backward()
    assert all(a.grad.isfinite().all() for a in args if a.requires_grad)
    assert_all_fused(spelling, Outcome({}, tuple(graphs)))


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("spelling", OTHERS, ids=name)
def test_computed_right(spelling: Spelling, training: bool) -> None:
    outcome = ran(spelling, training and spelling.training)
    assert all(site.fused or site.blocker is not None for site in outcome.sites), str(outcome)


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s.exception is not None], ids=name)
def test_exceptions_stay_as_written(spelling: Spelling) -> None:
    assert not any(site.fused for site in ran(spelling, training=spelling.training).sites)


def test_the_collection() -> None:
    names = [spelling.name for spelling in (*SPELLINGS, *LOOKALIKES)]
    assert len(names) == len(set(names))
    assert len(SPELLINGS) >= 160
    assert all(spelling.sites > 0 for spelling in ATTENTIONS)
