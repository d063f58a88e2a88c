"""What is private of Dynamo: its records of a graph, its errors, its backends."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback
from torch._dynamo.utils import get_compilation_metrics
from torch._logging import trace_structured

# Dynamo wraps an exception of a backend in BackendCompilerFailed, except for this family.
PassesThroughDynamo = ShortenTraceback
# No failure of a backend: Dynamo traces the frame once more.
RestartsDynamo = RestartAnalysis


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add an artifact to the structured trace of the compilation that runs now, for tlparse.

    text: makes the contents; called only where torch writes a trace, as with TORCH_TRACE=FOLDER.
    """
    trace_structured("artifact", lambda: {"name": name, "encoding": "string"}, payload_fn=text, expect_trace_id=False)


# Where the record of a graph input has the name of its source, in a graph of ours.
SOURCE = "attn_fuse_source"


def name_sources(graph: torch.fx.Graph) -> None:
    """Replace Dynamo's records of the inputs of `graph` by their names.

    Dynamo's record of an input refers to the tensor, weakly, and `torch.utils.swap_tensors` refuses such a tensor.
    """
    for placeholder in graph.find_nodes(op="placeholder"):
        name = source_name(placeholder)
        placeholder.meta = {key: value for key, value in placeholder.meta.items() if key != "grapharg"}
        if name:
            placeholder.meta[SOURCE] = name


def source_name(placeholder: torch.fx.Node) -> str:
    """Dynamo's name of the source of a graph input, as in ``L['self']._buffers['bias']``; "" without one."""
    if (kept := placeholder.meta.get(SOURCE)) is not None:
        return str(kept)
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None:
        source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def graph_break(graph: torch.fx.GraphModule) -> tuple[str, str] | None:
    """(Dynamo's reason, the stack as a traceback prints it) of the graph break that ends `graph`; None without one."""
    ended: Any = getattr(graph, "compile_subgraph_reason", None)
    if not getattr(ended, "graph_break", False):
        return None
    return str(ended.reason), "".join(traceback.format_list(ended.user_stack))


def frames_of_break(graph: torch.fx.GraphModule) -> tuple[traceback.FrameSummary, ...]:
    """The frames of the graph break that ends `graph`, the innermost last.

    Empty without a break, and where Dynamo goes on within the innermost frame, so that no code is left as written.
    """
    if graph_break(graph) is None or getattr(torch._dynamo.config, "nested_graph_breaks", False):
        return ()
    ended: Any = graph.compile_subgraph_reason
    return tuple(ended.user_stack)


@dataclass(frozen=True)
class LeftFunction:
    """A function that Dynamo runs as written, since it cannot go on after a break in it, as in a loop or a generator.

    name, file, line: where it is defined. reason: what Dynamo says of the break, whole; at_file, at_line: its place.
    """

    name: str
    file: str
    line: int
    reason: str
    at_file: str
    at_line: int


def left_by_dynamo(since: float) -> tuple[LeftFunction, ...]:
    """The functions that Dynamo left as written since a time, in seconds of `time.time`.

    Dynamo keeps its records of the last 64 compilations.
    """
    left = [
        LeftFunction(
            record.co_name or "",
            record.co_filename or "",
            record.co_firstlineno or 0,
            record.fail_reason,
            record.fail_user_frame_filename or record.co_filename or "",
            record.fail_user_frame_lineno or record.co_firstlineno or 0,
        )
        for record in get_compilation_metrics()
        if (record.start_time_us or 0) >= since * 1e6 and record.fail_type is not None and record.fail_reason
    ]
    return tuple(dict.fromkeys(left))


@contextlib.contextmanager
def apart_from_dynamo() -> Iterator[None]:
    """A block in a backend that compiles and runs other graphs as if Dynamo were not compiling one.

    Without it AOTAutograd takes up the fake tensors of Dynamo's graph, and a backward that is compiled on its first run
    finds its metrics set already.
    """
    from torch._dynamo import utils
    from torch._guards import compile_context, tracing

    kept = utils.get_metrics_context()
    here: Any = utils._metrics_context_tls
    here.metrics_context = utils.MetricsContext(on_exit=lambda *args: None)
    try:
        with tracing(None), compile_context(None):
            yield
    finally:
        here.metrics_context = kept


def known_backends() -> frozenset[str]:
    """The names of every registered Dynamo backend."""
    return frozenset(torch.compiler.list_backends(exclude_tags=None))


def is_known_everywhere(backend: str) -> bool:
    """Whether another process knows a Dynamo backend by that name: torch's own, or that of an installed package."""
    installed = {entry.name for entry in entry_points(group="torch_dynamo_backends")}
    return backend in installed or lookup_backend(backend).__module__.startswith("torch.")


def calling_convention_of(graph: torch.fx.Graph) -> Any:
    """What makes the forward of a module from `graph`: the names and the pytrees of its arguments and results."""
    return graph._codegen
