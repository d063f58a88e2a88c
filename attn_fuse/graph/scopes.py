"""Scopes: a graph, and the subgraphs of its activation checkpoints and loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from attn_fuse.attention.attention import Refusal
from attn_fuse.graph.modes import Mode, mode_now, modes_of
from attn_fuse.graph.names import INLINE_SUBGRAPHS, LOOPED_SUBGRAPHS, op_name, storages, value_of
from attn_fuse.torch_internals import name_sources


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph or subgraph.

    outer: the node of the top graph behind each placeholder of a subgraph; None where there is not exactly one.
    modes: the mode of each node. path: the names of the subgraphs that lead here, joined by dots; "" for the top graph.
    """

    module: GraphModule
    outer: dict[Node, Node | None]
    modes: dict[Node, Mode]
    path: str = ""

    def top(self, node: Node) -> Node | None:
        """The node of the top graph behind `node`; None without one."""
        return self.outer.get(node, node if not self.outer else None)


@dataclass(frozen=True)
class StillWritten:
    """Memory that a graph still writes in place. Regions that read or make some of it are refused.

    refusal: the reason. memory: the storages.
    functional: whether all other writes are values, and this memory is near no attention.
    """

    refusal: Refusal
    memory: frozenset[int]
    functional: bool = False

    def holds(self, nodes: Iterable[Node]) -> bool:
        """Whether any of `nodes` lives in this memory."""
        return any(storages(node) & self.memory for node in nodes)


def scopes(module: GraphModule) -> Iterator[Scope]:
    """`module`, in the caller's mode, and the subgraphs of its checkpoints and loops, outermost first."""
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
        given = operands_of(users[0], body, scope.module) if len(users) == 1 else {}
        outer = {
            holder: scope.top(operand) if isinstance(operand := given.get(holder), Node) else None
            for holder in body.graph.find_nodes(op="placeholder")
        }
        modes = modes_of(body.graph, scope.modes[users[0]])
        yield from _scopes(Scope(body, outer, modes, f"{scope.path}.{target}".lstrip(".")))


def bodies(node: Node, module: torch.nn.Module) -> list[GraphModule]:
    """The subgraphs of `module` that the call `node` runs."""
    given = [a for a in node.args if isinstance(a, Node) and a.op == "get_attr"] if node.op == "call_function" else []
    found = [getattr(module, str(a.target), None) for a in given]
    return [body for body in found if isinstance(body, GraphModule)]


def operands_of(call: Node, body: GraphModule, module: GraphModule) -> dict[Node, Any]:
    """The argument of `call` for each placeholder of `body`; {} unless `call` runs `body` once on its arguments."""

    def is_body(given: Any) -> bool:
        return isinstance(given, Node) and given.op == "get_attr" and getattr(module, str(given.target), None) is body

    holders = body.graph.find_nodes(op="placeholder")
    operands = [given for given in call.args if not isinstance(given, str) and not is_body(given)]
    is_plain = op_name(call) in INLINE_SUBGRAPHS and len(operands) == len(holders)
    return dict(zip(holders, operands, strict=True)) if is_plain else {}


def is_frozen(graph: GraphModule) -> bool:
    """Whether `graph` gets no backward in grad mode: no new tensor among its outputs requires a gradient."""
    given = set().union(*(storages(node) for node in graph.graph.nodes if node.op == "placeholder"))
    made = (node for node in graph.graph.output_node().all_input_nodes if not storages(node) & given)
    return torch.is_grad_enabled() and not any(getattr(value_of(node), "requires_grad", False) for node in made)


def copied(module: GraphModule) -> GraphModule:
    """A copy of `module` and its subgraphs to rewrite, which shares its tensors and refers to no input."""
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
