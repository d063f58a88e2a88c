"""An H200 as far as the picker asks for one, on a machine without: what it picks there for a program.

It is the device of `explain --on h200`, under torch 2.11's limit of FlexAttention. A program is captured and recognised
as ever, on the CPU; what the picker is then told of the device is replaced, and nothing is compiled or run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse import backend
from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.kernels.elsewhere import Elsewhere, on
from attn_fuse.kernels.flex import kernel as flex
from attn_fuse.picker import evidence
from attn_fuse.picker import pick as picker
from attn_fuse.picker.case import Case, case_of
from attn_fuse.picker.pick import Choice

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Picked:
    """What became of one attention."""

    attention: Attention
    facts: Facts
    choice: Choice

    @property
    def kernel(self) -> str | None:
        return self.choice.kernel.name if self.choice.kernel is not None else None

    @property
    def case(self) -> Case:
        return case_of(self.attention, self.facts)

    def __str__(self) -> str:
        reasons = [f"  not {name}: {'; '.join(said)}" for name, said in self.choice.why_not.items()]
        return "\n".join([f"{self.kernel} ({self.choice.because}) for {self.case}", *reasons])


class _Captured(Exception):
    """Raised in place of running a graph that was looked at."""


@contextlib.contextmanager
def h200() -> Iterator[Callable[..., list[Picked]]]:
    """Within it, a function that gives what is picked for each attention of `program(*inputs)`.

    Its keywords: training, else without gradients; self_check, as `picker.pick` takes it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "flex_differentiates_what_it_reads", lambda: False)
        shipped = tuple(map(evidence.read_table, sorted(Path(evidence.__file__).parent.glob("evidence_cuda_*.json"))))
        patch.setattr(evidence, "tables", lambda: shipped)
        (gpu,) = evidence.gpus()
        yield functools.partial(_picked, patch, gpu)


def _picked(
    patch: pytest.MonkeyPatch,
    gpu: Elsewhere,
    program: Callable[..., Any],
    *inputs: Any,
    training: bool = False,
    self_check: Any = None,
) -> list[Picked]:
    found: list[Picked] = []

    def pick(attention: Attention, facts: Facts, *_: Any, **__: Any) -> Choice:
        there = dataclasses.replace(facts, device=CUDA)
        found.append(Picked(attention, there, picker.pick(attention, there, self_check=self_check)))
        return Choice(None, {}, "only looked at")

    def looked_at(graph: torch.fx.GraphModule, values: Any) -> Any:
        backend.analyze_only(graph, values)
        raise _Captured

    patch.setattr(backend, "pick", pick)
    torch._dynamo.reset()
    with torch.set_grad_enabled(training), contextlib.suppress(_Captured), _unwrapped(), on(gpu):
        torch.compile(program, backend=looked_at)(*inputs)
    return found


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as problem:
        raise problem.inner_exception from None


def dynamic(tensor: Tensor, *dims: int) -> Tensor:
    """`tensor`, with sizes that may change from call to call in `dims`."""
    for dim in dims:
        torch._dynamo.mark_dynamic(tensor, dim)
    return tensor
