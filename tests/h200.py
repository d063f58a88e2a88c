"""An H200 as far as the picker asks for one, on a machine without: what it picks there for a program.

Emulated are the device's properties, torch's own rules for its fused kernels (aten/native/transformers/cuda/
sdp_utils.cpp of torch 2.11, with cuDNN 9.19), and that version's limit of FlexAttention. A program is captured and
recognised as ever, on the CPU; what the picker is then told of the device is replaced, and nothing is compiled or run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse import backend
from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.kernels import sdpa
from attn_fuse.kernels.flex import kernel as flex
from attn_fuse.picker import evidence
from attn_fuse.picker import pick as picker
from attn_fuse.picker.case import Case, case_of
from attn_fuse.picker.pick import Choice

CUDA = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, clock_rate=1_980_000, memory_clock_rate=3_201_000,
    memory_bus_width=6144, L2_cache_size=60 << 20, total_memory=150 * 10**9,
)  # fmt: skip


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
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: PROPERTIES)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (PROPERTIES.major, PROPERTIES.minor))
        patch.setattr(torch.cuda, "get_device_name", lambda *_: PROPERTIES.name)
        patch.setattr(flex, "flex_differentiates_what_it_reads", lambda: False)
        shipped = tuple(map(evidence.read_table, sorted(Path(evidence.__file__).parent.glob("evidence_cuda_*.json"))))
        patch.setattr(evidence, "tables", lambda: shipped)
        rules = ((sdpa.CUDNN, _cudnn), (sdpa.CUDA_FLASH, _flash), (sdpa.CUDA_EFFICIENT, _efficient))
        before = {kernel.name: kernel.limits for kernel, _ in rules}
        for kernel, rule in rules:
            asked: Any = kernel.limits
            object.__setattr__(kernel, "limits", functools.partial(asked.func, rule, *asked.args[1:]))
        try:
            yield functools.partial(_picked, patch)
        finally:
            for kernel, _ in rules:
                object.__setattr__(kernel, "limits", before[kernel.name])


def _picked(
    patch: pytest.MonkeyPatch,
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
    with torch.set_grad_enabled(training), contextlib.suppress(_Captured), _unwrapped():
        torch.compile(program, backend=looked_at)(*inputs)
    return found


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as problem:
        raise problem.inner_exception from None


# ---- torch's rules: (torch.backends.cuda.SDPAParams, debug) -> whether the kernel takes it


def _cudnn(asked: Any, debug: bool) -> bool:
    query, key, value, mask = asked.query, asked.key, asked.value, asked.attn_mask
    widths = (query.shape[-1], value.shape[-1])
    return (
        (mask is None or not mask.requires_grad)
        and max(widths) <= 256  # on sm_90, from cuDNN 9.10
        and not any(width % 8 for width in widths)
        and key.shape[2] != 1
        and not (asked.dropout and query.shape[2] == 1)
        and (16 * asked.dropout).is_integer()  # pytorch#174245
    )


def _flash(asked: Any, debug: bool) -> bool:
    query, key, value = asked.query, asked.key, asked.value
    return (
        asked.attn_mask is None
        and query.shape[-1] == value.shape[-1] <= 256
        and (not asked.is_causal or query.shape[2] == key.shape[2])
    )


def _efficient(asked: Any, debug: bool) -> bool:
    query, value = asked.query, asked.value
    least = 4 if query.dtype == torch.float32 else 8
    return not query.shape[-1] % least and not value.shape[-1] % least


def dynamic(tensor: Tensor, *dims: int) -> Tensor:
    """`tensor`, with sizes that may change from call to call in `dims`."""
    for dim in dims:
        torch._dynamo.mark_dynamic(tensor, dim)
    return tensor
