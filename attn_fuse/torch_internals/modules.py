"""Private parts of module calls: a look at each call before it is made, and what was compiled of a module."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import GraphModule

# A call of a module runs the value of this attribute instead, which `Module.compile` sets.
_NAME = "_compiled_call_impl"
_ASKING = nn.Module._wrapped_call_impl.__code__

Run = Callable[..., Any]
Look = Callable[[nn.Module, Run | None], Run | None]


class _Looked:
    """The attribute of all modules while their calls are watched; a module keeps its own value."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Run | None:
        own: Run | None = None if module is None else module.__dict__.get(_NAME)
        if module is None or torch.compiler.is_compiling() or sys._getframe(1).f_code is not _ASKING:
            return own
        if get_eval_frame_callback() is not None:  # within code that the author compiles
            return own
        run = self._look(module, own)
        return own if run is None or _is_recorded_or_transformed() else run

    def __set__(self, module: nn.Module, value: Run | None) -> None:
        module.__dict__[_NAME] = value

    def __delete__(self, module: nn.Module) -> None:
        del module.__dict__[_NAME]


# Otherwise Dynamo would compile it where part of a compiled program runs as written.
skip_code(_Looked.__get__.__code__)


@contextlib.contextmanager
def looking_at_module_calls(look: Look) -> Iterator[None]:
    """A block in which `look(module, own)` runs before each call of a module, in any thread.

    own: the module as the author compiled it in place, or None. `look` returns a replacement for the call, or None. The
    replacement is not used under a dispatch mode, nor while torch traces, exports or transforms the program. `look`
    does not run within compiled code.
    """
    before = vars(nn.Module)[_NAME]
    setattr(nn.Module, _NAME, _Looked(look))
    try:
        yield
    finally:
        setattr(nn.Module, _NAME, before)


def in_backward() -> bool:
    """Whether this thread runs a backward pass, in which checkpoints rerun their modules."""
    return torch._C._current_graph_task_id() != -1


def backward_keeps_graph() -> bool:
    """Whether this thread's backward pass has ``retain_graph`` or ``create_graph``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def as_written(module: nn.Module) -> Run:
    """The call of `module` with its hooks, but not as compiled in place."""
    return module._call_impl


def compiled_by_author(module: nn.Module) -> bool:
    """Whether `module` comes from torch.compile or was compiled in place."""
    return isinstance(module, OptimizedModule) or module.__dict__.get(_NAME) is not None


def given_to_compile(module: nn.Module) -> nn.Module:
    """The module behind torch.compile's `module`, or `module` itself."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def _is_recorded_or_transformed() -> bool:
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def eagerly(graph: GraphModule, inputs: object = None) -> Run:
    """`graph`, changed to run operation by operation like the Python code that Dynamo captured.

    Dynamo's form of a checkpoint leaves random numbers to a compiler, so uncompiled, its backward would draw others.
    """
    for part in graph.modules():
        if isinstance(part, GraphModule):
            for call in part.graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
                call.target = _checkpoint
            part.recompile()
    return graph


def _checkpoint(body: nn.Module, *args: Any, **kwargs: Any) -> Any:
    options, given = tag_activation_checkpoint.divide_kwargs(kwargs)
    selection = getattr(body, "meta", {}).get("_checkpoint_context_fn")
    options = {"use_reentrant": False, "determinism_check": options.get("determinism_check", "default")}
    if selection is not None:
        options["context_fn"] = selection
    return torch.utils.checkpoint.checkpoint(body, *args, **options, **given)


def going_on_where_compiling_fails() -> contextlib.AbstractContextManager[None]:
    """A block in which Dynamo runs frames that fail to compile as written.

    NumPy's random numbers stay NumPy's, and weak references to inputs are dropped, as for torch's backends.
    """
    config: Any = torch._dynamo.config
    wanted = {"suppress_errors": True, "use_numpy_random_stream": True, "invalidate_compile_context_weakrefs": True}
    block: contextlib.AbstractContextManager[None] = config.patch(
        {k: v for k, v in wanted.items() if hasattr(config, k)}
    )
    return block
