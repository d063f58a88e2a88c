"""Scopes: a graph, and the subgraphs of its activation checkpoints and loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from attn_fuse.attention.attention import Refusal
from attn_fuse.graph.modes import Mode, mode_now, modes_of
from attn_fuse.graph.names import INLINE_SUBGRAPHS, LOOPED_SUBGRAPHS, op_name, storages, value_of
from attn_fuse.torch_internals import name_sources


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph, or a subgraph of one.

    outer: for each placeholder of a subgraph the node of the top graph that it stands for; None for no single node.
    modes: the mode of each node. path: the names of the subgraphs that lead here, joined by dots; "" for the top graph.
    """

    module: GraphModule
    outer: dict[Node, Node | None]
    modes: dict[Node, Mode]
    path: str = ""

    def top(self, node: Node) -> Node | None:
        """The node of the top graph that `node` stands for; None without one."""
        return self.outer.get(node, node if not self.outer else None)


@dataclass(frozen=True)
class StillWritten:
    """Memory that a graph still writes in place: a region that reads or makes some of it is refused.

    refusal: why. memory: its storages.
    functional: whether all other writes are values, and this memory was left out as it is near no attention.
    """

    refusal: Refusal
    memory: frozenset[int]
    functional: bool = False

    def and_also(self, other: StillWritten | None) -> StillWritten:
        """This memory joined with that of `other`, under this refusal."""
        return self if other is None else replace(self, memory=self.memory | other.memory)

    def holds(self, nodes: Iterable[Node]) -> bool:
        """Whether any of `nodes` lives in this memory."""
        return any(storages(node) & self.memory for node in nodes)


def scopes(module: GraphModule) -> Iterator[Scope]:
    """`module` and the subgraphs of its activation checkpoints and loops, outermost first, from the caller's mode."""
    yield from _scopes(Scope(module, {}, modes_of(module.graph, mode_now())))


def _scopes(scope: Scope) -> Iterator[Scope]:
    yield scope
    calls: dict[str, list[Node]] = {}
    for node in scope.module.graph.nodes:
        if node.op == "call_function" and op_name(node) in INLINE_SUBGRAPHS | LOOPED_SUBGRAPHS:
            for arg in node.args:
                if isinstance(arg, Node) and arg.op == "get_attr":
                    calls.setdefault(str(arg.target), []).append(node)
    for target, users in calls.items():
        body = getattr(scope.module, target, None)
        if not isinstance(body, GraphModule):
            continue
        holders = [n for n in body.graph.nodes if n.op == "placeholder"]
        operands = [a for a in users[0].args if not (isinstance(a, Node) and a.op == "get_attr" and a.target == target)]
        operands = [a for a in operands if not isinstance(a, str)]
        single = len(users) == 1 and len(operands) == len(holders) and op_name(users[0]) in INLINE_SUBGRAPHS
        outer = {
            h: scope.top(o) if single and isinstance(o, Node) else None
            for h, o in zip(holders, operands if single else holders, strict=True)
        }
        modes = modes_of(body.graph, scope.modes[users[0]])
        yield from _scopes(Scope(body, outer, modes, f"{scope.path}.{target}".lstrip(".")))


def bodies(node: Node, module: GraphModule) -> list[GraphModule]:
    """The subgraphs of `module` that `node`, a call in its graph, is given to run."""
    given = [a for a in node.args if isinstance(a, Node) and a.op == "get_attr"] if node.op == "call_function" else []
    found = [getattr(module, str(a.target), None) for a in given]
    return [body for body in found if isinstance(body, GraphModule)]


def is_frozen(graph: GraphModule) -> bool:
    """Whether torch makes no backward for `graph` in grad mode: no new tensor that it gives requires a gradient."""
    given = set().union(*(storages(node) for node in graph.graph.nodes if node.op == "placeholder"))
    made = (node for node in graph.graph.output_node().all_input_nodes if not storages(node) & given)
    return torch.is_grad_enabled() and not any(getattr(value_of(node), "requires_grad", False) for node in made)


def copied(module: GraphModule) -> GraphModule:
    """A copy of `module` and its subgraphs, to be rewritten: it shares the module's tensors and refers to no input."""
    graph = Graph()
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    name_sources(graph)
    copy = GraphModule(module, graph)
    for name, child in list(copy.named_children()):
        if isinstance(child, GraphModule):
            setattr(copy, name, copied(child))
    return copy


def code_of(graph: GraphModule) -> str:
    """The code of a graph and of its subgraphs, outermost first."""
    return "\n".join(scope.module.code for scope in scopes(graph))
