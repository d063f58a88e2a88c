"""Breaks: attentions that a graph break cuts in two, found by joining the graphs before and after the break.

A graph that ends in a break becomes a `Part`, and every tensor that it returns is remembered with it. A later graph
that is called with such a tensor continues it: joined, both are one graph, in which sites are sought as in any other.
What joins two graphs is the tensor itself, so code that Dynamo does not see and that returns another tensor parts them.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from attn_fuse.graph.expand import expand
from attn_fuse.graph.functionalize import functionalize
from attn_fuse.graph.location import in_stack
from attn_fuse.graph.names import SOFTMAX, called, is_exponential, value_of
from attn_fuse.graph.region import Region, Site, find_sites
from attn_fuse.graph.scopes import copied, scopes
from attn_fuse.graph.seen import Seen
from attn_fuse.graph.walk import is_product
from attn_fuse.report import Location
from attn_fuse.torch_internals import FakeTensor, FakeTensorMode, LeftFunction, graph_break

# An attention has two products and a softmax, with dropout or a cast between: more graphs are joined for nothing.
_MOST_PARTS = 4
# The graphs that continue a part are compiled in its first calls; later ones need not pay for the notes.
_CALLS_NOTED = 8


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


@dataclass(frozen=True, eq=False)
class Part:
    """A graph before or after a break.

    graph: a functional copy of it. ends: the break that it ends in; None for the last of a chain.
    reads: for the number of each input that an earlier part returned, that part and the number of the output.
    """

    graph: GraphModule
    ends: Break | None
    reads: Mapping[int, tuple[Part, int]]


@dataclass(frozen=True, eq=False)
class Joined:
    """Parts as one graph, on fake tensors in the sizes of the first call.

    breaks: the break after each part but the last. part_of: the number of each operation's part.
    """

    graph: GraphModule
    breaks: tuple[Break, ...]
    part_of: Mapping[Node, int]

    @property
    def inputs(self) -> tuple[object, ...]:
        """The fake inputs of the graph."""
        return tuple(map(value_of, self.graph.graph.find_nodes(op="placeholder")))


class NotJoined(Exception):
    """Two graphs that cannot be joined: one writes in place, or reads tensors of a kind that has no plain fake."""


# The tensors that parts returned, by the ids of their attributes: `Seen`, the part, and the number of the output.
_returned: dict[int, tuple[Seen, Part, int]] = {}


def part_of(graph: GraphModule, inputs: Sequence[object]) -> Part | None:
    """`graph` as a part; None where it neither ends in a break nor continues a part, or can hold no piece of attention.

    Raises NotJoined where the graph writes in place what cannot be made a value.
    """
    ends = break_after(graph)
    made = ((place, _returned_by(x)) for place, x in enumerate(inputs) if _returned and type(x) is torch.Tensor)
    reads = {place: source for place, source in made if source is not None}
    if (ends is None and not reads) or not any(map(_is_piece, graph.graph.nodes)):
        return None
    functional = copied(graph)
    # What is written before the break may be half an attention, though nothing in this graph shows it.
    if expand(functional, functionalize(functional, far=True)):
        raise NotJoined("memory is still written in place")
    return Part(functional, ends, reads)


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
    what, _, more = reason.strip().partition("\n")
    why = re.search(r"Explanation: (.*)", more)
    return ": ".join(part.strip().rstrip(".:") for part in (what, why[1] if why else "") if part.strip())


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


def remembering(compiled: Callable[..., Any], part: Part) -> Callable[..., Any]:
    """`compiled`, the callable of the graph of `part`, whose first calls note the tensors that they return.

    What continues the part is compiled in the first call, or in one of the next where that one goes another way.
    """
    calls = itertools.count()

    def run(*values: Any) -> Any:
        made = compiled(*values)
        if next(calls) < _CALLS_NOTED:
            for key in [key for key, (seen, *_) in _returned.copy().items() if seen.is_gone]:
                _returned.pop(key, None)
            for number, tensor in enumerate(made):
                if type(tensor) is torch.Tensor:
                    _returned[id(tensor.__dict__)] = (Seen.now(tensor), part, number)
        return made

    return run


def _returned_by(tensor: torch.Tensor) -> tuple[Part, int] | None:
    """The part that returned `tensor`, and the number of the output; None where none did."""
    found = _returned.get(id(tensor.__dict__))
    return found[1:] if found is not None and found[0].is_still(tensor) else None


def joined(last: Part) -> Joined:
    """`last` and the parts before it as one graph. Raises NotJoined."""
    parts = _chain(last)
    graph, root, mode = Graph(), torch.nn.Module(), FakeTensorMode()
    copies: dict[Node, Node] = {}
    outputs: dict[Part, Sequence[Any]] = {}
    numbers: dict[Node, int] = {}
    for number, part in enumerate(parts):
        for place, node in enumerate(part.graph.graph.find_nodes(op="placeholder")):
            if place not in part.reads or part.reads[place][0] not in parts:
                copies[node] = _described(graph.placeholder(f"part{number}_{node.name}"), node, mode)
    for number, part in enumerate(parts):
        for place, node in enumerate(part.graph.graph.find_nodes(op="placeholder")):
            if node not in copies:
                source, output = part.reads[place]
                copies[node] = outputs[source][output]
        for node in part.graph.graph.nodes:
            if node.op == "output":
                outputs[part] = map_arg(node.args[0], copies.__getitem__)
            elif node.op != "placeholder":
                copy = graph.node_copy(node, copies.__getitem__)
                if node.op in ("get_attr", "call_module"):
                    copy.target = f"part{number}_{node.target}".replace(".", "_")
                    setattr(root, copy.target, operator.attrgetter(str(node.target))(part.graph))
                copies[node] = _described(copy, node, mode)
                numbers[copy] = number
    graph.output(tuple(outputs[last]))
    return Joined(GraphModule(root, graph), tuple(part.ends for part in parts if part.ends is not None), numbers)


def cut_sites(whole: Joined) -> Iterator[tuple[Site, Break]]:
    """The sites of `whole` that a break goes through, each with the first such break.

    A break goes through a site where no reading of the site has both products and the softmax in one part.
    """
    for site in find_sites(next(scopes(whole.graph))):
        regions = [candidate for candidate in site.candidates if isinstance(candidate, Region)]
        places = [{whole.part_of[node] for node in _core(region)} for region in regions]
        if places and all(len(place) > 1 for place in places):
            yield site, whole.breaks[min(places[0])]


def _core(region: Region) -> Iterator[Node]:
    yield from (region.softmax, region.output)
    yield from (node for node in region.nodes if is_product(node))


def _chain(last: Part) -> tuple[Part, ...]:
    """`last` and the parts before it, earliest first."""
    chain: list[Part] = []
    waiting = [last]
    while waiting and len(chain) < _MOST_PARTS:
        part = waiting.pop(0)
        # A part that several others read stands before all of them.
        if part in chain:
            chain.remove(part)
        chain.append(part)
        waiting += dict.fromkeys(source for source, _ in part.reads.values())
    return tuple(reversed(chain))


def _is_piece(node: Node) -> bool:
    return node.op.startswith("call_") and (is_product(node) or called(node) in SOFTMAX or is_exponential(node))


def _described(copy: Node, node: Node, mode: FakeTensorMode) -> Node:
    """`copy` with the records of `node`, its value in the sizes of the first call."""
    copy.meta = {name: what for name, what in node.meta.items() if name != "val"}
    copy.meta["example_value"] = _on_first_call(value_of(node), mode)
    return copy


def _on_first_call(value: Any, mode: FakeTensorMode) -> Any:
    """`value` with numbers in the place of symbols. Raises NotJoined for a tensor of a subclass, or an unknown size."""
    if isinstance(value, (tuple, list)):
        return tuple(_on_first_call(item, mode) for item in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if value.node.hint is None:
            raise NotJoined("a size is known only when the program runs")
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, FakeTensor):
        raise NotJoined(f"a {type(value).__name__} has no plain fake")
    sizes, strides = (_on_first_call(tuple(n), mode) for n in (value.shape, value.stride()))
    with mode:
        fake = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return fake.requires_grad_(value.requires_grad)
