"""A graph without attention costs one look; whatever may be attention is looked into, as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_fuse.backend import Attempt
from attn_fuse.report import collecting
from tests.harness import every_day
from tests.own_functions import OWN, OwnSoftmax, OwnSwish, doubled


def shifted(s: Tensor) -> Tensor:
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


X = torch.randn(2, 6, 16)
MHA = nn.MultiheadAttention(16, 4, batch_first=True)
LAYER = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)
LOOKED_INTO: dict[str, Callable[[Tensor], Any]] = {
    "a method": lambda x: (x @ x.mT).softmax(-1) @ x,
    "a function": lambda x: F.softmax(x @ x.mT, -1) @ x,
    "an operator": lambda x: torch.ops.aten._softmax(x @ x.mT, -1, False) @ x,
    "a logarithm": lambda x: F.log_softmax(x @ x.mT, -1).exp() @ x,
    "exponentials": lambda x: shifted(x @ x.mT) @ x,
    "powers": lambda x: 2 ** (x @ x.mT) @ x,
    "powers beside other powers": lambda x: (2 ** (x @ x.mT)) ** 2 @ x,
    "torch.pow": lambda x: torch.pow(torch.pow(x, 2), 2) + torch.pow(2.0, x),
    "a module": nn.Softmax(-1),
    "MultiheadAttention": lambda x: MHA(x, x, x)[0],
    "torch's layer in inference": LAYER.eval(),
    "a vmap": torch.vmap(lambda x: (x @ x.mT).softmax(-1) @ x),
    "SDPA": lambda x: F.scaled_dot_product_attention(x, x, x),
    "a checkpoint": lambda x: checkpoint(lambda x: (x @ x.mT).softmax(-1) @ x, x, use_reentrant=False),
    "an autograd.Function": lambda x: OwnSoftmax.apply(x @ x.mT, 0.25) @ x,
    "an operator of one's own": lambda x: OWN.softmax(x @ x.mT) @ x,
    "a function in the graph": lambda x: doubled(x),
}
NOT_LOOKED_INTO: dict[str, Callable[[Tensor], Any]] = {
    "layers": nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 16)),
    "powers of tensors": lambda x: torch.pow(x, 2) + x**3,
    "a checkpoint": lambda x: checkpoint(lambda x: F.silu(x @ x.mT) @ x, x, use_reentrant=False),
    "an autograd.Function": lambda x: OwnSwish.apply(x @ x.mT) @ x,
}


NAMES = [*LOOKED_INTO, *(f"no {name}" for name in NOT_LOOKED_INTO)]


@pytest.mark.parametrize("name", every_day(NAMES, *NAMES[::3]))
def test_what_may_hold_attention_is_looked_into(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten, looked = Attempt.rewritten, []

    def noting(self: Attempt, *args: Any) -> Any:
        looked.append(True)
        return rewritten(self, *args)

    monkeypatch.setattr(Attempt, "rewritten", noting)
    free = name.startswith("no ")
    program = NOT_LOOKED_INTO[name.removeprefix("no ")] if free else LOOKED_INTO[name]
    gradient = "inference" not in name and "operator of" not in name
    torch._dynamo.reset()
    with torch.set_grad_enabled(gradient), collecting() as reports:
        torch.compile(program, backend="attn_fuse", options={"inner_backend": "eager"})(X.clone().requires_grad_())
    assert reports and bool(looked) is not free
    assert not free or not any(report.before or report.after for report in reports)
