"""Every spelling in tests/models fuses and computes the same: forward and gradients, static and symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from attn_fuse.report import as_text
from tests.harness import assert_causal, assert_chunked, assert_fused, check, tensors
from tests.models import causal, grouped, masked, modules, plain

pytestmark = pytest.mark.thorough


def name(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("written", plain.PLAIN, ids=name)
def test_plain(written, dynamic: bool) -> None:
    assert_fused(written, *tensors(2, 3, 7, 16), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("written", causal.CAUSAL, ids=name)
def test_causal(written, dynamic: bool) -> None:
    if written is causal.filled_before_scale and dynamic:
        # A head_dim known only when the program runs: that its root is positive is not proved.
        reason = "takes no function of the scores: masked scores are scaled by something that is not a positive number"
        assert_chunked(written, *tensors(2, 3, 7, 16), dynamic=True, reason=reason)
        return
    assert_causal(assert_fused(written, *tensors(2, 3, 7, 16), dynamic=dynamic))


@pytest.mark.parametrize("written", [*plain.PLAIN[:6], *causal.CAUSAL], ids=name)
def test_sizes_that_are_all_equal(written) -> None:
    assert_fused(written, *tensors(4, 4, 4, 4))


@pytest.mark.parametrize("written", [*plain.SOFTMAXES, causal.tril_filled, causal.where_tril], ids=name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(written, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and "float" in written.__name__:
        pytest.skip("it drops to float32 on purpose, which the kernel does not: nothing to compare with")
    assert_fused(written, *tensors(2, 3, 7, 16, dtype=dtype))


@pytest.mark.parametrize("written", causal.MASKED, ids=name)
def test_other_structures(written) -> None:
    assert_fused(written, *tensors(2, 3, 7, 16), backward=False)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("written", plain.LAYOUTS, ids=name)
def test_layouts(written, dynamic: bool) -> None:
    assert_fused(written, *tensors(2, 7, 3, 16), dynamic=dynamic)


@pytest.mark.parametrize("written", plain.WITHOUT_HEADS, ids=name)
def test_without_heads(written) -> None:
    assert_fused(written, *tensors(2, 7, 16))


@pytest.mark.parametrize("written", grouped.GROUPED, ids=name)
def test_grouped(written) -> None:
    (q,), (k, v) = tensors(2, 6, 7, 16, count=1), tensors(2, 2, 7, 16, count=2)
    outcome = assert_fused(written, q, k, v)
    # With the numbers of heads symbolic too, an unfused site is allowed and a wrong answer is not.
    check(written, q, k, v, dynamic=True)
    if written is not grouped.by_stack:
        assert outcome.site.attention["kv_heads"] == "2"


@pytest.mark.parametrize("written", masked.PADDING, ids=name)
def test_padding(written) -> None:
    seen = torch.arange(7) < torch.tensor([[4], [7]])
    assert_fused(written, *tensors(2, 3, 7, 16), seen, backward=False)
    check(written, *tensors(2, 3, 7, 16), seen)


@pytest.mark.parametrize("written", masked.BOOLEAN, ids=name)
def test_boolean(written) -> None:
    keep = torch.rand(2, 1, 7, 7) > 0.4
    keep[..., 0] = True
    assert_fused(written, *tensors(2, 3, 7, 16), keep, backward=False)
    check(written, *tensors(2, 3, 7, 16), keep)


@pytest.mark.parametrize("written", masked.BIASED, ids=name)
def test_biased(written) -> None:
    bias = torch.randn(1, 3, 7, 7)
    assert_fused(written, *tensors(2, 3, 7, 16), bias, backward=False)
    assert_chunked(
        written, *tensors(2, 3, 7, 16), bias, reason="a bias needs a gradient, which this kernel does not give"
    )


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
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
