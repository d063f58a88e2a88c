"""Models for the watch over a program, and what the process must be like after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer

from attn_fuse import report
from attn_fuse.run.steps import Steps
from attn_fuse.run.watch import Watch
from attn_fuse.torch_internals import inductor_door

WIDTH, LENGTH = 16, 24
# The code of each graph that ran as compiled.
RUNS: list[str] = []


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.p = nn.Linear(WIDTH, 3 * WIDTH), p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / 4, -1)
        return x + nn.functional.dropout(weights, self.p, self.training) @ v


class Causal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return (x @ x.mT).masked_fill(hidden, float("-inf")).softmax(-1) @ x


class Model(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(p) for _ in range(2))
        self.norm = nn.BatchNorm1d(LENGTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.norm(x + 0.1 * torch.randn_like(x))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.layer(x), -1)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class Holder(nn.Module):
    """Holds a part that its author has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = torch.compile(Block()), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.other(x)


class Looping(nn.Module):
    """One that Dynamo leaves as written."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x)
            print(end="")
            torch._dynamo.graph_break()
        return x


def inputs() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH)


def installed() -> dict[str, Any]:
    """What of torch and of attn_fuse a watch could leave changed for all that follows in the process."""
    modules: Any = torch.nn.modules.module
    return {
        "modules' calls": vars(nn.Module)["_compiled_call_impl"],
        "modules' hooks": {n: len(v) for n, v in vars(modules).items() if n.startswith("_global_") and v},
        "optimizers' hooks": [*optimizer._global_optimizer_post_hooks],
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "dispatch modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "torch.compile": (torch.compile, torch._TorchCompileInductorWrapper.__init__.__qualname__, inductor_door()),
        "Dynamo": (torch._dynamo.config.suppress_errors, torch._functorch.config.force_non_lazy_backward_lowering),
        "listeners": [*report._listeners],
        "grad mode": torch.is_grad_enabled(),
    }


@contextlib.contextmanager
def watching(steps: int | None = None, only_compiled: bool = False, pick: str = "fused") -> Iterator[Watch]:
    watch = Watch(None if steps is None else Steps(steps), only_compiled, {"pick": pick})
    watch.begin()
    try:
        yield watch
    finally:
        watch.end()


def outcome(watch: Watch) -> list[tuple[str, int, tuple[str, ...]]]:
    """Of each explanation the module, the number of attentions fused, and the lines under it."""
    return [(one.subject.partition("(")[0], one.fused, one.said) for one in watch.explanations]
