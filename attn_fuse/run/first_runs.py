"""First runs: a graph of a program that trains runs as written until it is known how its gradients are used.

What torch.compile makes of a graph allows one backward pass. A program that asks for another, as for a penalty on
gradients, for forces or for two losses, must not fail under `run`, so the graph as written serves its first backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from attn_fuse.report import Blocker, GraphReport, SiteReport
from attn_fuse.torch_internals import backward_keeps_graph, in_backward

# Calls without a backward pass after which the compiled graph runs all the same: the program infers with gradients on.
_MOST_IN_TRAINING, _MOST_IN_EVALUATION = 8, 1
_KEPT = (
    "the program keeps the graph for another backward pass (create_graph, retain_graph), and torch.compile allows one"
)


class FirstRuns:
    """Runs `plain` until a backward pass has gone through it, and then `compiled`.

    Where that pass keeps the graph for another one, `plain` runs on, and `kept` is told. trains: whether the module
    of the graph is in training mode.
    """

    def __init__(
        self, plain: Callable[..., Any], compiled: Callable[..., Any], trains: bool, kept: Callable[[], object]
    ) -> None:
        self._plain, self._compiled, self._kept = plain, compiled, kept
        self._left = _MOST_IN_TRAINING if trains else _MOST_IN_EVALUATION
        # A reentrant checkpoint has its graphs made in a backward pass, and allows no other pass itself.
        self._compiles = in_backward()
        self._keeps = False

    def __call__(self, *values: Any) -> Any:
        if not in_backward():  # else a checkpoint runs again what ran before, and that has to be the same
            self._compiles = self._left <= 0 and not self._keeps
            self._left -= 1
        if self._compiles:
            return self._compiled(*values)
        out = self._plain(*values)
        recorded = [one for one in out if isinstance(one, Tensor) and one.grad_fn is not None]
        for tensor in recorded:
            tensor.register_hook(self._see)
        if not recorded:
            self._left = 0
        return out

    def _see(self, gradient: Tensor) -> None:
        self._left = 0
        if backward_keeps_graph() and not self._keeps:
            self._keeps = True
            self._kept()


def uncompiled_after_all(report: GraphReport) -> GraphReport:
    """The report of a graph that was compiled and runs as written, for what the program does with its gradients."""
    return replace(report, sites=tuple(_uncompiled(site) if site.fused else site for site in report.sites))


def _uncompiled(site: SiteReport) -> SiteReport:
    attention = {name: value for name, value in site.attention.items() if name != "picked"}
    blocker = Blocker(_KEPT, "backward", None)
    return replace(site, status="as written", attention=attention, kernel=None, score_bytes=0, blocker=blocker)
