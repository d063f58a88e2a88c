"""Private torch APIs, each under a name that says what it is for; a public name is used elsewhere where one exists.

Tried on torch 2.11.0, 2.13.0 and 2.15.0, on CPU.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.utils import counters
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import FloorDiv, Mod
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "Mod",
    "PassesThroughDynamo",
    "apart_from_dynamo",
    "calling_convention_of",
    "compile_with",
    "compiled_for_any_size",
    "cuda_driver",
    "current_value",
    "decompositions",
    "dispatch_modes_aside",
    "flex_attention",
    "flex_differentiates_what_it_reads",
    "flex_runs_on_cpu",
    "functionalized",
    "graph_break",
    "index_bounds",
    "inductor_door",
    "inductor_modes",
    "inductor_options",
    "innermost",
    "known_backends",
    "lower_bounds",
    "make_fx",
    "on_fake_tensors",
    "open_inductor_door",
    "sdpa_choice",
    "sdpa_switches",
    "source_name",
    "storage_of",
    "trace_artifact",
    "without_inductor_attention",
]

# Part of the key of AOTAutograd's cache for graphs that call our functions: raise it when such a function changes.
__version__ = "1"

# Dynamo wraps an exception of a backend in BackendCompilerFailed, except for this family.
PassesThroughDynamo = ShortenTraceback


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add an artifact to the structured trace of the compilation that runs now, for tlparse.

    text: makes the contents; called only where torch writes a trace, as with TORCH_TRACE=FOLDER.
    """
    trace_structured("artifact", lambda: {"name": name, "encoding": "string"}, payload_fn=text, expect_trace_id=False)


def cuda_driver() -> str:
    """The system's line on NVIDIA's driver and its version, or else the CUDA version of the driver; "" without one."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return str(getattr(torch._C, "_cuda_getDriverVersion", str)())


def decompositions(operations: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of these operations alone: those of all of core ATen take 0.15 s to collect."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(operations))


@contextlib.contextmanager
def on_fake_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """A block whose operations run on the fake tensors of `mode` and keep symbolic sizes symbolic.

    Without the Python dispatcher, which is slower, some versions turn sizes into numbers in composite operations.
    Higher-order operators look up the mode in the tracing context, and would find Dynamo's own there.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing

    symbolic = mode.shape_env is not None and bool(mode.shape_env.var_to_range)
    with tracing(TracingContext(mode)), mode, enable_python_dispatcher() if symbolic else contextlib.nullcontext():
        yield


def functionalized(function: Callable[..., Any], pre_dispatch: bool = False) -> Callable[..., Any]:
    """`function` with values instead of writes in place, for make_fx with the same `pre_dispatch`.

    Sizes stay symbolic. A dropout in place would be taken apart.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    return dispatch_functionalize(function, FunctionalTensorMode(pre_dispatch=pre_dispatch))


def current_value(tensor: torch.Tensor) -> torch.Tensor:
    """The value that `tensor`, an alias of memory that may be written, holds now in a `functionalized` function."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(tensor, FunctionalTensor):
        return tensor
    torch._sync(tensor)
    value: torch.Tensor = torch._from_functional_tensor(tensor.elem)
    return value


@contextlib.contextmanager
def sizes_apart() -> Iterator[None]:
    """A block whose compilations do not take two sizes for the same because they agree on the first call."""
    from torch.fx.experimental import _config

    before, _config.use_duck_shape = _config.use_duck_shape, False
    try:
        yield
    finally:
        _config.use_duck_shape = before


def lower_bounds(mode: FakeTensorMode) -> dict[Any, int]:
    """The min of each size symbol in the shape environment of `mode`, or 0 where it is not known as an integer."""
    if mode.shape_env is None:
        return {}
    return {s: int(r.lower) if r.lower.is_Integer else 0 for s, r in mode.shape_env.var_to_range.items()}


