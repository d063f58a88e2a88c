"""First runs: a graph that trains runs as written until its first backward shows whether another one follows.

A compiled graph allows one backward pass. Programs with a gradient penalty, forces or two losses need more, and must
not fail under `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from attn_fuse.report import Blocker, GraphReport, SiteReport
from attn_fuse.torch_internals import backward_keeps_graph, in_backward

# After this many calls without a backward pass the compiled graph runs: the program infers with gradients on.
_MOST_IN_TRAINING, _MOST_IN_EVALUATION = 8, 1
_KEPT = (
    "the program keeps the graph for another backward pass (create_graph, retain_graph), and torch.compile allows one"
)


class FirstRuns:
    """Runs `plain` up to its first backward pass, then `compiled`.

    If that pass keeps the graph for another one, `plain` goes on and `kept` is called. trains: whether the graph's
    module is in training mode.
    """

    def __init__(
        self, plain: Callable[..., Any], compiled: Callable[..., Any], trains: bool, kept: Callable[[], object]
    ) -> None:
        self._plain, self._compiled, self._kept = plain, compiled, kept
        self._left = _MOST_IN_TRAINING if trains else _MOST_IN_EVALUATION
        # A graph made in a backward pass belongs to a reentrant checkpoint, which itself allows no other pass.
        self._compiles = in_backward()
        self._keeps = False

    def __call__(self, *values: Any) -> Any:
        if not in_backward():  # in a backward, a checkpoint must repeat the way it ran before
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
    """The report of a compiled graph that runs as written because the program keeps it for another backward."""
    return replace(report, sites=tuple(_uncompiled(site) if site.fused else site for site in report.sites))


def _uncompiled(site: SiteReport) -> SiteReport:
    attention = {name: value for name, value in site.attention.items() if name != "picked"}
    blocker = Blocker(_KEPT, "backward", None)
    return replace(site, status="as written", attention=attention, kernel=None, score_bytes=0, blocker=blocker)
