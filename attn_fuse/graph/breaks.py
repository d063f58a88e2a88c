"""Breaks: the graph break that ends a graph, and attentions that it may cut in two."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch.fx import GraphModule

from attn_fuse.errors import first_line
from attn_fuse.graph.hidden import cut_off
from attn_fuse.graph.location import in_stack, locate
from attn_fuse.graph.names import SOFTMAX, called
from attn_fuse.graph.scopes import scopes
from attn_fuse.report import Blocker, Location, SiteReport
from attn_fuse.torch_internals import LeftFunction, graph_break

_MEND_BREAK = "move that line out of the attention, or write it so that Dynamo can trace it"
_MEND_BRANCH = (
    "compute both cases and choose by torch.where, or move the check out of the attention; an assert on data can be "
    "torch._assert_async(condition), or go before the first product"
)


def at_the_end(graph: GraphModule) -> tuple[tuple[SiteReport, ...], tuple[str, ...]]:
    """Reports on attentions that the break at the end of `graph` leaves to Python, and notes on the break."""
    found = graph_break(graph)
    if found is None:
        return (), ()
    why, stack = found
    where, advice, resumed = in_stack(stack, "a graph break"), _MEND_BREAK, True
    if why.startswith("generic_jump"):
        # Dynamo does not explain jumps: it ends the graph there and compiles the rest.
        why, advice = f"the program branches on the data here: `{where.code}`", _MEND_BRANCH
    elif why.startswith("step_unsupported"):
        why, resumed = f"Dynamo runs the rest of the function as written, from here on: `{where.code}`", False
    else:
        why = _in_one_line(why)
    note, reason = f"the graph breaks at {where}: {why}", f"the graph breaks inside it, at line {where.line}: {why}"
    blocker = Blocker(reason, "graph break", where, advice)
    pieces = list(cut_off(next(scopes(graph))))
    lost = [] if resumed else [node for node in pieces if called(node) in SOFTMAX]
    if kept := next((node for node in pieces if node not in lost), None):
        what = "weights" if called(kept) in SOFTMAX else "scores"
        note += (
            f". The result of {locate(kept)} leaves the graph there: an attention with these {what} stays as written. "
            f"To fuse it, {advice}"
        )
    return tuple(SiteReport(locate(node), "refused", blocker=blocker) for node in lost), (note,)


def _in_one_line(reason: str) -> str:
    """The first line of `reason`, and Dynamo's first explanation."""
    why = re.search(r"\n.*Explanation: (.*)", reason)
    return ": ".join(part.strip().rstrip(".:") for part in (first_line(reason), why[1] if why else "") if part.strip())


def functions_left_alone(left: Iterable[LeftFunction]) -> Iterator[str]:
    """A sentence on each function that Dynamo runs as written."""
    for function in left:
        where = Location(function.file, function.line, "", "")
        at = Location(function.at_file, function.at_line, "", "")
        why = _in_one_line(function.reason)
        yield (
            f"torch.compile leaves the function {function.name} ({where}) as written, with any attention in it: it "
            f"cannot go on after the graph break at {at}, as in a loop or a generator. {why}. "
            f"Move the breaking code out of it."
        )
