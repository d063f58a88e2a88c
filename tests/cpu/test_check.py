"""The check of a whole program: what a rewrite may break is seen, and what computes the same passes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_fuse.emit.check import disagreement
from tests.captured import Program, attention, captured, fused, randoms, said
from tests.harness import every_day

# ---- what agrees


def autocast(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        return (q @ k.mT / 2.0).softmax(-1) @ v


def autocast_fused(q, k, v):
    q, k, v = (t.bfloat16() for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=0.5)


def checkpointed(q, k, v):
    return checkpoint(attention, q, k, v, use_reentrant=False) + 1


def checkpointed_fused(q, k, v):
    return checkpoint(fused, q, k, v, use_reentrant=False) + 1


def without_gradient(q, k, v):
    with torch.no_grad():
        q = q * 2
    return attention(q, k, v)


def without_gradient_fused(q, k, v):
    return fused((q * 2).detach(), k, v)


def written_in_place(q, k, v):
    k[:, :, :2] = v[:, :, 2:4]
    q *= 0.5
    return attention(q, k, v)


def written_at_the_end(q, k, v):
    kept = torch.cat([v[:, :, 2:4], k[:, :, 2:]], 2)
    half = q * 0.5
    out = fused(half, kept, v)
    q.copy_(half)
    k.copy_(kept)
    return out


def counted(q, k, v):
    return attention(q, k, v), (q[..., 0] > 0).sum(-1), 3, None


def counted_fused(q, k, v):
    return fused(q, k, v), (q[..., 0] > 0).sum(-1), 3, None


def dropped(q, k, v):
    return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v + torch.rand_like(v)


def dropped_fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, None, 0.5, scale=1.0) + torch.rand_like(v)


def dropped_in_place(q, k, v):
    return F.dropout((q @ k.mT).softmax(-1), 0.5, True, True) @ v + torch.rand_like(v)


def dropped_and_edited(q, k, v):
    """Where it drops, dropout gives memory of its own; where it does not, that of its input."""
    kept = F.dropout(v, 0.5)
    kept += 1
    return attention(q, k, kept)


def dropped_and_edited_fused(q, k, v):
    return fused(q, k, F.dropout(v, 0.5) + 1)


def narrowed(q, k, v):
    half = q.to(torch.bfloat16)
    half *= 2
    return attention(half.float(), k, v), q * 1


def narrowed_fused(q, k, v):
    return fused((q.to(torch.bfloat16) * 2).float(), k, v), q * 1


def with_an_empty_row(q, k, v):
    hidden = torch.ones(6, 6).tril().bool()
    hidden[2] = True
    return (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1)[..., 2:5, :] @ v


def with_zeros_in_it(q, k, v):
    return with_an_empty_row(q, k, v).nan_to_num(0.0)


AGREE = [
    (attention, fused),
    (autocast, autocast_fused),
    (checkpointed, checkpointed_fused),
    (without_gradient, without_gradient_fused),
    (counted, counted_fused),
    (dropped, dropped_fused),
    (dropped, dropped_in_place),
    (dropped_and_edited, dropped_and_edited_fused),
    (narrowed, narrowed_fused),
]


@pytest.mark.parametrize("grad", every_day([False, True], True))
@pytest.mark.parametrize(("written", "rewritten"), AGREE, ids=lambda f: f.__name__)
def test_what_computes_the_same_agrees(written, rewritten, grad) -> None:
    inputs = randoms(2, 3, 6, 4, grad=grad)
    assert said(written, rewritten, **inputs) is None
    assert said(written, written, **inputs) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_budget_is_that_of_the_dtype(dtype) -> None:
    inputs = {n: t.to(dtype).requires_grad_() for n, t in randoms(2, 3, 6, 4).items()}
    assert said(attention, fused, **inputs) is None
    off = said(attention, lambda q, k, v: fused(q, k, v) * (1.1 if dtype != torch.float64 else 1 + 1e-8), **inputs)
    assert off is not None and "the rewritten output 0 is" in off


def test_the_budget_of_a_widened_result_is_that_of_what_was_rounded() -> None:
    def exact(q, k, v):
        return (v + 0 * q).float()

    def off_by_roundings(q, k, v):
        return ((v + 0 * q) * 1.004).float()

    half = {n: t.bfloat16() for n, t in randoms(2, 3, 6, 4).items()}
    assert said(exact, off_by_roundings, **half) is None
    far = said(exact, lambda q, k, v: exact(q, k, v) * 1.1, **half)
    assert far is not None and "the rewritten output 0 is" in far
    # Nothing of this program is in half precision: its numbers count as they are, whatever they happen to be.
    whole = {n: t.float() for n, t in half.items()}
    assert said(exact, off_by_roundings, **whole) is not None


def test_a_gradient_of_zeros_is_not_taken_for_half_precision() -> None:
    def unused(q, k, v):
        return v.float() + 0 * q

    def used(q, k, v):
        return v.float() + 0 * q + 1e-3 * (q - q.detach())

    inputs = {n: t if n == "q" else t.bfloat16() for n, t in randoms(2, 3, 6, 4, grad=True).items()}
    inputs = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    found = said(unused, used, **inputs)
    assert found is not None and "gradient" in found


@pytest.mark.skipif(not hasattr(torch, "float8_e5m2"), reason="this torch has no numbers of 8 bits")
def test_numbers_of_8_bits_widen_no_budget() -> None:
    inputs = {n: t.round() for n, t in randoms(2, 3, 6, 4).items()}
    inputs["k"] = inputs["k"].to(torch.float8_e5m2)
    assert said(lambda q, k, v: v + 0 * q, lambda q, k, v: v * 1.01 + 0 * q, **inputs) is not None


def test_writes_may_be_made_at_the_end() -> None:
    assert said(written_in_place, written_at_the_end, **randoms(2, 3, 6, 4)) is None


def test_writes_behind_what_autograd_saved() -> None:
    """Only the compiler takes the write at the end out of autograd's sight."""

    def written(q, k, v):
        k *= 0.5
        return attention(q, k, v)

    def at_the_end(q, k, v):
        half = k * 0.5
        k.copy_(half)
        return fused(q, half, v)

    def saved(q, k, v):
        out = fused(q, k * 0.5, v)
        v.mul_(2)
        return out

    def saved_before(q, k, v):
        kept = v * 1
        v.mul_(2)
        return fused(q, k * 0.5, kept)

    q, k, v = randoms(2, 3, 6, 4).values()
    assert said(written, at_the_end, q=q.requires_grad_(), k=k, v=v) is None
    assert said(saved_before, saved, q=q, k=k, v=v) is None


