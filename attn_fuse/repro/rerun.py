"""Rerun: compare a site as written with the site under attn_fuse. Scripts of failures call it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from attn_fuse.emit.check import difference
from attn_fuse.errors import named
from attn_fuse.graph.modes import Mode, autocast_of
from attn_fuse.graph.replay import Played, gradients_of
from attn_fuse.graph.scopes import copied
from attn_fuse.kernels.switches import Switches, switch
from attn_fuse.picker.leaves import Leaf, made, with_leaves
from attn_fuse.report import GRAPH_FAILED, GraphReport, collecting


def main(
    site: nn.Module,
    leaves: Sequence[Leaf],
    backend: Callable[..., Callable[..., Any]],
    options: Mapping[str, Any],
    mode: Mode,
    switches: Switches,
    precision: str,
    dynamic: bool,
) -> int:
    """Print the failure of `site` under `backend` and return 1, or return 0 without one.

    leaves: the inputs of `site`. mode: its grad mode and autocast. switches, precision: torch's settings.
    dynamic: whether sizes are symbols.
    """
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def spied(graph: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        graphs.append((copied(graph), list(given)))
        return backend(graph, given, options={**options, "check": True})

    devices = [leaf.device for leaf in leaves if leaf.dtype is not None]
    switch(switches, precision, next((x for x in devices if x.type == "cuda"), torch.device("cpu")))
    site, inputs = with_leaves(site, leaves, [*map(made, leaves)])
    with torch.set_grad_enabled(mode.grad), autocast_of(mode), collecting() as reports:
        try:
            outputs = pytree.tree_leaves(torch.compile(site, backend=spied, dynamic=dynamic)(*inputs))
            found = {f"output {n}": out.detach() for n, out in enumerate(outputs) if isinstance(out, Tensor)}
            problem = None
            # Compiled dropout cannot be compared; the check within attn_fuse leaves it out.
            if len(graphs) == 1 and not _draws(site, inputs):
                graph, given = graphs[0]
                named_inputs = {f"input {n}": x for n, x in enumerate(given) if isinstance(x, Tensor)}
                wanted = {name: x for name, x in named_inputs.items() if mode.grad and x.requires_grad}
                played = Played(found, gradients_of(outputs, wanted))
                problem = difference(graph, played, given, numbers=True)
        except Exception as error:
            traceback.print_exc()
            problem = f"running it under attn_fuse failed: {named(error)}"
    print(*reports, sep="\n")
    problem = _said(reports) or problem
    print(problem or "nothing failed, and both compute the same")
    return int(problem is not None)


def _said(reports: Sequence[GraphReport]) -> str | None:
    """The first failure in the reports, or None."""
    failed = [failure.what for report in reports for found in report.sites for failure in found.failures]
    failed += [note for report in reports for note in report.notes if note.startswith(GRAPH_FAILED)]
    return failed[0] if failed else None


def _draws(site: nn.Module, inputs: Sequence[Any]) -> bool:
    """Whether the program draws random numbers: two runs as written differ."""
    with torch.no_grad():
        first, second = (pytree.tree_leaves(site(*inputs)) for _ in range(2))
    pairs = zip(first, second, strict=True)
    return not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if isinstance(a, Tensor))
