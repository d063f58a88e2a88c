"""Every spelling of attention that we know, by group, and the programs one step away from one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.cpu import test_lookalikes as lookalikes
from tests.cpu import test_relatives as relatives
from tests.models import biases, causal, grouped, masks, plain
from tests.models.biases import BIASES
from tests.models.groups import GROUPS
from tests.models.language import LANGUAGE
from tests.models.masks import MASKS
from tests.models.score_mods import SCORE_MODS
from tests.models.scores import SCORES
from tests.models.softmaxes import SOFTMAXES
from tests.models.spelling import Spelling, function, given, heads, joined, noise, square
from tests.models.surroundings import SURROUNDINGS
from tests.models.trained import TRAINED
from tests.models.vision import VISION

__all__ = ["LOOKALIKES", "SPELLINGS", "Spelling"]

SPELLINGS: tuple[Spelling, ...] = (
    *SCORES, *SOFTMAXES, *BIASES, *MASKS, *SCORE_MODS, *GROUPS, *SURROUNDINGS, *TRAINED, *LANGUAGE, *VISION
)  # fmt: skip


# ---- one step away: left as written, or computed right


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def other_axis_transposed_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).transpose(2, 3).softmax(3).transpose(2, 3) @ v


def over_both_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    return s.flatten(-2).softmax(-1).view_as(s) @ v


def batch_and_heads_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Letters that stand twice are summed over where nothing is said of the result: of b, h and j here."""
    return torch.einsum("bhij,bhjd", (torch.einsum("bhid,bhjd->bhij", [q, k]) * 0.25).softmax(3), v)


def mask_of_other_numbers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """DistilBERT's form with a mask that also has twos: only zeros are hidden."""
    return scores_of(q, k).masked_fill((mask == 0)[:, None, None, :], float("-inf")).softmax(-1) @ v


def whole_number_mask_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores_of(q, k) + mask).softmax(-1) @ v


def mask_with_a_larger_batch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores_of(q, k) + mask).softmax(-1) @ v


def number_added(q: Tensor, k: Tensor, v: Tensor, number: Tensor) -> Tensor:
    return (scores_of(q, k) + number).softmax(-1) @ v


def noise_added(q: Tensor, k: Tensor, v: Tensor, sample: Tensor) -> Tensor:
    return (scores_of(q, k) + 0.1 * sample.detach()).softmax(-1) @ v


def scores_edited_and_used(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    view = s[..., :1]
    p = s.softmax(-1)
    s.mul_(2)
    return p @ v, view


def filled_beside_what_is_not_read(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The fill is a statement, and the bias comes out of an operation that few know."""
    s = scores_of(q, k) + torch.special.sinc(bias).isinf()
    s.masked_fill_(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), float("-inf"))
    return s.softmax(-1) @ v


def mask_edited_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    mask[:, :2] = -1e9
    return (scores_of(q, k) + mask).softmax(-1) @ v


def mask_edited_after_use(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    s = scores_of(q, k) + mask
    mask[:, :2] = -1e9
    return s.softmax(-1) @ v + mask.amax(-1).unsqueeze(-1)


def view_of_scores_edited(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    diagonal = s.diagonal(dim1=-2, dim2=-1)
    diagonal.fill_(float("-inf"))
    return s.softmax(-1) @ v


def weights_with_a_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores_of(q, k).softmax(-1)
    return torch.where(p > 0.1, p, 0.0) @ v


def top_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    least = s.topk(3, dim=-1).values[..., -1:]
    return s.masked_fill(s < least, float("-inf")).softmax(-1) @ v


def kernel_trick(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    return (q @ (k.mT @ v)) / (q @ k.sum(-2).unsqueeze(-1))


def divided_by_other_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slot attention's second step: normalised over queries, then over keys."""
    p = scores_of(q, k).softmax(-2) + 1e-8
    return (p / p.sum(-1, keepdim=True)) @ v


def sum_over_wrong_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


def sum_without_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp()
    return (e / e[..., :-1].sum(-1, keepdim=True)) @ v


def twice_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).softmax(-1).softmax(-1) @ v


def sink_kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first column of the weights is dropped, though the sink is the last."""
    s = torch.nn.functional.pad(scores_of(q, k), (0, 1), value=0.3)
    return s.softmax(-1)[..., 1:] @ v


def other_cap_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (3.0 * torch.tanh(scores_of(q, k) / 2.0)).softmax(-1) @ v


_G = "look-alikes"
_S = lookalikes.S
_KNOWN = dict.fromkeys((*(written for written, _ in lookalikes.REFUSED), *relatives.RIGHT))
# One is called with other shapes below, the other is two attentions and among the spellings.
_ELSEWHERE = (relatives.product_without_transpose, relatives.differential)
_NEW = (
    other_axis_transposed_back, over_both_axes, batch_and_heads_summed, scores_edited_and_used, weights_with_a_zero,
    top_scores, kernel_trick, sum_over_wrong_axis, sum_without_last, twice_softmax,
    sink_kept, other_cap_outside, divided_by_other_sum,
)  # fmt: skip
_EMPTY = given(lambda: (torch.arange(11) >= torch.tensor([[3], [11]])).long())
_WRONG_GROUPS = (grouped.wrong_order, grouped.key_and_value_in_different_orders)

LOOKALIKES: tuple[Spelling, ...] = (
    *(function(_G, f, square(_S)) for f in _KNOWN if f not in _ELSEWHERE),
    *(function(_G, f, heads()) for f in (plain.zero, plain.negative, *_NEW)),
    function(_G, lookalikes.other_axis, square(4, batch=4, heads=4, head_dim=4), "other_axis_equal_sizes"),
    function(_G, relatives.product_without_transpose, square(16)),
    function(_G, relatives.swapped_key, square(4, batch=1, heads=4, head_dim=4)),
    *(function(_G, f, heads(heads=6, kv_heads=2)) for f in _WRONG_GROUPS),
    function(_G, grouped.repeated_along_the_length, heads(heads=6, kv_heads=2, kv_len=16)),
    function(_G, mask_of_other_numbers, joined(heads(), given(lambda: torch.arange(22).view(2, 11) % 3))),
    function(_G, whole_number_mask_added, joined(heads(), given(lambda: torch.arange(11) % 3))),
    function(_G, mask_with_a_larger_batch, joined(heads(batch=1), noise((2, 1, 7, 11)))),
    *(function(_G, f, heads()) for f in (mask_edited_in_place, mask_edited_after_use, view_of_scores_edited)),
    function(_G, filled_beside_what_is_not_read, joined(square(), noise((7, 7)))),
    function(_G, causal.tril_filled, heads(), "triangle_of_another_shape"),
    function(_G, masks.gpt2_and_padding, joined(square(11), _EMPTY), "gpt2_row_that_sees_nothing"),
    function(_G, biases.ten_thousand_off, joined(heads(), _EMPTY), "ten_thousand_off_everything"),
    function(_G, number_added, joined(heads(), noise(()))),
    function(_G, noise_added, joined(heads(), noise((2, 3, 7, 11)))),
)
