"""Guard: check at every call what a compiled graph rests on: the contents of buffers, and which kernels may run.

The check compares the identity, version and memory of each buffer: under a microsecond, and no work for the device.
Where one differs, the contents are read again; where the contents differ, the graph runs as written.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from attn_fuse.graph.names import INLINE_SUBGRAPHS, op_name
from attn_fuse.graph.seen import Seen
from attn_fuse.lift.closed_forms import ClosedForm, Diagonals
from attn_fuse.options import chosen_kernels
from attn_fuse.torch_internals import dispatch_modes_aside, sdpa_switches

log = logging.getLogger("attn_fuse")


@dataclass(frozen=True)
class Proof:
    """The fact that graph input number `input` has the contents of `form`. source: Dynamo's name of the input."""

    input: int
    form: ClosedForm | Diagonals
    source: str


def guarded(
    compiled: Callable[..., Any],
    original: GraphModule,
    inputs: Sequence[Any],
    proofs: tuple[Proof, ...],
    for_other_kernels: Callable[..., Any],
    as_written: Callable[..., Any],
) -> Callable[..., Any]:
    """`compiled` while the proofs hold and the same kernels may run, `original` compiled once more otherwise.

    `use_kernels` and torch's switches of SDPA say which kernels may run; Dynamo itself guards torch's other switches.
    inputs: those of the first call. for_other_kernels: the backend where other kernels may run. as_written: the backend
    where a proof no longer holds.
    """
    guard, allowed = Guard(proofs, inputs), (chosen_kernels(), sdpa_switches())

    @functools.cache
    def compiled_for(now_allowed: tuple[Any, ...]) -> Callable[..., Any]:
        return _compiled_anew(original, for_other_kernels)

    @functools.cache
    def compiled_as_written() -> Callable[..., Any]:
        changed = ", ".join(sorted({proof.source for proof in proofs}))
        log.warning("a mask is no longer what it was when the model was compiled (%s): running as written", changed)
        return _compiled_anew(original, as_written)

    def run(*values: Any) -> Any:
        if (now := (chosen_kernels(), sdpa_switches())) != allowed:
            return compiled_for(now)(*values)
        if guard.holds(values):
            return compiled(*values)
        return compiled_as_written()(*values)

    return run


def _compiled_anew(graph: GraphModule, backend: Callable[..., Any]) -> Callable[..., Any]:
    """`graph`, compiled once more when it is called, with guards of its own; uncompiled where it has subgraphs."""
    if any(op_name(node) in INLINE_SUBGRAPHS for node in graph.graph.nodes):
        return graph

    # Dynamo skips a generated forward that is called as such, but traces one that a function calls.
    def again(*values: Any) -> Any:
        return graph.forward(*values)

    # Dynamo reuses code that it compiled for an equal backend, under other kernels; a new function equals no other.
    # Where it knows a backend's name, it drops its own weak references to the inputs.
    def attn_fuse(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = backend(graph, inputs)
        return compiled

    return torch.compile(again, backend=attn_fuse)


def can_be_guarded(tensor: torch.Tensor) -> bool:
    """Whether a later edit of `tensor` can be seen: a tensor made under inference_mode counts no versions."""
    return not tensor.is_inference()


class Guard:
    """Checks, on every call, that the proofs still hold; without work for the device unless a tensor was touched."""

    def __init__(self, proofs: tuple[Proof, ...], inputs: Sequence[Any]) -> None:
        self._proofs = proofs
        self._seen = self._looked_at(inputs)

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether every proof is true of `inputs`, those of this call."""
        for number, seen in self._seen:
            if not seen.is_still(inputs[number]):
                with dispatch_modes_aside():
                    return self._prove_again(inputs)
        return True

    def _prove_again(self, inputs: Sequence[Any]) -> bool:
        for proof in self._proofs:
            tensor = inputs[proof.input]
            if not isinstance(tensor, torch.Tensor) or not can_be_guarded(tensor) or not proof.form.equals(tensor):
                return False
        self._seen = self._looked_at(inputs)
        return True

    def _looked_at(self, inputs: Sequence[Any]) -> list[tuple[int, Seen]]:
        return [(proof.input, Seen.now(inputs[proof.input])) for proof in self._proofs]
