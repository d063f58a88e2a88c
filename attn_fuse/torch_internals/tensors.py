"""Private parts of tensors and tracing: fake, functional and symbolic tensors, and the modes around them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


def decompositions(operations: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of these operations; collecting all of core ATen's takes 0.15 s."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(operations))


@contextlib.contextmanager
def on_fake_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """A block whose operations run on the fake tensors of `mode` and keep symbolic sizes symbolic.

    Without the slower Python dispatcher, some versions turn sizes into numbers in composite operations. Higher-order
    operators look up the mode in the tracing context, where they would find Dynamo's.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing

    symbolic = mode.shape_env is not None and bool(mode.shape_env.var_to_range)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with tracing(TracingContext(mode)), mode, enable_python_dispatcher() if symbolic else contextlib.nullcontext():
        # torch logs the traceback of an operation that raises; our refusals say it in words.
        silent, log.disabled = log.disabled, True
        try:
            yield
        finally:
            log.disabled = silent


def functionalized(function: Callable[..., Any], pre_dispatch: bool = False) -> Callable[..., Any]:
    """`function` with values instead of in-place writes, for make_fx with the same `pre_dispatch`.

    Sizes stay symbolic. In-place dropouts would be decomposed.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    return dispatch_functionalize(function, FunctionalTensorMode(pre_dispatch=pre_dispatch))


def current_value(tensor: torch.Tensor) -> torch.Tensor:
    """The current value of `tensor`, an alias of written memory, in a `functionalized` function."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(tensor, FunctionalTensor):
        return tensor
    torch._sync(tensor)
    value: torch.Tensor = torch._from_functional_tensor(tensor.elem)
    return value


@contextlib.contextmanager
def sizes_apart() -> Iterator[None]:
    """A block whose compilations tell two sizes apart even if they are equal on the first call."""
    from torch.fx.experimental import _config

    before, _config.use_duck_shape = _config.use_duck_shape, False
    try:
        yield
    finally:
        _config.use_duck_shape = before


def number_ranges(mode: FakeTensorMode) -> dict[Any, tuple[float, float]]:
    """The guarded (min, max) of each symbol in the shape environment of `mode`; infinite without a guard."""
    if mode.shape_env is None:
        return {}
    return {s: (_as_float(r.lower), _as_float(r.upper)) for s, r in mode.shape_env.var_to_range.items()}


def limit_integer(mode: FakeTensorMode, symbol: Any, most: int) -> bool:
    """Whether -most <= `symbol` <= most on this call, with a guard that recompiles when it changes.

    True also for an integer known only when the program runs, which cannot be guarded.
    """
    environment = mode.shape_env
    if environment is None or not symbol.is_integer or free_unbacked_symbols(symbol):
        return True
    known = environment.var_to_range[symbol]
    low, high = _as_float(known.lower), _as_float(known.upper)
    return bool(
        (high <= most or environment.evaluate_expr(sympy.Le(symbol, most)))
        and (low >= -most or environment.evaluate_expr(sympy.Ge(symbol, -most)))
    )


def interval_of_number(value: Any, ranges: Mapping[Any, tuple[float, float]]) -> tuple[float, float]:
    """Bounds (min, max) of a SymPy expression, by torch's interval arithmetic; infinite where it has no rule.

    ranges: the (min, max) of each symbol. Whole numbers are exact, as Python integers.
    """
    known = {s: ValueRanges(*(_as_sympy(end, bool(s.is_integer)) for end in ends)) for s, ends in ranges.items()}
    try:
        bounds = bound_sympy(value, known)
    except Exception:
        # Its rules raise where a function is not defined on all of a range.
        return -math.inf, math.inf
    return _as_float(bounds.lower), _as_float(bounds.upper)


def _as_float(end: Any) -> float:
    return int(end) if end.is_Integer else float(end)


def _as_sympy(end: float, whole: bool) -> Any:
    if not math.isinf(end):
        return end
    infinity = int_oo if whole else sympy.oo
    return infinity if end > 0 else -infinity


def called_on(expr: sympy.Expr, operands: Sequence[Any], call: Callable[..., Any]) -> Any:
    """The outermost function of `expr`, applied to `operands` for its arguments by `call(function, *arguments)`.

    Raises KeyError for a function unknown to torch.
    """
    from torch.utils._sympy.interp import _run_sympy_handler
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Calls:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            function = getattr(PythonReferenceAnalysis, name)
            return lambda *arguments: call(function, *arguments)

    return _run_sympy_handler(Calls(), list(operands), expr)


def holds_by_guard(condition: bool | torch.SymBool) -> bool:
    """Whether `condition` holds on the first call, with a guard that recompiles when it changes.

    False where no guard is possible, such as for a number read from a tensor in the graph.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without the wrappers of torch.func's levels."""
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def storage_of(tensor: torch.Tensor) -> int:
    """The id of the storage of `tensor`; inside a vmap, that of the whole batch."""
    return int(innermost(tensor).untyped_storage()._cdata)


@contextlib.contextmanager
def saved_tensors_hooks_aside() -> Iterator[None]:
    """A block without the caller's hooks on saved tensors, such as an activation checkpoint's."""
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
    """A block without the caller's dispatch modes, such as a selective checkpoint's, which counts operations."""
    from torch.utils._python_dispatch import _disable_current_modes

    aside: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return aside


@contextlib.contextmanager
def functorch_levels_kept() -> Iterator[None]:
    """A block that restores the vmap, grad and jvp levels, also where it raises."""
    from torch._C import _is_fwd_grad_enabled, _set_fwd_grad_enabled
    from torch._C._functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack_and_undo_to_depth

    depth, forward = get_dynamic_layer_stack_depth(), _is_fwd_grad_enabled()
    try:
        yield
    finally:
        _set_fwd_grad_enabled(forward)
        if get_dynamic_layer_stack_depth() > depth:
            pop_dynamic_layer_stack_and_undo_to_depth(depth)


class _NoHooks(TorchFunctionMode):
    """A mode that rejects tensor hooks and requests for gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if "hook" in name or name in ("retain_grad", "requires_grad_", "backward", "grad", "_make_subclass"):
            raise TypeError(f"it calls {name}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def plain_gradients() -> Iterator[Callable[[Any], Any]]:
    """A block that raises TypeError at a tensor hook, with a function that checks results and returns them.

    The function raises TypeError where an `autograd.Function` makes a gradient of the results.
    """

    def checked(results: Any) -> Any:
        todo: list[Any] = [t.grad_fn for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
        seen = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                raise TypeError(f"the gradient is made by {type(node).__name__}")
            todo += [other for other, _ in node.next_functions]
        return results

    with _NoHooks():
        yield checked


def _gradient_of_clamp_at_its_edge(by_a_tensor: bool) -> float:
    """The gradient of `clamp` for an input equal to its bound, a number or a tensor."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        (gradient,) = torch.autograd.grad(x.clamp(min=torch.zeros(1) if by_a_tensor else 0).sum(), x)
    return float(gradient.item())


# Up to torch 2.13, not in 2.14.1.
CLAMP_PASSES_AT_ITS_EDGE = _gradient_of_clamp_at_its_edge(by_a_tensor=False) > 0
# Like `maximum`, it splits the gradient of a tie with its bound, since torch 2.14.1.
CLAMP_BY_A_TENSOR_SPLITS = 0 < _gradient_of_clamp_at_its_edge(by_a_tensor=True) < 1
