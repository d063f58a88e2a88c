"""Ways to run a model: eager, under Inductor, and under attn_fuse with each kernel and each of SDPA's backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_fuse.backend import attn_fuse
from attn_fuse.explain import compiled_apart
from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.sdpa import CPU_FLASH, CUDA_EFFICIENT, CUDA_FLASH, CUDNN, PINNED
from attn_fuse.torch_internals import compile_with, without_inductor_attention

EAGER, INDUCTOR, PICKED, FUSED = "eager", "Inductor", "attn_fuse", 'pick="fused"'
# The kernels that call SDPA on CUDA, by the backend that each calls, and the backends in words.
SDPA_KERNELS = {
    SDPBackend.CUDNN_ATTENTION: CUDNN.name,
    SDPBackend.FLASH_ATTENTION: CUDA_FLASH.name,
    SDPBackend.EFFICIENT_ATTENTION: CUDA_EFFICIENT.name,
}
_IN_WORDS = dict(zip(SDPA_KERNELS, ("cuDNN", "flash", "efficient"), strict=True))


@dataclass(frozen=True)
class Way:
    """One way to run a model. options: those of attn_fuse; None for a way without it.

    held_to: the backend for every call of SDPA, the program's own calls included; None for torch's choice.
    """

    name: str
    options: Mapping[str, Any] | None = field(default=None, hash=False)
    held_to: SDPBackend | None = None

    def compiled(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """`model` in this way, compiled when it is first called."""
        if self.name == EAGER:
            return model
        if self.options is None:
            return compiled_apart(model, "inductor")
        inner = {} if self.held_to is None else {"inner_backend": Held(self.held_to)}
        return compiled_apart(model, attn_fuse, options={**self.options, **inner})


def ways_on(device: torch.device, kernels: Sequence[str]) -> list[Way]:
    """The ways to run a model on `device`, with only these `kernels` forced."""
    return [Way(EAGER), Way(INDUCTOR), Way(PICKED, {}), Way(FUSED, {"pick": "fused"}), *forced(device, kernels)]


def forced(device: torch.device, kernels: Sequence[str]) -> list[Way]:
    """The ways that force a kernel: each of `kernels`, and torch's math if one of them is a call of SDPA."""
    backends = {name: backend for backend, name in sdpa_kernels(device).items()}
    ways = []
    for kernel in KERNELS:
        if kernel.name in kernels and device.type in kernel.devices:
            backend = backends.get(kernel.name)
            name = kernel.name if backend is None else f"{kernel.name} (SDPA {_IN_WORDS[backend]})"
            ways.append(Way(name, {"pick": "fused", "kernels": [kernel.name]}, backend))
    if calls := [name for name in backends if name in kernels]:
        ways.append(Way("SDPA math", {"pick": "fused", "kernels": calls}, SDPBackend.MATH))
    return ways


def sdpa_kernels(device: torch.device) -> dict[SDPBackend, str]:
    """The kernels that call SDPA on `device`, by the backend that each calls."""
    return {SDPBackend.FLASH_ATTENTION: CPU_FLASH.name} if device.type == "cpu" else SDPA_KERNELS


@dataclass(frozen=True)
class Held:
    """Inductor, with every call of SDPA in the graph held to one backend: an inner backend for attn_fuse.

    attn_fuse has proved that the call computes the attention, and all backends compute the same. So torch's formula,
    the backend MATH, can be measured on the very calls that a fused kernel takes.
    """

    backend: SDPBackend

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        calls = {F.scaled_dot_product_attention, *PINNED.values()}
        for module in graph.modules():
            if not isinstance(module, GraphModule):
                continue
            for node in module.graph.nodes:
                if node.op == "call_function" and node.target in calls:
                    node.target = math_attention if self.backend == SDPBackend.MATH else PINNED[self.backend]
            module.recompile()
        # Otherwise Inductor would find torch's formula and put it on a fused kernel again.
        with without_inductor_attention(None):
            return compile_with("inductor", None, graph, inputs)


def math_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`F.scaled_dot_product_attention` on torch's formula; at the top of a module, like the functions of PINNED."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)
