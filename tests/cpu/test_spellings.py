"""Every program of tests/models computes the same: in inference and in training, gradients included.

That each spelling is recognised, and each look-alike refused with its reason, is for tests/graph/test_recognised.py,
which takes seconds.
"""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from attn_fuse.report import as_text, collecting
from tests.harness import Outcome, assert_causal, assert_chunked, assert_fused, check, compiled, every_day, tensors
from tests.models import causal, grouped, masked, modules, plain
from tests.models.collection import LOOKALIKES, RARE, SPELLINGS, Spelling
from tests.models.spelling import heads

DONE = ("fused", "already fused")
ATTENTIONS = [spelling for spelling in (*SPELLINGS, *RARE) if spelling.exception is None]
OTHERS = [*LOOKALIKES, *(spelling for spelling in SPELLINGS if spelling.exception is not None)]
MODES = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
SIZES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def name(value: object) -> str:
    return getattr(value, "name", None) or getattr(value, "__name__", str(value))


def ran(spelling: Spelling, training: bool, **how: object) -> Outcome:
    """The spelling checked against float64 in one mode, with the gradients in training."""
    torch.manual_seed(0)
    program = spelling.program()
    args = spelling.inputs(spelling.dtype)
    if isinstance(program, nn.Module):
        program.train(training and not spelling.dropout)
    return check(program, *args, backward=training, **{"dynamic": spelling.dynamic} | how)


def assert_all_fused(spelling: Spelling, outcome: Outcome) -> None:
    # One line can hold several attentions, so they are counted in the graphs.
    sites = [site for graph in outcome.graphs for site in graph.sites]
    assert len(sites) == spelling.sites, str(outcome) or "no attention was found"
    assert all(site.status in DONE for site in sites), str(outcome)


def assert_computed(spelling: Spelling, training: bool) -> None:
    outcome = ran(spelling, training)
    if spelling.exception is None and spelling.group != "look-alikes":
        assert_all_fused(spelling, outcome)
    elif spelling.exception is not None and (training or spelling.group != "training"):
        assert not any(site.fused for site in outcome.sites), str(outcome)
    assert all(site.fused or site.status in DONE or site.blocker is not None for site in outcome.sites), str(outcome)


@pytest.mark.thorough
@MODES
@pytest.mark.parametrize("spelling", [*SPELLINGS, *LOOKALIKES], ids=name)
def test_computed_right(spelling: Spelling, training: bool) -> None:
    if training and not spelling.training:
        pytest.skip("eager itself has no gradient")
    assert_computed(spelling, training)


@pytest.mark.parametrize("spelling", [*SPELLINGS[::16], *LOOKALIKES[::8]], ids=name)
def test_some_computed_right(spelling: Spelling) -> None:
    """Of the thorough test above what each commit needs."""
    assert_computed(spelling, spelling.training)


BEHIND = ("other axis", "permuted key", "mask with values", "strict triangle lowest", "talking heads", "second softmax")


@pytest.mark.thorough
@pytest.mark.parametrize("spelling", [s for s in LOOKALIKES if s.name in BEHIND], ids=name)
def test_with_inductor_behind(spelling: Spelling) -> None:
    ran(spelling, False, inner="inductor")


@pytest.mark.thorough
@SIZES
@pytest.mark.parametrize("spelling", RARE, ids=name)
def test_rare(spelling: Spelling, dynamic: bool) -> None:
    outcome = ran(spelling, True, inner="aot_eager", dynamic=dynamic or None)
    # Steps are read where the length is known.
    assert outcome.sites and all(
        site.fused or (dynamic and spelling.name == "every_second_key") for site in outcome.sites
    )


AS_PLAIN = ("softmin of the negative", "softmin masked from above", "written twice for the maximum",
    "halves of the scores added", "masked scores doubled")  # fmt: skip


@pytest.mark.parametrize("spelling", [s for s in RARE if s.name in AS_PLAIN], ids=name)
def test_read_as_the_plain_spelling(spelling: Spelling) -> None:
    assert ran(spelling, True).site.kernel == "cpu_flash"


@pytest.mark.thorough
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


def test_the_collection() -> None:
    names = [spelling.name for spelling in (*SPELLINGS, *LOOKALIKES, *RARE)]
    assert len(names) == len(set(names))
    assert len(SPELLINGS) >= 160
    assert all(spelling.sites > 0 for spelling in ATTENTIONS)


# ---- other sizes, dtypes and structures of the plainest ones


