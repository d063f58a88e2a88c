"""Attentions of which a call hides a part are reported at that call and fail `strict`; look-alikes are not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_fuse.errors import NotFusedError
from attn_fuse.report import SiteReport, collecting
from tests.harness import every_day, tensors
from tests.own_functions import OWN, OwnSoftmax, OwnSoftplus, OwnSwish


def hook_on_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT / 4).softmax(-1)
    weights.register_hook(lambda grad: grad.clamp(-1, 1))  # here
    return weights @ v


def hook_on_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 4
    scores.register_hook(lambda grad: grad * 2)  # here
    return F.dropout(scores.softmax(-1), 0.1) @ v


def own_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return OwnSoftmax.apply(q @ k.mT, 0.25) @ v  # type: ignore[no-any-return]  # here


def own_swish_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return OwnSwish.apply(q @ k.mT).softmax(-1) @ v  # type: ignore[no-any-return]  # here


def operator_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return OWN.softmax(torch.einsum("bhid,bhjd->bhij", q, k)) @ v  # here


def operator_on_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    weights = OWN.gelu(weights)  # here
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def checkpointed_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(lambda s: s.softmax(-1), q @ k.mT, use_reentrant=False) @ v  # here


def checkpointed_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = checkpoint(lambda q, k: q @ k.mT / 4, q, k, use_reentrant=False)  # here
    return scores.softmax(-1) @ v  # type: ignore[no-any-return]


class OwnAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad, grad


def own_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return OwnAttention.apply(q, k, v)  # type: ignore[no-any-return]  # here


HIDDEN = {
    own_attention: "an autograd.Function, whose backward is its own",
    hook_on_weights: "a hook watches the gradient of its scores or weights",
    hook_on_scores: "a hook watches the gradient of its scores or weights",
    own_softmax: "an autograd.Function, whose backward is its own",
    own_swish_of_scores: "autograd",
    operator_softmax: "the scores pass through attn_fuse_hidden::softmax",
    operator_on_weights: "the scores pass through attn_fuse_hidden::gelu",
    checkpointed_softmax: "a checkpoint holds a part of the attention",
    checkpointed_scores: "checkpoint",
}


def sites_of(model: Callable[..., Any], *inputs: Any, **options: Any) -> list[SiteReport]:
    torch._dynamo.reset()
    options = {"inner_backend": "eager", "pick": "fused", **options}
    with collecting() as reports:
        torch.compile(model, backend="attn_fuse", options=options)(*inputs)
    return [site for report in reports for site in report.sites]


@pytest.mark.parametrize(
    "attention",
    every_day(HIDDEN, hook_on_scores, own_softmax, operator_on_weights, checkpointed_scores),
    ids=lambda f: f.__name__,
)
def test_it_is_reported_at_the_call_and_fails_strict(attention: Callable[..., Tensor]) -> None:
    inputs = [t.requires_grad_("operator" not in attention.__name__) for t in tensors(2, 3, 9, 16)]
    (site,) = sites_of(attention, *inputs)
    assert site.status == "refused" and site.blocker is not None and site.blocker.location is not None
    assert HIDDEN[attention] in site.blocker.reason
    lines, first = inspect.getsourcelines(attention)
    assert lines[site.blocker.location.line - first].rstrip().endswith("# here")
    with pytest.raises(NotFusedError, match="1 of 1 attentions not fused"):
        sites_of(attention, *inputs, strict=True)


class Layers(nn.Module):
    """Two layers with something of the model's own between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(16, 16), nn.Linear(16, 16), between
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.between(self.first(x)))
        return self.between(x @ self.weight.T) @ (self.weight * 2)


class OwnProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(OWN.mm(x, self.first))).softmax(-1)


class Gated(nn.Module):
    """The softmax is the last of it: nothing multiplies it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return OWN.norm(self.first(x)).softmax(-1)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ OWN.norm(k.mT @ v)


def swish_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return OwnSwish.apply(q @ k.mT) @ v  # type: ignore[no-any-return]


LOOK_ALIKES = {
    "swish": Layers(OwnSwish.apply),
    "softplus": Layers(OwnSoftplus.apply),
    "gelu": Layers(OWN.gelu),
    "norm": Layers(OWN.norm),
    "products": OwnProducts(),
    "gate": Gated(),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
@pytest.mark.parametrize("training", [True, False])
def test_layers_with_an_operation_of_ones_own_between_are_none(name: str, training: bool) -> None:
    training = training and name in ("swish", "softplus")  # the operators have no backward
    with torch.set_grad_enabled(training):
        assert not sites_of(LOOK_ALIKES[name], torch.randn(2, 9, 16), strict=True)


@pytest.mark.parametrize("program", [linear_attention, swish_of_scores], ids=lambda f: f.__name__)
def test_products_without_a_softmax_are_none(program: Callable[..., Tensor]) -> None:
    inputs = [t.requires_grad_(program is swish_of_scores) for t in tensors(2, 3, 9, 16)]
    assert not sites_of(program, *inputs, strict=True)


def test_a_whole_attention_in_a_checkpoint_is_fused() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, mask = F.linear(q, torch.ones(16, 16)), k[..., 0].unsqueeze(-2) * 2
        attend = lambda q, k, v, mask: (q @ k.mT + mask).softmax(-1) @ v  # noqa: E731
        return checkpoint(attend, q, k, v, mask, use_reentrant=False) @ v.mT

    (site,) = sites_of(program, *[t.requires_grad_() for t in tensors(2, 3, 9, 16)], strict=True)
    assert site.fused