def test_where_there_is_no_number_none_is_asked_for() -> None:
    assert said(with_an_empty_row, with_zeros_in_it, **randoms(2, 3, 6, 4)) is None
    other = said(with_zeros_in_it, with_an_empty_row, **randoms(2, 3, 6, 4))
    assert other is not None and "is nan from float64" in other


# ---- what does not


def wrong_cut(q, k, v):
    """The scale is in the scores and stays on the query."""
    return F.scaled_dot_product_attention(q * 0.5, k, v)


def lost_write(q, k, v):
    return fused(q * 0.5, torch.cat([v[:, :, 2:4], k[:, :, 2:]], 2), v)


def doubled_edit(q, k, v):
    k[:, :, :2] = v[:, :, 2:4]
    q *= 0.5
    return fused(q * 0.5, k, v)


def doubled_write(q, k, v):
    out = written_at_the_end(q, k, v)
    q.mul_(0.5)
    return out


def late_write(q, k, v):
    out = fused(q * 0.5, k, v)
    k[:, :, :2] = v[:, :, 2:4]
    q *= 0.5
    return out


@pytest.mark.parametrize("rewritten", [lost_write, doubled_edit, doubled_write, late_write])
def test_a_write_gone_wrong_is_seen(rewritten) -> None:
    found = said(written_in_place, rewritten, **randoms(2, 3, 6, 4))
    assert found is not None and ("output 0" in found or "afterwards" in found)


def test_a_write_that_the_program_does_not_make_is_seen() -> None:
    def writes(q, k, v):
        out = fused(q, k, v)
        v[0, 0, 0, 0] += 1
        return out

    found = said(attention, writes, **randoms(2, 3, 6, 4))
    assert found is not None and "input 2 afterwards" in found


def test_a_wrong_cut_is_seen() -> None:
    found = said(attention, wrong_cut, **randoms(2, 3, 6, 4))
    assert found is not None and "the rewritten output 0 is" in found and "from float64" in found


def of_the_value_alone(q, k, v):
    return fused(q.detach(), k, v)


def of_too_much(q, k, v):
    return fused(q * 2, k, v)


