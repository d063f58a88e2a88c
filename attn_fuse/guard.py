"""Guard: check on every call that proved buffers are unchanged and the same kernels may run.

The check compares the identity, version and memory of each buffer, in under a microsecond and without the device. If
one differs, its contents are read again; if the contents differ, the graph runs as written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from attn_fuse.graph.names import INLINE_SUBGRAPHS, op_name
from attn_fuse.lift.closed_forms import ClosedForm, Diagonals, closed_form
from attn_fuse.options import chosen_kernels
from attn_fuse.report import log
from attn_fuse.torch_internals import StorageWeakRef, dispatch_modes_aside, sdpa_switches


@dataclass(frozen=True)
class Proof:
    """Proof that graph input number `input` has the contents of `form`. source: Dynamo's name of the input."""

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
    """`compiled` while the proofs hold and the same kernels may run, else `original` compiled again.

    `use_kernels` and torch's switches of SDPA decide which kernels may run; Dynamo guards torch's other switches.
    inputs: those of the first call. for_other_kernels: the backend once other kernels may run. as_written: the backend
    once a proof no longer holds.
    """
    guard, allowed = Guard(proofs, inputs), (chosen_kernels(), sdpa_switches())

    @functools.cache
    def compiled_for(now_allowed: tuple[Any, ...]) -> Callable[..., Any]:
        return _compiled_anew(original, for_other_kernels)

    @functools.cache
    def compiled_as_written() -> Callable[..., Any]:
        changed = ", ".join(sorted({proof.source for proof in proofs}))
        log.warning("a mask has changed since the model was compiled (%s): running as written", changed)
        return _compiled_anew(original, as_written)

    def run(*values: Any) -> Any:
        if (now := (chosen_kernels(), sdpa_switches())) != allowed:
            return compiled_for(now)(*values)
        if guard.holds(values):
            return compiled(*values)
        return compiled_as_written()(*values)

    return run


def _compiled_anew(graph: GraphModule, backend: Callable[..., Any]) -> Callable[..., Any]:
    """`graph`, compiled by `backend` at its first call, with its own guards; uncompiled if it has subgraphs."""
    if any(op_name(node) in INLINE_SUBGRAPHS for node in graph.graph.nodes):
        return graph

    # Dynamo skips a generated forward, but traces it inside a function.
    def again(*values: Any) -> Any:
        return graph.forward(*values)

    # A new function, because Dynamo reuses code compiled for an equal backend, even under other kernels. Its name is
    # one that Dynamo knows, and for which it drops its weak references to the inputs.
    def attn_fuse(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = backend(graph, inputs)
        return compiled

    return torch.compile(again, backend=attn_fuse)


@dataclass(frozen=True, slots=True)
class Seen:
    """The identity and version of a plain tensor, to know it again with unchanged contents.

    There is no reference to the tensor. A strong one would keep its memory. A weak one makes `torch.utils.swap_tensors`
    fail, which swaps weights of subclasses when a module is moved.

    attributes: its attribute dictionary, unique to it, which `swap_tensors` moves with the contents.
    version: the number of writes into the tensor and its views.
    memory: its storage. While this is held, no other storage gets its id, though one may get its address.
    """

    attributes: dict[str, Any] = field(repr=False)
    version: int
    address: int
    memory: StorageWeakRef

    @classmethod
    def now(cls, tensor: torch.Tensor) -> Seen:
        """`tensor` in its current version."""
        memory = StorageWeakRef(tensor.untyped_storage())
        return cls(tensor.__dict__, tensor._version, tensor.data_ptr(), memory)

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is this one, without a counted write since."""
        return (
            tensor.__dict__ is self.attributes
            and tensor._version == self.version
            and tensor.data_ptr() == self.address
            and tensor.untyped_storage()._cdata == self.memory.cdata
        )


class Guard:
    """Checks on every call that the proofs hold, without the device unless a tensor was touched."""

    def __init__(self, proofs: tuple[Proof, ...], inputs: Sequence[Any]) -> None:
        self._proofs = proofs
        self._seen = self._looked_at(inputs)

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether every proof holds for the `inputs` of this call."""
        for number, seen in self._seen:
            if not seen.is_still(inputs[number]):
                with dispatch_modes_aside():
                    return self._prove_again(inputs)
        return True

    def _prove_again(self, inputs: Sequence[Any]) -> bool:
        for proof in self._proofs:
            tensor = inputs[proof.input]
            if not isinstance(tensor, torch.Tensor) or tensor.is_inference() or closed_form(tensor) != proof.form:
                return False
        self._seen = self._looked_at(inputs)
        return True

    def _looked_at(self, inputs: Sequence[Any]) -> list[tuple[int, Seen]]:
        return [(proof.input, Seen.now(inputs[proof.input])) for proof in self._proofs]