@pytest.mark.thorough
@SIZES
@pytest.mark.parametrize("written", [*plain.PLAIN, *causal.CAUSAL, *plain.LAYOUTS], ids=name)
def test_sizes(written, dynamic: bool) -> None:
    inputs = tensors(2, 7, 3, 16) if written in plain.LAYOUTS else tensors(2, 3, 7, 16)
    if written is causal.filled_before_scale and dynamic:
        # A head_dim known only when the program runs: that its root is positive is not proved.
        reason = "takes no function of the scores: masked scores are scaled by something that is not a positive number"
        assert_chunked(written, *inputs, dynamic=True, reason=reason)
        return
    outcome = assert_fused(written, *inputs, dynamic=dynamic)
    if written in causal.CAUSAL:
        assert_causal(outcome)


@pytest.mark.thorough
def test_a_triangle_that_is_reversed() -> None:
    assert_fused(causal.reversed_triangle, *tensors(2, 3, 7, 16), backward=False)


@pytest.mark.thorough
@pytest.mark.parametrize("written", [*plain.PLAIN[:6], *causal.CAUSAL], ids=name)
def test_sizes_that_are_all_equal(written) -> None:
    assert_fused(written, *tensors(4, 4, 4, 4))


@pytest.mark.thorough
@pytest.mark.parametrize("written", [*plain.SOFTMAXES, causal.tril_filled, causal.where_tril], ids=name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(written, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and "float" in written.__name__:
        pytest.skip("it drops to float32 on purpose, which the kernel does not: nothing to compare with")
    assert_fused(written, *tensors(2, 3, 7, 16, dtype=dtype))


@pytest.mark.parametrize("written", every_day(grouped.GROUPED, grouped.by_expand, grouped.by_einsum), ids=name)
def test_grouped(written) -> None:
    inputs = heads(heads=6, kv_heads=2)(torch.float32)
    outcome = assert_fused(written, *inputs)
    if written is not grouped.by_stack:
        assert outcome.site.attention["kv_heads"] == "2"


@pytest.mark.thorough
@pytest.mark.parametrize("written", [grouped.by_expand, grouped.by_einsum], ids=name)
def test_grouped_with_symbolic_heads(written) -> None:
    """An unfused site is allowed, and a wrong answer is not."""
    check(written, *heads(heads=6, kv_heads=2)(torch.float32), dynamic=True)


@pytest.mark.parametrize("written", every_day(masked.BIASED, *masked.BIASED[::4]), ids=name)
def test_a_bias_with_a_gradient_is_for_chunked(written) -> None:
    reason = "a bias needs a gradient, which this kernel does not give"
    assert_chunked(written, *tensors(2, 3, 7, 16), torch.randn(1, 3, 7, 7), reason=reason)


@pytest.mark.thorough
@MODES
@pytest.mark.parametrize("kind", [*modules.CAUSAL, *modules.FULL], ids=name)
def test_modules(kind, training: bool) -> None:
    module = modules.ModuleOf(kind).train(training)
    batches = [torch.randn(batch, length, 24) for batch, length in ((2, 16), (1, 16), (2, 11), (3, 13))]
    if kind in (modules.BottomSlice, modules.Cross):
        batches = batches[:1]
    outcome = assert_fused(module, batches[0], more=[(x,) for x in batches[1:]])
    if kind in modules.CAUSAL and kind is not modules.BottomSlice:
        assert_causal(outcome)


def test_what_is_printed_of_a_site() -> None:
    torch.manual_seed(0)
    outcome = assert_fused(modules.ModuleOf(modules.NanoGPT).eval(), torch.randn(2, 16, 24), backward=False)
    text = as_text(outcome.graphs[0])
    where, *lines = text.splitlines()
    assert where.startswith("[1] ") and "tests/models/modules.py:" in where
    assert_expected_inline(
        "\n".join(line for line in lines if not line.startswith("      not ")),
        """\
    att = F.softmax(att, dim=-1)
    FUSED on cpu_flash
      heads:      3
      head_dim:   8
      q_len:      16
      kv_len:     16
      mask:       causal, since query i sees key j <= i by the contents of bias, a lower triangle
      scale:      0.353553 = 1 / sqrt(8)
      dropout:    none
      dtype:      float32
      picked:     asked for
      saved:      6.0 KiB of scores no longer stored""",
    )
    assert "      not chunked: cpu_flash is preferred" in lines
    assert any(line.endswith(": runs on cuda, not on cpu") and "cudnn" in line for line in lines)
