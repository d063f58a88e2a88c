"""What a program's attentions are recognised as, without a kernel, a compiler or a number computed by one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from attn_fuse.attention.attention import Attention, Refusal
from attn_fuse.graph.expand import expand
from attn_fuse.graph.functionalize import functionalize
from attn_fuse.graph.scopes import copied
from attn_fuse.picker.pick import Choice
from attn_fuse.report import SiteReport
from attn_fuse.site import Recognised, Rewriter


def recognised(program: Callable[..., Any], *args: Any, dynamic: bool | None = False) -> list[Attention | Refusal]:
    """An answer for each site of the program's graphs, in order; `args` are what it is called with."""
    found: list[Attention | Refusal] = []

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        attentions: list[Attention] = []

        def pick(found: Recognised, unfit: Mapping[str, str]) -> Choice:
            attentions.append(found.attention)
            return Choice(None, {}, "only recognised")

        rewritten = copied(graph)
        written = expand(rewritten, functionalize(rewritten))
        rewriter = Rewriter(rewritten, inputs, pick, lambda site: False, written=written)
        sites = rewriter.rewrite(math.inf, time.perf_counter()).sites
        known = iter(attentions)
        found.extend(_refusal(site) if site.status == "refused" else next(known) for site in sites if _is_ours(site))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, dynamic=dynamic)(*args)
    return found


def _is_ours(site: SiteReport) -> bool:
    return site.status != "already fused"


def _refusal(site: SiteReport) -> Refusal:
    assert site.blocker is not None
    return Refusal(site.blocker.reason, site.blocker)
