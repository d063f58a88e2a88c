"""Breaks: what one graph tells of the break that it ends in, and of an attention that the break may cut in two."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Break:
    """A graph break. reason: Dynamo's, in one line. location: the line of user code that Dynamo could not follow.

    advice: what to write instead; "" where only Dynamo's reason says it. resumed: whether Dynamo compiles what follows.
    """

    reason: str
    location: Location
    advice: str = ""
    resumed: bool = True


def at_the_end(graph: GraphModule) -> tuple[tuple[SiteReport, ...], tuple[str, ...]]:
    """The attentions that a break at the end of `graph` leaves to Python, and what there is to say of the break."""
    ended = break_after(graph)
    if ended is None:
        return (), ()
    note, advice = f"the graph breaks at {ended.location}: {ended.reason}", ended.advice or _MEND_BREAK
    reason = f"the graph breaks inside it, at line {ended.location.line}: {ended.reason}"
    blocker = Blocker(reason, "graph break", ended.location, advice)
    pieces = list(cut_off(next(scopes(graph))))
    lost = [] if ended.resumed else [node for node in pieces if called(node) in SOFTMAX]
    if kept := next((node for node in pieces if node not in lost), None):
        what = "weights" if called(kept) in SOFTMAX else "scores"
        note += (
            f". The result of {locate(kept)} leaves the graph there: an attention with these {what} stays as written. "
            f"To fuse it, {advice}"
        )
    return tuple(SiteReport(locate(node), "refused", blocker=blocker) for node in lost), (note,)


def break_after(graph: GraphModule) -> Break | None:
    """The break that ends `graph`; None where Dynamo captured all that follows, too."""
    found = graph_break(graph)
    if found is None:
        return None
    reason, stack = found
    where = in_stack(stack, "a graph break")
    if reason.startswith("generic_jump"):
        # Dynamo gives no words for a jump: it ends the graph there and compiles what follows.
        return Break(f"the program branches on the data here: `{where.code}`", where, _MEND_BRANCH)
    if reason.startswith("step_unsupported"):
        return Break(f"Dynamo runs the rest of the function as written, from here on: `{where.code}`", where, "", False)
    return Break(_in_one_line(reason), where)


def _in_one_line(reason: str) -> str:
    """What Dynamo could not trace, and its first explanation."""
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
            f"Move what breaks out of it."
        )