@pytest.mark.parametrize(
    ("written", "rewritten"), [(attention, of_the_value_alone), (without_gradient, of_too_much)], ids=["lost", "added"]
)
def test_a_wrong_gradient_is_seen(written, rewritten) -> None:
    found = said(written, rewritten, **randoms(2, 3, 6, 4, grad=True))
    assert found is not None and "gradient of input 0" in found
    with torch.no_grad():
        assert said(written, rewritten, **randoms(2, 3, 6, 4, grad=True)) is None


def test_the_gradient_through_a_written_input_is_seen() -> None:
    def written(q, k, v):
        v.add_(q)
        return attention(k, k, k)

    def rewritten(q, k, v):
        v.add_(q.detach() + 0 * q)
        return fused(k, k, k)

    q, k, v = randoms(2, 3, 6, 4).values()
    inputs = {"q": q.requires_grad_(), "k": k, "v": v}
    graphs = []
    for program in (written, rewritten):
        inputs["v"] = v.clone()
        graphs.append(captured(program, **inputs))
    found = disagreement(*graphs, [q, k, v])
    assert found is not None and "gradient of input 0" in found


def test_what_requires_a_gradient_is_seen() -> None:
    def detached(q, k, v):
        return fused(q, k, v).detach()

    found = said(attention, detached, **randoms(2, 3, 6, 4, grad=True))
    assert found is not None and "whether output 0 requires a gradient" in found


def first_keys(q, k, v):
    return attention(q, k, v), k[:, :, :2]


def copied_keys(q, k, v):
    return attention(q, k, v), k[:, :, :2].clone(memory_format=torch.preserve_format)


def two_of_one(q, k, v):
    out = attention(q, k, v)
    return out, out[0]


def two_apart(q, k, v):
    out = attention(q, k, v)
    return out, out[0].clone()


@pytest.mark.parametrize(("written", "rewritten"), [(first_keys, copied_keys), (two_of_one, two_apart)])
def test_memory_that_is_no_longer_shared_is_seen(written, rewritten) -> None:
    inputs = randoms(2, 3, 6, 4)
    # k[:, :, :2] is laid out otherwise when it is copied.
    for one, other in ((written, rewritten), (rewritten, written)):
        found = said(one, other, **inputs)
        assert found is not None and ("shares its memory with" in found or "strides" in found)
        assert said(one, one, **inputs) is None


@pytest.mark.parametrize(
    ("rewritten", "words"),
    [
        (lambda q, k, v: (fused(q, k, v), (q[..., 0] > 0.01).sum(-1), 3, None), "elements of the rewritten output 1"),
        (lambda q, k, v: (fused(q, k, v), (q[..., 0] > 0).sum(-1).int(), 3, None), "the dtype, device and shape"),
        (lambda q, k, v: (fused(q, k, v), (q[..., 0] > 0).sum(-1), 4, None), "output 2 is 4"),
        (lambda q, k, v: (fused(q, k, v), (q[..., 0] > 0).sum(-1), 3), "lacks output 3"),
        (lambda q, k, v: (fused(q, k, v)[:1], (q[..., 0] > 0).sum(-1), 3, None), "the dtype, device and shape"),
    ],
)
def test_outputs_that_are_not_what_they_were(rewritten, words) -> None:
    inputs = randoms(2, 3, 40, 4)
    assert words in str(hand_written(counted, rewritten, inputs))


def hand_written(written: Program, rewritten: Program, inputs: dict[str, Tensor]) -> str | None:
    """Dynamo keeps what is no tensor out of its graphs; other tracers do not."""
    return disagreement(*(torch.fx.symbolic_trace(f) for f in (written, rewritten)), list(inputs.values()))


def test_a_fill_value_hides_nothing() -> None:
    def scores(q, k, v):
        s = (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)
        return s, s.softmax(-1) @ v

    def other(q, k, v):
        s, out = scores(q, k, v)
        return torch.where(s > -1e8, s + 0.1, s), out

    found = said(scores, other, **randoms(2, 3, 6, 4))
    assert found is not None and "the rewritten output 0 is 0.1" in found


def test_infinity_stays_infinity() -> None:
    def scores(q, k, v):
        return (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)

    def other(q, k, v):
        return (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)

    found = said(scores, other, **randoms(2, 3, 6, 4))
    assert found is not None and "is finite where it is not as written" in found
