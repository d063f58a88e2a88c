"""Profile: how much of a model's time is attention, as written and fused, and which operators take the most.

As written: the graphs that Dynamo captures run operator by operator, uncompiled, and attention is what attn_fuse reads
as one: from the product of query and key to the product with the value, with what makes the mask, and the backward of
these operators; and the program's own calls of fused attention. Fused: attention is the calls of fused kernels, torch's
and ours, and their backward; what Inductor compiles around them, as a mask that is made before the call, is not in it.
"""

from __future__ import annotations

import collections
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.fx import GraphModule, Node
from torch.profiler import ProfilerActivity, profile, record_function

from attn_fuse.emit.splice import emit
from attn_fuse.explain import compiled_apart
from attn_fuse.graph.expand import expand
from attn_fuse.graph.functionalize import functionalize
from attn_fuse.graph.scopes import copied, scopes
from attn_fuse.picker.pick import Choice, pick
from attn_fuse.picker.timing import synchronize
from attn_fuse.site import Recognised, Rewriter

_LABEL = "attn_fuse.bench: attention"
_BACKWARD = "autograd::engine::evaluate_function"
_FUSED = re.compile(r"aten::_(scaled_dot_product|flash|efficient|cudnn)\w*attention|attn_fuse::")
# What holds compiled code in the profile: its own time is that of Inductor's kernels on the CPU.
_COMPILED = re.compile(r"Torch-Compiled|CompiledFunction|## Call Compiled|AOTDispatcher|Compiled_?F")
INDUCTORS = "Inductor's kernels"
# Calls that are profiled, after one that is not.
_CALLS = 3


@dataclass(frozen=True)
class Profile:
    """Where the time of one call goes, in seconds. operators: the time of each by itself, without those that it calls.

    attention: of `seconds`, those in attention; None where they cannot be told apart.
    """

    seconds: float
    attention: float | None
    operators: dict[str, float]

    @property
    def share(self) -> float | None:
        """The share of the time in attention."""
        return None if self.attention is None or not self.seconds else self.attention / self.seconds


def as_written(model: Callable[..., Any], use: Callable[[Callable[..., Any]], Any], device: torch.device) -> Profile:
    """The profile of `model`, operator by operator. use: calls the model that it is given, forward and backward."""
    run = compiled_apart(model, functools.partial(_labelled))
    events = _events(lambda: use(run), device)
    numbers = _numbers_of_label(events)
    labelled = [e for e in events if e.name == _LABEL]
    inside = [child for event in labelled for child in event.cpu_children]
    inside += [e for e in events if e.name.startswith(_BACKWARD) and e.sequence_nr in numbers]
    # The program's own calls of fused attention are under no label.
    inside += [e for e in _outermost_fused(events) if not any(p.name == _LABEL for p in _parents(e))]
    return _profile([e for e in events if e.name != _LABEL], inside, device)


def fused(call: Callable[[], Any], device: torch.device, told: bool = True) -> Profile:
    """The profile of `call`, of a compiled model. told: whether all of its fused kernels are operators of their own."""
    events = _events(call, device)
    found = _profile(events, _outermost_fused(events), device)
    return found if told else Profile(found.seconds, None, found.operators)


def _events(call: Callable[[], Any], device: torch.device) -> list[Any]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its own start and stop
    call()
    synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as record:
        for _ in range(_CALLS):
            call()
        synchronize(device)
    # A GPU's kernels are events, too; their time is in the operators that launched them.
    return [event for event in record.events() or () if event.device_type == DeviceType.CPU]


def _profile(events: Sequence[Any], attention: Iterable[Any], device: torch.device) -> Profile:
    on_gpu = device.type == "cuda"
    own = collections.Counter[str]()
    for event in events:
        name = INDUCTORS if _COMPILED.match(event.name) else event.name.rpartition(": ")[2]
        own[name] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6 / _CALLS
    spent = sum(event.device_time_total if on_gpu else event.cpu_time_total for event in attention) / 1e6 / _CALLS
    return Profile(sum(own.values()), spent, {name: s for name, s in own.most_common() if s > 0})


def _outermost_fused(events: Sequence[Any]) -> list[Any]:
    return [e for e in events if _FUSED.match(e.name) and not any(_FUSED.match(p.name) for p in _parents(e))]


def _parents(event: Any) -> Iterable[Any]:
    while (event := event.cpu_parent) is not None:
        yield event


def _numbers_of_label(events: Sequence[Any]) -> set[int]:
    """The numbers by which autograd finds the operators inside the label.

    Operators that autograd does not record bear the number of the next one that it does: the last one counts.
    """
    last: dict[int, Any] = {}
    for event in sorted(events, key=lambda e: e.time_range.start):
        if event.sequence_nr >= 0 and event.scope == 0 and not event.name.startswith(_BACKWARD):
            last[event.sequence_nr] = event
    return {number for number, event in last.items() if any(p.name == _LABEL for p in _parents(event))}


def _labelled(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`graph` uncompiled, with the operations of its attentions under a label. A backend for Dynamo."""
    names = _names_in_attention(graph, inputs)
    graph, _ = _functional(graph)
    for scope in scopes(graph):
        marked = names.get(scope.path, ())
        for node in list(scope.module.graph.nodes):
            if node.name in marked:
                _label(node)
        scope.module.recompile()
    return graph


def _names_in_attention(graph: GraphModule, inputs: Sequence[Any]) -> dict[str, set[str]]:
    """The names of the operations in attentions, by the path of their scope, as the analysis reads them."""
    found: dict[str, set[str]] = collections.defaultdict(set)

    def noting(region: Any, *rest: Any) -> Node:
        found[region.scope.path].update(node.name for node in region.nodes)
        return emit(region, *rest)

    graph, written = _functional(graph)

    def choose(found: Recognised) -> Choice:
        return pick(found.attention, found.facts, fuse_all=True)

    Rewriter(graph, inputs, choose, lambda _: True, noting, written).rewrite(60.0, time.perf_counter())
    return found


def _functional(graph: GraphModule) -> tuple[GraphModule, Any]:
    copy = copied(graph)
    return copy, expand(copy, functionalize(copy))


def _label(node: Node) -> None:
    if node.op == "call_function":
        node.target = _under_label(node.target)
    elif node.op == "call_method":
        node.op, node.target = "call_function", _under_label(functools.partial(_method, str(node.target)))


def _method(name: str, self: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(self, name)(*args, **kwargs)


def _under_label(function: Any) -> Callable[..., Any]:
    def labelled(*args: Any, **kwargs: Any) -> Any:
        with record_function(_LABEL):
            return function(*args, **kwargs)

    return labelled
