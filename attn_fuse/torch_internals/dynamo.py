"""Private parts of Dynamo: its records of a graph, its errors and its backends."""

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

# Dynamo wraps exceptions of a backend in BackendCompilerFailed, except this family.
PassesThroughDynamo = ShortenTraceback
# Not a failure: Dynamo traces the frame again.
RestartsDynamo = RestartAnalysis


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add an artifact to the structured trace of the current compilation, for tlparse.

    text: makes the contents; called only where torch writes a trace, as under TORCH_TRACE=FOLDER.
    """
    trace_structured("artifact", lambda: {"name": name, "encoding": "string"}, payload_fn=text, expect_trace_id=False)


# The key in a graph input's records under which our graphs keep the name of its source.
SOURCE = "attn_fuse_source"


def name_sources(graph: torch.fx.Graph) -> None:
    """Replace Dynamo's records of the inputs of `graph` by their names.

    Dynamo's record has a weak reference to the tensor, for which `torch.utils.swap_tensors` would refuse it.
    """
    for placeholder in graph.find_nodes(op="placeholder"):
        name = source_name(placeholder)
        placeholder.meta = {key: value for key, value in placeholder.meta.items() if key != "grapharg"}
        if name:
            placeholder.meta[SOURCE] = name


def source_name(placeholder: torch.fx.Node) -> str:
    """Dynamo's name for the source of a graph input, such as ``L['self']._buffers['bias']``; "" without one."""
    if (kept := placeholder.meta.get(SOURCE)) is not None:
        return str(kept)
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None:
        source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def graph_break(graph: torch.fx.GraphModule) -> tuple[str, str] | None:
    """(Dynamo's reason, the formatted stack) of the graph break that ends `graph`; None without one."""
    ended: Any = getattr(graph, "compile_subgraph_reason", None)
    if not getattr(ended, "graph_break", False):
        return None
    return str(ended.reason), "".join(traceback.format_list(ended.user_stack))


def frames_of_break(graph: torch.fx.GraphModule) -> tuple[traceback.FrameSummary, ...]:
    """The frames of the graph break that ends `graph`, innermost last.

    Empty without a break, and where Dynamo resumes in the innermost frame, which leaves no code as written.
    """
    if graph_break(graph) is None or getattr(torch._dynamo.config, "nested_graph_breaks", False):
        return ()
    ended: Any = graph.compile_subgraph_reason
    return tuple(ended.user_stack)


@dataclass(frozen=True)
class LeftFunction:
    """A function that Dynamo runs as written, since it cannot resume after a break, as in a loop or a generator.

    name, file, line: its definition. reason: Dynamo's full reason for the break, which lies at at_file, at_line.
    """

    name: str
    file: str
    line: int
    reason: str
    at_file: str
    at_line: int


def left_by_dynamo(since: float) -> tuple[LeftFunction, ...]:
    """The functions that Dynamo left as written since a `time.time`, among its last 64 compilations."""
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
    """A block in a backend that compiles and runs other graphs as if Dynamo were not compiling.

    Without it AOTAutograd would use the fake tensors of Dynamo's graph, and a backward compiled on its first run would
    find its metrics already set.
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
    """The names of all registered Dynamo backends."""
    return frozenset(torch.compiler.list_backends(exclude_tags=None))


def is_known_everywhere(backend: str) -> bool:
    """Whether other processes know this Dynamo backend, because it is torch's or an installed package's."""
    installed = {entry.name for entry in entry_points(group="torch_dynamo_backends")}
    return backend in installed or lookup_backend(backend).__module__.startswith("torch.")


def calling_convention_of(graph: torch.fx.Graph) -> Any:
    """The code generator of `graph`, with the names and pytrees of its arguments and results."""
    return graph._codegen
