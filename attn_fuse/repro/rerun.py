"""Rerun: what the script of a failure calls: the site as written held against the site under attn_fuse."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from attn_fuse.emit.check import difference
from attn_fuse.errors import named
from attn_fuse.graph.replay import Played, gradients_of
from attn_fuse.graph.scopes import copied
from attn_fuse.report import GRAPH_FAILED, GraphReport, collecting


def like(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    low: int = 0,
    high: int = 0,
    true: float = 0.8,
) -> Tensor:
    """A tensor of random numbers with the given size and stride.

    mean, std: of floating-point numbers, which are normal. low, high: the min and max of integers. true: the share of
    what is True.
    """
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    if dtype == torch.bool:
        whole.bernoulli_(true)
    elif dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        whole.copy_(torch.randn(whole.shape, dtype=wide, device=device) * std + mean)
    else:
        whole.random_(low, high + 1)
    return tensor


def main(
    site: nn.Module,
    inputs: Sequence[Any],
    backend: Callable[..., Callable[..., Any]],
    options: Mapping[str, Any],
    *,
    grad: bool,
    dynamic: bool = False,
    autocast: Mapping[str, torch.dtype] | None = None,
) -> int:
    """Print what fails for `site` under `backend` and give 1, or 0 where nothing does.

    inputs: what `site` is called with. grad, autocast: the modes that it runs in. dynamic: whether its sizes are
    symbols.
    """
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def spied(graph: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        graphs.append((copied(graph), list(given)))
        return backend(graph, given, options={**options, "check": True})

    with torch.set_grad_enabled(grad), contextlib.ExitStack() as casts, collecting() as reports:
        for device, dtype in (autocast or {}).items():
            casts.enter_context(torch.autocast(device, dtype))
        try:
            outputs = pytree.tree_leaves(torch.compile(site, backend=spied, dynamic=dynamic)(*inputs))
            found = {f"output {n}": out.detach() for n, out in enumerate(outputs) if isinstance(out, Tensor)}
            problem = None
            # The check within attn_fuse leaves dropout out, and what is compiled cannot.
            if len(graphs) == 1 and not _draws(site, inputs):
                graph, given = graphs[0]
                named_inputs = {f"input {n}": x for n, x in enumerate(given) if isinstance(x, Tensor)}
                wanted = {name: x for name, x in named_inputs.items() if grad and x.requires_grad}
                played = Played(found, {}, gradients_of(outputs, wanted), {})
                problem = difference(graph, played, given, numbers=True)
        except Exception as error:
            traceback.print_exc()
            problem = f"running it under attn_fuse failed: {named(error)}"
    print(*reports, sep="\n")
    problem = _said(reports) or problem
    print(problem or "nothing failed, and both compute the same")
    return int(problem is not None)


def _said(reports: Sequence[GraphReport]) -> str | None:
    """The first failure that the reports name, None without one."""
    failed = [failure.what for report in reports for found in report.sites for failure in found.failures]
    failed += [note for report in reports for note in report.notes if note.startswith(GRAPH_FAILED)]
    return failed[0] if failed else None


def _draws(site: nn.Module, inputs: Sequence[Any]) -> bool:
    """Whether two runs as written differ, since the program draws random numbers."""
    with torch.no_grad():
        first, second = (pytree.tree_leaves(site(*inputs)) for _ in range(2))
    pairs = zip(first, second, strict=True)
    return not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if isinstance(a, Tensor))