def index_bounds(value: Any, ranges: Mapping[Any, tuple[int, int]]) -> tuple[float, float]:
    """Bounds (min, max) of a SymPy expression over integer symbols. ranges: the (min, max) of each symbol."""
    bounds = bound_sympy(value, {symbol: ValueRanges(*ends) for symbol, ends in ranges.items()})
    return float(bounds.lower), float(bounds.upper)


def source_name(placeholder: torch.fx.Node) -> str:
    """Dynamo's name of the source of a graph input, as in ``L['self']._buffers['bias']``; "" without one."""
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


def left_by_dynamo() -> dict[str, int]:
    """How often Dynamo gave up tracing in this process, by what it said each time."""
    return dict(counters["unimplemented"])


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without the wrappers of torch.func's levels."""
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def storage_of(tensor: torch.Tensor) -> int:
    """The id of the storage that `tensor` lives in; inside a vmap, the storage of the whole batch."""
    return int(innermost(tensor).untyped_storage()._cdata)


@contextlib.contextmanager
def saved_tensors_hooks_aside() -> Iterator[None]:
    """A block without the caller's hooks on saved tensors, such as those of an activation checkpoint."""
    from torch._C._autograd import (
        _pop_saved_tensors_default_hooks,
        _push_saved_tensors_default_hooks,
        _top_saved_tensors_default_hooks,
    )

    hooks = []
    while (top := _top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        _pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _push_saved_tensors_default_hooks(pack, unpack)


def dispatch_modes_aside() -> contextlib.AbstractContextManager[Any]:
    """A block without the caller's dispatch modes, such as that of a selective checkpoint, which counts operations."""
    from torch.utils._python_dispatch import _disable_current_modes

    aside: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return aside


@contextlib.contextmanager
def functorch_levels_kept() -> Iterator[None]:
    """A block that leaves the vmap, grad and jvp levels as they were, also where it raises."""
    from torch._C import _is_fwd_grad_enabled, _set_fwd_grad_enabled
    from torch._C._functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack_and_undo_to_depth

    depth, forward = get_dynamic_layer_stack_depth(), _is_fwd_grad_enabled()
    try:
        yield
    finally:
        _set_fwd_grad_enabled(forward)
        if get_dynamic_layer_stack_depth() > depth:
            pop_dynamic_layer_stack_and_undo_to_depth(depth)


def sdpa_choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> int:
    """The `torch.nn.attention.SDPBackend` that `scaled_dot_product_attention` would run on these real tensors."""
    return int(torch._fused_sdp_choice(query, key, value, mask, dropout_p, is_causal, enable_gqa=enable_gqa))


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: Any,
    scale: float,
    score_read: Sequence[torch.Tensor],
    mask_read: Sequence[torch.Tensor],
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's (out, lse), traceable: its public function, `torch.nn.attention.flex_attention`, compiles itself.

    out: [batch, heads, q_len, value_dim]. lse: [batch, heads, q_len], natural, and valid only where `lse` asks for it.
    block_mask: a `BlockMask`. score_read, mask_read: the tensors that `score_mod` and the mask_mod of `block_mask` are
    given besides the score and its place.
    """
    on_cpu = query.device.type == "cpu"
    options = {
        "BACKEND": "AUTO",
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": not on_cpu and (lse or torch.is_grad_enabled()),
        "OUTPUT_MAX": False,
    }
    # Autocast reaches into the operator and would round query, key and value.
    with torch.autocast(query.device.type, enabled=False):
        out, log2_sum, *_ = torch.ops.higher_order.flex_attention(
            query, key, value, score_mod, block_mask.as_tuple(), scale, options, tuple(score_read), tuple(mask_read)
        )
    return out, log2_sum * math.log(2.0) if lse else log2_sum


def flex_differentiates_what_it_reads() -> bool:
    """Whether FlexAttention, traced, gives a gradient to tensors that its score function reads: since torch 2.15."""
    return bool(torch.__version__ >= "2.15")


def flex_runs_on_cpu() -> bool:
    """Whether Inductor supports FlexAttention on this CPU."""
    from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported

    return bool(check_cpu_supported())


def sdpa_switches() -> tuple[bool, bool, bool, bool]:
    """Whether SDPA may run flash, efficient, math, cuDNN. We ask on every call; the public names are 4 times slower."""
    c = torch._C
    return (
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
    )


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


def _called(graph: torch.fx.GraphModule) -> list[str]:
    """The names of attn_fuse's functions that `graph` calls: AOTAutograd's cache must be told that they are safe."""
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    names = [f"{getattr(t, '__module__', '')}.{getattr(t, '__name__', '')}" for t in targets]
    return sorted({name for name in names if name.startswith("attn_fuse.")})


def known_backends() -> frozenset[str]:
    """The names of every registered Dynamo backend."""
    return frozenset(torch.compiler.list_backends(exclude_tags=None))


def inductor_modes() -> frozenset[str]:
    """The values of torch.compile's `mode` that Inductor knows."""
    return frozenset(torch._inductor.list_mode_options())


def inductor_options() -> dict[str, type | None]:
    """Inductor's options by name, with the type that a value must have; None where it may have several or any."""
    from torch._inductor import config

    types: dict[str, Any] = {name: config.get_type(name) for name in config.get_config_copy()}  # type: ignore[attr-defined]
    return {
        name: wanted if isinstance(wanted, type) and wanted is not type(None) else None
        for name, wanted in types.items()
    }


def compile_with(
    backend: str | Callable[..., Any],
    mode: str | None,
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    inductor: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`graph` compiled for `inputs`. backend: a registered name or a callable. mode: torch.compile's `mode`.

    inductor: options of Inductor, which go before those of the mode; other backends get none.
    """
    if backend == "inductor":
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(inductor or {})}
        if hasattr(config, "unsafe_marked_cacheable_functions"):
            known = config.unsafe_marked_cacheable_functions
            patches["unsafe_marked_cacheable_functions"] = {**known, **dict.fromkeys(_called(graph), __version__)}
        compiled: Any = compile_fx(graph, list(inputs), config_patches=patches)
        return compiled
    function: Callable[..., Any] = lookup_backend(backend) if isinstance(backend, str) else backend
    return function(graph, list(inputs), **({"mode": mode} if mode else {}))


def calling_convention_of(graph: torch.fx.Graph) -> Any:
    """What makes the forward of a module from `graph`: the names and the pytrees of its arguments and results."""
    return graph._codegen


class _ThroughTheDoor(torch._TorchCompileInductorWrapper):
    """What torch.compile makes for the backend "inductor" while a door stands open: it compiles graphs through it.

    Dynamo takes up code that it compiled for an equal backend, so none of these equals a plain one.
    """

    door: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ThroughTheDoor) and self.door == other.door and super().__eq__(other)

    __hash__: Any = None

    def __call__(self, model_: torch.fx.GraphModule, inputs_: Sequence[Any], **patches: Any) -> Callable[..., Any]:
        if _is_stored():
            compiled: Callable[..., Any] = super().__call__(model_, inputs_, **patches)
            return compiled
        through: Callable[..., Any] = self.door(
            model_, inputs_, {**self.config, **(patches.get("config_patches") or {})}
        )
        return through


def _is_stored() -> bool:
    """Whether the result of this compilation will be written to a file: our guards around it cannot be."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    return bool(getattr(functorch, "bundled_autograd_cache", False) or getattr(dynamo, "caching_precompile", False))


_plain: Any = torch._TorchCompileInductorWrapper
_plain_init = _plain.__init__
_door: Any = None


def inductor_door() -> Any:
    """What `open_inductor_door` was called with last; None where no door is open."""
    return _door


def open_inductor_door(door: Callable[..., Callable[..., Any]] | None) -> None:
    """From now on torch.compile's backend "inductor" compiles by `door(graph, inputs, options of Inductor)`.

    None closes it. This is the one place of torch that attn_fuse changes for longer than a block. Backends that
    torch.compile has already made stay as they are, and so do the subclasses of Inductor's.
    """
    global _door
    _door = door

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _plain_init(self, *args, **kwargs)
        if type(self) is _plain:
            self.__class__, self.door = _ThroughTheDoor, door

    _plain.__init__ = _plain_init if door is None else init


def compiled_for_any_size(
    function: Callable[..., Any], examples: Sequence[torch.Tensor]
) -> tuple[Callable[..., Any], Callable[[Sequence[torch.Tensor]], bool]]:
    """`function` compiled by Inductor for symbolic sizes, and a test of whether the result takes given tensors.

    The result checks nothing when it is called: the checks of torch.compile take 0.1 ms. Ask the test first, which
    compares sizes and strides. The caller sees to the rest: the dtypes and devices of `examples`, and the number of
    threads and other global state of now.
    """
    with torch.no_grad(), sizes_apart():
        graph = make_fx(function, tracing_mode="symbolic")(*examples)
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        compiled = compile_with("inductor", None, graph, inputs)
    shapes = inputs[0].fake_mode.shape_env
    guards = shapes.produce_guards_expression(inputs, ignore_static=False)

    def takes(tensors: Sequence[torch.Tensor]) -> bool:
        # The compiled code does not depend on storage offsets, but the guards would compare them.
        alike = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        return guards is None or bool(shapes.evaluate_guards_expression(guards, alike))

    return compiled, takes


@contextlib.contextmanager
def without_inductor_attention(users_pass: Any = None) -> Iterator[None]:
    """Keep Inductor's own attention patterns off the graphs compiled within the block.

    users_pass: Inductor's `joint_custom_post_pass` for the block; None takes that of its config.

    The patterns ignore integers, so they rewrite look-alikes (a softmax over another axis, a permuted key) into wrong
    answers. Each joint-graph pass loses their entries while it runs, and gets them back. A marker in the config keeps
    our graphs apart, in Inductor's caches, from the same graphs compiled outside the block.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.fx_passes import fuse_attention, joint_graph

    def is_attention(entry: Any) -> bool:
        check = getattr(entry, "extra_check", None)
        if not inspect.isfunction(check):
            return False
        search = inspect.getclosurevars(check).nonlocals.get("search_fn")
        return getattr(search, "__module__", None) == fuse_attention.__name__

    class WithoutAttention:
        def __init__(self, passes: Any) -> None:
            self.passes = passes

        def apply(self, graph: Any) -> int:
            before = {key: list(entries) for key, entries in self.passes.patterns.items()}
            for key, entries in before.items():
                self.passes.patterns[key][:] = [entry for entry in entries if not is_attention(entry)]
            try:
                return int(self.passes.apply(graph) or 0)
            finally:
                for key, entries in before.items():
                    self.passes.patterns[key][:] = entries

    given: Any = config.joint_custom_post_pass if users_pass is None else users_pass
    runs = [run for run in (given if isinstance(given, (list, tuple)) else [given]) if run is not None]

    class Marker(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for run in runs:
                run(graph)

        def uuid(self) -> Any:
            return ("attn_fuse: attention patterns off", *(str(run.uuid()) for run in runs))

    # Inductor keeps a graph out of its caches where a pass is a plain callable, which has no key.
    cacheable = all(isinstance(run, CustomGraphPass) and run.uuid() for run in runs)
    marker: Any = Marker() if cacheable else Marker().__call__

    passes: list[Any] = joint_graph.pass_patterns
    originals = list(passes)
    passes[:] = [WithoutAttention(original) for original in originals]
    try:
        with config.patch(joint_custom_post_pass=marker):
            yield
    finally:
        passes[:] = originals


def _clamp_passes_at_its_edge() -> bool:
    """Whether `clamp` has a gradient where its input equals the bound: up to torch 2.14, no longer in 2.15."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        (gradient,) = torch.autograd.grad(x.clamp(min=0).sum(), x)
    return bool(gradient.item())


CLAMP_PASSES_AT_ITS_EDGE = _clamp_passes_at_its_edge()
