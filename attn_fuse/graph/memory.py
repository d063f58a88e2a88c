"""Memory: the views, writes and readers of memory that a graph writes in place.

Memory is identified by its storage, and torch's version counter shows writes. Schemas and trailing underscores reveal
the writes that torch does not count.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from attn_fuse.graph.modes import Mode, autocast_of, mode_now
from attn_fuse.graph.names import (
    CALLS,
    DROPOUT,
    FUSED,
    SOFTMAX,
    is_exponential,
    is_others_function,
    is_tensor,
    op_name,
    overloads_of,
    storages,
    tensors_of,
    value_of,
)
from attn_fuse.graph.reach import reach
from attn_fuse.graph.trace import call, fake_mode, fresh
from attn_fuse.torch_internals import innermost, on_fake_tensors, storage_of


class NotFunctional(Exception):
    """The graph cannot be made functional; the message says why. node: the operation that prevents it."""

    def __init__(self, reason: str, node: Node) -> None:
        super().__init__(reason)
        self.node = node


def written_memory(graph: Graph) -> set[int]:
    """All storages that `graph` or its subgraphs may write.

    A tensor and its views share a version counter, which starts at 0 in Dynamo's records. `.data` has its own counter,
    and `may_write` finds the writes that no counter shows.
    """
    found = set()
    for node in graph.nodes:
        found |= {storage_of(t) for t in tensors_of(value_of(node)) if innermost(t)._version > 0}
        found |= {storage for source in may_write(node) for storage in storages(source)}
        # torch counts `unsqueeze_` as a write, but not `resize_`.
        found |= storages(node) if changes_shape(node) else set()
    return found


def changes_shape(node: Node) -> bool:
    """Whether `node` is a method that changes its tensor's shape or memory, such as `unsqueeze_` and `resize_`."""
    name = str(node.target)
    # Python's own methods, such as `__eq__`, end in two underscores.
    if node.op != "call_method" or not name.endswith("_") or name.endswith("__") or name == "detach_":
        return False
    return any(torch.Tag.inplace_view in overload.tags for overload in overloads_of(name))


def may_write(node: Node) -> list[Node]:
    """The inputs that `node` writes by its schema; without a schema, all inputs if its name or use suggests a write."""
    target: Any = node.target
    if node.op != "call_function":
        return []
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        overloads = [target] if isinstance(target, torch._ops.OpOverload) else overloads_of(target)
        return [source for overload in overloads for source in _written_arguments(node, overload._schema)]
    if _writes_unseen(node):
        return list(node.all_input_nodes)
    # A trailing underscore means in place, except in Python's operators, such as `and_`.
    name = "" if getattr(target, "__module__", None) == operator.and_.__module__ else getattr(target, "__name__", "")
    return list(node.all_input_nodes) if name.endswith("_") and not name.endswith("__") else []


def _written_arguments(node: Node, schema: Any) -> list[Node]:
    found: list[Node] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            found += [source for source in pytree.tree_leaves(given) if isinstance(source, Node)]
    return found


