"""Guard: what a compiled graph rests on, checked at every call: the contents of buffers, and which kernels may run.

The check compares the identity and the version of each buffer: nanoseconds, and no work for the device. Where they
differ, the contents are read again; where these differ, the graph runs as written.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from attn_fuse.graph.names import INLINE_SUBGRAPHS, op_name
from attn_fuse.lift.closed_forms import ClosedForm, Diagonals
from attn_fuse.options import chosen_kernels
from attn_fuse.torch_internals import sdpa_switches

log = logging.getLogger("attn_fuse")


@dataclass(frozen=True)
class Proof:
    """That graph input number `input` holds the contents that `form` says. source: Dynamo's name of the input."""

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
    """`compiled` while what it rests on holds: the buffers' contents, and the kernels that may run.

    Which may run is for `use_kernels` to say, and for torch's switches of SDPA; its others Dynamo guards by itself.
    for_other_kernels, as_written: backends that `original` is compiled with once more where other kernels may run, and
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
    """`graph` captured and compiled once more, when it is called, with guards of its own."""
    if any(op_name(node) in INLINE_SUBGRAPHS for node in graph.graph.nodes):
        return graph

    # Dynamo passes over a generated forward that is called as such, but looks into one that a function calls.
    def again(*values: Any) -> Any:
        return graph.forward(*values)

    # Dynamo takes what it compiled for an equal backend, under other kernels; a new partial equals none.
    return torch.compile(again, backend=functools.partial(backend))


def can_be_guarded(tensor: torch.Tensor) -> bool:
    """Whether a later edit of `tensor` can be seen: a tensor made under inference_mode counts no versions."""
    return not tensor.is_inference()


class Guard:
    """Checks, on every call, that the proofs still hold. No device work unless a tensor was touched."""

    def __init__(self, proofs: tuple[Proof, ...], inputs: Sequence[object]) -> None:
        self._proofs = proofs
        self._seen: list[tuple[int, Callable[[], Any], int, int, torch.UntypedStorage]] = []
        for proof in proofs:
            self._remember(proof, inputs[proof.input])

    def holds(self, inputs: Sequence[object]) -> bool:
        """Whether every proof is true of these inputs."""
        for number, tensor_of, version, pointer, _ in self._seen:
            tensor: Any = inputs[number]
            if tensor is not tensor_of() or tensor._version != version or tensor.data_ptr() != pointer:
                return self._prove_again(inputs)
        return True

    def _prove_again(self, inputs: Sequence[object]) -> bool:
        for proof in self._proofs:
            tensor = inputs[proof.input]
            if not isinstance(tensor, torch.Tensor) or not can_be_guarded(tensor) or not proof.form.equals(tensor):
                return False
        self._seen.clear()
        for proof in self._proofs:
            self._remember(proof, inputs[proof.input])
        return True

    def _remember(self, proof: Proof, tensor: object) -> None:
        assert isinstance(tensor, torch.Tensor)
        # Holding the storage keeps its address from being given to other contents.
        seen = (weakref.ref(tensor), tensor._version, tensor.data_ptr(), tensor.untyped_storage())
        self._seen.append((proof.input, *seen))
