"""In-place views: replace `mask.unsqueeze_(1)` by the view `mask.unsqueeze(1)`, which later uses of the tensor read.

Such a call changes the shape of one tensor object and writes no memory. Dynamo records the object once, in its last
shape; here each place gets the shape that the tensor has there. Where the tensor is an input, Dynamo breaks the graph,
since the caller would see the shape change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from attn_fuse.graph.memory import NotFunctional, changes_shape
from attn_fuse.graph.modes import Mode
from attn_fuse.graph.names import overloads_of, tensors_of, value_of
from attn_fuse.graph.trace import call, fake_mode, with_gradient
from attn_fuse.torch_internals import on_fake_tensors, storage_of


def pure_views(graph: Graph, modes: dict[Node, Mode]) -> None:
    """Replace the in-place views of `graph`. Raises NotFunctional where no view does the same."""
    changes = [node for node in graph.nodes if changes_shape(node)]
    if not changes:
        return
    for node in changes:
        _assert_replaceable(node, modes)
    # given: by recorded object, the nodes that return it. now: the node that has its current shape.
    changed = {id(value_of(node)): value_of(node) for node in changes}
    given: dict[int, list[Node]] = {key: [] for key in changed}
    now: dict[Node, Node] = {}
    with on_fake_tensors(fake_mode(graph.nodes)), torch.no_grad():
        for node in list(graph.nodes):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: now.get(n, n))
            key = id(value_of(node))
            if node.op == "output" or not any(id(tensor) in changed for tensor in tensors_of(value_of(node))):
                continue
            if key not in given:  # a part of this tuple changes
                parts = call(node, *map_arg((node.args, node.kwargs), value_of))
                if [*map(storage_of, tensors_of(parts))] != [*map(storage_of, tensors_of(value_of(node)))]:
                    raise NotFunctional("the shape of one of several results is changed in place", node)
                node.meta["example_value"] = parts
                continue
            members = given[key]
            if not members and node.op not in ("call_function", "call_method"):
                raise NotFunctional("the shape of an input is changed in place", node)
            if not members:
                _record(node, _as_made(node, changed[key]), changed[key])
            elif node in changes:
                source = now.get(members[-1], members[-1])
                with graph.inserting_before(node):
                    made = graph.call_method(str(node.target)[:-1], (source, *node.args[1:]), dict(node.kwargs))
                made.meta, modes[made] = dict(node.meta), modes[node]
                _record(made, call(made, *map_arg((made.args, made.kwargs), value_of)), changed[key])
                now.update(dict.fromkeys((*members, node), made))
                members.append(node)
                continue
            else:  # a write that returns the tensor itself
                source = now.get(members[-1], members[-1])
                node.meta["example_value"] = value_of(source)
            members.append(node)
    for node in reversed(changes):
        graph.erase_node(node)


def _assert_replaceable(node: Node, modes: Mapping[Node, Mode]) -> None:
    overloads = overloads_of(str(node.target)[:-1])
    returns = overloads[0]._schema.returns if overloads else []
    if not (len(returns) == 1 and returns[0].alias_info is not None):
        raise NotFunctional(f"{node.target!s} changes a tensor's memory or size in place", node)
    if modes[node].levels > 0:
        raise NotFunctional("a vmap or a derivative of torch.func is open", node)
    target = node.args[0]
    if not isinstance(target, Node) or value_of(target) is not value_of(node):
        raise NotFunctional(f"{node.target!s} changes a tensor that Dynamo does not record", node)


def _as_made(node: Node, last: Any) -> torch.Tensor:
    """The value of `node` before its shape changed, in the memory of `last`, its final value."""
    made: torch.Tensor = call(node, *map_arg((node.args, node.kwargs), value_of))
    if storage_of(made) == storage_of(last):
        return made
    return torch.as_strided(last, made.size(), made.stride(), made.storage_offset())


def _record(node: Node, value: torch.Tensor, last: Any) -> None:
    node.meta["example_value"] = with_gradient(value) if last.requires_grad else value