def _writes_unseen(node: Node) -> bool:
    """Whether `node` is a higher-order operator without a result, such as a user's kernel, which exists to write."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and value_of(node) is None and not node.users


def relevant(graph: Graph, written: set[int]) -> set[int]:
    """The storages of `written` near an attention: those that lead to a softmax, or to anything computed from one."""
    if not written:
        return written
    touching: dict[int, list[Node]] = defaultdict(list)
    near: set[Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        for storage in set().union(*map(storages, (node, *node.all_input_nodes))) & written:
            touching[storage].append(node)
        anchor = node.op.startswith("call_") and (op_name(node) in SOFTMAX | FUSED | CALLS or is_exponential(node))
        if anchor or any(source in near for source in node.all_input_nodes):
            near.add(node)

    def behind(node: Node) -> list[Node]:
        alike = [touching.pop(storage, []) for storage in storages(node) & written]
        return [*node.all_input_nodes, *itertools.chain(*alike)]

    return set().union(*map(storages, reach(near, behind))) & written


class Memory:
    """The nodes of a graph that live in written memory, and the nodes that read it.

    inside: the views and writes, in graph order. reads: for each other node, output included, its arguments in written
    memory. bases: by storage, the outside node that allocates the memory or brings it in.
    writes: the storages that each writing node writes. mode: the fake mode of the graph's tensors.
    """

    def __init__(self, module: GraphModule, written: set[int], modes: dict[Node, Mode]) -> None:
        self.module = module
        self.modes = modes
        self.inside: dict[Node, None] = {}
        self.reads: dict[Node, list[Node]] = {}
        self.bases: dict[int, Node] = {}
        self.writes: dict[Node, set[int]] = {}
        self.mode = fake_mode(module.graph.nodes)
        self._written = written
        self._sharing: Node | None = None
        self._fakes: dict[Node, Any] = {}
        with self.tracing():
            for node in module.graph.nodes:
                self._look_at(node)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A block whose operations run on fake tensors, without gradients or autocast, which skips in-place writes."""
        uncast = tuple(replace(cast, enabled=False) for cast in mode_now().autocast)
        with on_fake_tensors(self.mode), torch.no_grad(), autocast_of(Mode(False, uncast)):
            yield

    @property
    def dropouts(self) -> list[Node]:
        """The in-place dropouts, which stay dropouts and draw as before; their results are then written."""
        return [node for node in self.writes if op_name(node) in DROPOUT]

    def base_of(self, node: Node) -> Node:
        """The base of the only storage of `node`."""
        (storage,) = storages(node)
        return self.bases[storage]

    def _look_at(self, node: Node) -> None:
        own = storages(node) & self._written
        # A tuple from outside is read part by part, and each part is a base.
        reading = [n for n in node.all_input_nodes if storages(n) & self._written]
        sources = [n for n in reading if n in self.inside or is_tensor(n)]
        if len(sources) < len(reading) and op_name(node) != "getitem":
            raise NotFunctional("several tensors are read at once, and one of them is written", node)
        if node.op == "output":
            self.reads[node] = sources
            return
        if not own and not sources:
            return
        if self.modes[node].levels > 0:
            raise NotFunctional("a vmap or a derivative of torch.func is open", node)
        if _writes_unseen(node):
            raise NotFunctional(f"{op_name(node)} writes into its arguments", node)
        if is_others_function(node) and any(requiring(n) for n in (node, *sources)):
            raise NotFunctional(f"{op_name(node)} may write it, and define its own gradient", node)
        # An operation that returns a number, such as `.item()`, writes nothing.
        gives_number = isinstance(value_of(node), (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
        writes = self._run(node, sources) if sources and not gives_number else set()
        if not writes and any(storages(source) & self._written for source in may_write(node)):
            raise NotFunctional(f"{op_name(node)} writes without torch counting it", node)
        if writes or own & set().union(*map(storages, sources)):
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise NotFunctional(f"{op_name(node)} returns or writes memory that is written", node)
            self.inside[node] = None
            self.writes |= {node: writes} if writes else {}
            return
        if sources:
            self.reads[node] = sources
        if is_tensor(node):
            for storage in own:
                if self.bases.setdefault(storage, node) is not node:
                    self._sharing = node

    def _run(self, node: Node, sources: Sequence[Node]) -> set[int]:
        """The written storages that `node` itself writes, found by running it on fake tensors."""
        args, kwargs = map_arg((node.args, node.kwargs), self._fake)
        before = {id(t): t._version for source in sources for t in tensors_of(self._fakes[source])}
        result = call(node, args, kwargs)
        if storages(node) & self._written:
            self._fakes[node] = result
        found: set[int] = set()
        for source in sources:
            for fake, recorded in zip(tensors_of(self._fakes[source]), tensors_of(value_of(source)), strict=True):
                if fake._version != before[id(fake)]:
                    found.add(storage_of(recorded))
        return found

    def _fake(self, node: Node) -> Any:
        if node not in self._fakes:
            body = getattr(self.module, str(node.target), None) if node.op == "get_attr" else None
            self._fakes[node] = body if isinstance(body, GraphModule) else fresh(value_of(node))
        return self._fakes[node]

    def assert_private(self) -> None:
        """Raise NotFunctional where a value would differ from the write, to autograd or to an input in this memory."""
        if self._sharing is not None:
            raise NotFunctional("two inputs share memory that is written", self._sharing)
        wanting = {s for n in (*self.inside, *self.bases.values()) for s in requiring(n)}
        for node, storage_ids in self.writes.items():
            if storage_ids & wanting and not self.modes[node].grad:
                raise NotFunctional("written without gradients, though a gradient is required", node)
        detached: set[Node] = set()
        for node in self.inside:
            views = [source for source in node.all_input_nodes if storages(source) & storages(node)]
            cut = any(n in detached or (requiring(n) and not requiring(node)) for n in views)
            if node in self.writes and (cut or detached.intersection(node.all_input_nodes)):
                raise NotFunctional("written through an alias that is detached from its gradient", node)
            if cut and tensors_of(value_of(node)):
                detached.add(node)


def writes_in(module: GraphModule, modes: dict[Node, Mode]) -> dict[Node, set[int]]:
    """The storages that each node of `module` may write.

    Where that cannot be told, each node may write all memory that any node writes and that it reads or gives.
    """
    written = written_memory(module.graph)
    try:
        writes = Memory(module, written, modes).writes if written else {}
    except NotFunctional:
        touched = {node: storages(node).union(*map(storages, node.all_input_nodes)) for node in module.graph.nodes}
        writes = {node: memory & written for node, memory in touched.items()}
    return {node: writes.get(node, set()) for node in module.graph.nodes}


def requiring(node: Node) -> set[int]:
    """The storages of those tensors of `node` that require a gradient."""
    return {storage_of(t) for t in tensors_of(value_of(node)) if t.requires_grad}
