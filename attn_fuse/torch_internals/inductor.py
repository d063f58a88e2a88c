"""Private parts of Inductor: compiling with it, its options, its attention patterns, the door to it."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.source import LocalSource
from torch.fx.experimental.proxy_tensor import make_fx

from attn_fuse.torch_internals.tensors import sizes_apart

# Part of the key of AOTAutograd's cache for graphs that call our functions: raise it when such a function changes.
_VERSION = "3"


def _called(graph: torch.fx.GraphModule) -> list[str]:
    """The names of attn_fuse's functions that `graph` calls, to declare safe for AOTAutograd's cache."""
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    names = [f"{getattr(t, '__module__', '')}.{getattr(t, '__name__', '')}" for t in targets]
    return sorted({name for name in names if name.startswith("attn_fuse.")})


def inductor_modes() -> frozenset[str]:
    """The values of torch.compile's `mode` for Inductor."""
    return frozenset(torch._inductor.list_mode_options())


def inductor_options() -> dict[str, type | None]:
    """Inductor's options by name, with the type of their values; None for several or any."""
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
    backward_now: bool = False,
) -> Callable[..., Any]:
    """`graph` compiled for `inputs`. backend: a registered name or a callable. mode: torch.compile's `mode`.

    inductor: options of Inductor, which override those of the mode; other backends get none.
    backward_now: whether Inductor compiles the backward now, with any failure, and not in the first backward.
    """
    if backend == "inductor":
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(inductor or {})}
        if hasattr(config, "unsafe_marked_cacheable_functions"):
            known = config.unsafe_marked_cacheable_functions
            patches["unsafe_marked_cacheable_functions"] = {**known, **dict.fromkeys(_called(graph), _VERSION)}
        # Otherwise the first backward compiles it, and raises its errors. The caller's own setting stays.
        now = {"force_non_lazy_backward_lowering": True} if backward_now else {}
        with torch._functorch.config.patch(now):
            return cast("Callable[..., Any]", compile_fx(graph, list(inputs), config_patches=patches))
    function: Callable[..., Any] = lookup_backend(backend) if isinstance(backend, str) else backend
    compiled: Callable[..., Any] = function(graph, list(inputs), **({"mode": mode} if mode else {}))
    return compiled


class _ThroughTheDoor(torch._TorchCompileInductorWrapper):
    """torch.compile's backend "inductor" while a door is open, which compiles graphs through the door.

    It equals no plain one, because Dynamo reuses code compiled for an equal backend.
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
    """Whether the result of this compilation will be written to a file, which our guards around it cannot be."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    return bool(getattr(functorch, "bundled_autograd_cache", False) or getattr(dynamo, "caching_precompile", False))


_plain: Any = torch._TorchCompileInductorWrapper
_plain_init = _plain.__init__
_door: Any = None


def inductor_door() -> Any:
    """The open door, or None."""
    return _door


def open_inductor_door(door: Callable[..., Callable[..., Any]] | None) -> None:
    """Let torch.compile's backend "inductor" compile by `door(graph, inputs, options of Inductor)`; None closes it.

    Only this changes torch for longer than a block. Existing backends, and subclasses of Inductor's, are unaffected.
    """
    global _door
    _door = door

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _plain_init(self, *args, **kwargs)
        if type(self) is _plain:
            self.__class__, self.door = _ThroughTheDoor, door

    _plain.__init__ = _plain_init if door is None else init


def compiled_for_any_size(
    function: Callable[..., Any], examples: Sequence[torch.Tensor], threads: int | None = None
) -> tuple[Callable[..., Any], Callable[[Sequence[torch.Tensor]], bool]]:
    """`function` compiled by Inductor for symbolic sizes, and a test of whether the result takes given tensors.

    The result checks nothing, since the checks of torch.compile take 0.1 ms. Ask the test first, which compares sizes
    and strides. The caller ensures the dtypes and devices of `examples`, the number of threads and other global state.
    threads: the threads of the result, which releases the interpreter's lock while it runs; None for torch's number,
    under the lock.
    """
    # A C++ wrapper releases the lock, unlike one in Python, and takes a second more to compile.
    options = None if threads is None else {"cpp_wrapper": True, "cpp.threads": threads}
    with torch.no_grad(), sizes_apart():
        graph = make_fx(function, tracing_mode="symbolic")(*examples)
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        compiled = compile_with("inductor", None, graph, inputs, options)
    shapes = inputs[0].fake_mode.shape_env
    # torch's own `produce_guards_expression` omits these brackets, so one guard with an `or` would disable all others.
    sources = [LocalSource(f"t{n}") for n in range(len(inputs))]
    guards = " and ".join(f"({guard})" for guard in shapes.produce_guards(inputs, sources, ignore_static=False))

    def takes(tensors: Sequence[torch.Tensor]) -> bool:
        # The guards would compare storage offsets, which do not matter to the compiled code.
        alike = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        return not guards or bool(shapes.evaluate_guards_expression(guards, alike))

    return compiled, takes


@contextlib.contextmanager
def without_inductor_attention(users_pass: Any = None) -> Iterator[None]:
    """Keep Inductor's own attention patterns off the graphs compiled within the block.

    users_pass: Inductor's `joint_custom_post_pass` for the block; None for its config's.

    The patterns ignore integers, so they rewrite look-alikes (a softmax over another axis, a permuted key) into wrong
    answers. Each joint-graph pass loses their entries while it runs. A marker in the config separates our graphs, in
    Inductor's caches, from the same graphs compiled outside the block.
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
            patterns = self.passes.patterns
            others = {key: [entry for entry in entries if not is_attention(entry)] for key, entries in patterns.items()}
            self.passes.patterns = defaultdict(list, others)
            try:
                return int(self.passes.apply(graph) or 0)
            finally:
                self.passes.patterns = patterns

    given: Any = config.joint_custom_post_pass if users_pass is None else users_pass
    runs = [run for run in (given if isinstance(given, (list, tuple)) else [given]) if run is not None]

    class Marker(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for run in runs:
                run(graph)

        def uuid(self) -> Any:
            return ("attn_fuse: attention patterns off", *(str(run.uuid()) for run in runs))

    # Inductor does not cache graphs with a plain callable as a pass, which has no key.
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
