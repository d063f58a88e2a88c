"""An emulator of Gluon kernels for Hopper GPUs on the CPU: `emulate` runs a kernel's Python on Triton's interpreter.

Only one partition of warps runs at a time. At every operation on shared memory or a barrier, random numbers choose what
goes on next: a partition, a copy by TMA, or a product of a warpgroup. A seed fixes the order, so faults repeat.

Most faults show in every order. Each access to shared memory has a number, and each partition knows the numbers of the
accesses that have ended for it: its own, the copies and products it waited for, and those known to the partitions whose
arrivals completed a phase it waited for. An access that conflicts with an unknown access is a fault.

Layouts and types are left to the compiler, and missing fences go unnoticed. Global memory has no log, but accesses
outside the tensors are faults. Clusters and copies from shared memory by TMA are not emulated. As in the interpreter, a
maximum ignores NaN, and bfloat16 is rounded towards 0.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import random
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from torch.utils import _pytree as pytree
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import interpreter

from tests.triton import interpreted
from tests.triton.gluon_machine import (
    Descriptor,
    Shared,
    allocate_shared_memory,
    arrive,
    async_copy_global_to_shared,
    begin,
    expect,
    init,
    invalidate,
    number,
    wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)


def emulate(kernel: Any, grid: int | tuple[int, ...], *arguments: Any, seed: int = 0, **constants: Any) -> None:
    """Run `kernel`, a gluon.jit function, for each program of `grid`, one after another.

    arguments: CPU tensors, which are written in place, descriptors of them, numbers, and tuples of these. constants:
    other arguments by name. seed: chooses the order of simultaneous events.

    Raises Fault if the kernel misuses shared memory or barriers.
    """
    assert interpreted.INTERPRETED, "needs TRITON_INTERPRET=1 from the start"
    bound = inspect.signature(kernel.fn).bind(*arguments, **constants)
    bound.apply_defaults()
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    given = {name: emulated(x) if name in fixed else argument(x) for name, x in bound.arguments.items()}
    x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    interpreted.memory = interpreted.Memory(
        leaf for leaf in pytree.tree_leaves(list(bound.arguments.values())) if isinstance(leaf, torch.Tensor)
    )
    scope = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl}))
    # Kernels load shared memory with a tensor's layout.
    scope.set_attr(tl.core.dtype, "layout", None)
    try:
        interpreter.interpreter_builder.set_grid_dim(x, y, z)
        for program in itertools.product(range(x), range(y), range(z)):
            interpreter.interpreter_builder.set_grid_idx(*program)
            machine = begin(random.Random(f"{seed} {program}"))
            try:
                machine.run(Function(kernel), tuple(given.values()))
            except Exception as problem:
                problem.add_note(f"in program {program}, seed {seed}")
                raise
    finally:
        scope.restore()


# ---- the language


def argument(x: Any) -> Any:
    """A kernel's argument as Triton's interpreter would pass it."""
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, tuple):
        return interpreter._tuple_create(x, map(argument, x))
    if isinstance(x, float):
        return interpreter.interpreter_semantic.to_tensor(x)
    return emulated(interpreter._implicit_cvt(x))


def loop(*bounds: Any) -> Iterator[Any]:
    """`range` in a kernel, which counts in tensors."""
    return map(interpreter.interpreter_semantic.to_tensor, builtins.range(*map(number, bounds)))


def assigned(value: Any, name: str) -> Any:
    """`value` as the variable `name` holds it, with numbers as tensors."""
    if isinstance(value, Shared) and value.name.startswith("allocation "):
        value.name = name
    if type(value) is tuple:
        return tuple(assigned(x, name) for x in value)
    return interpreter.interpreter_semantic.to_tensor(value, False)


class Assignments(ast.NodeTransformer):
    """Passes every assigned value through `assigned`."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        name = ast.Constant(", ".join(ast.unparse(target) for target in node.targets))
        node.value = ast.Call(ast.Name("_assigned", ast.Load()), [node.value, name], [])
        return node


class Function:
    """A gluon.jit function that can be called in the emulator."""

    def __init__(self, function: Any) -> None:
        self.fn, self.__name__ = function.fn, function.fn.__name__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return python_of(self.fn)(*arguments, **named)


@functools.cache
def python_of(fn: Any) -> Any:
    lines, first = inspect.getsourcelines(fn)
    module = ast.parse(textwrap.dedent("".join(lines)))
    definition = module.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list.clear()
    module = ast.increment_lineno(ast.fix_missing_locations(Assignments().visit(module)), first - 1)
    names = {"_assigned": assigned, "range": loop}
    names |= {name: emulated(x) for name, x in (fn.__globals__ | inspect.getclosurevars(fn).nonlocals).items()}
    exec(compile(module, inspect.getfile(fn), "exec"), names)
    return names[fn.__name__]


def emulated(x: Any) -> Any:
    """`x`, or its replacement in the emulator."""
    if isinstance(x, GluonJITFunction):
        return Function(x)
    return next((ours for theirs, ours in EMULATED if theirs is x), x)


class Language:
    """`triton.experimental.gluon.language`, mostly Triton's own language, without layouts."""

    allocate_shared_memory = staticmethod(allocate_shared_memory)
    warp_specialize = staticmethod(warp_specialize)
    nvidia: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name) if hasattr(tl, name) else getattr(gl, name)

    def arange(self, start: Any, end: Any, layout: Any = None) -> Any:
        return tl.arange(start, end)

    def full(self, shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.full(shape, value, dtype)

    def zeros(self, shape: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.full(shape, 0, dtype)

    def full_like(self, x: Any, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Any:
        return tl.full(shape or x.shape, value, dtype or x.dtype)

    def zeros_like(self, x: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Any:
        return self.full_like(x, 0, shape, dtype)

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return value

    def set_auto_layout(self, value: Any, layout: Any) -> Any:
        return value

    def thread_barrier(self) -> None:
        """Do nothing, because a partition is one thread here."""


def fence_async_shared(cluster: Any = False) -> None:
    """Do nothing; missing fences go unnoticed."""


def within(module: Any, *replaced: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**vars(module) | {function.__name__: function for function in replaced})


_mbarrier = within(hopper.mbarrier, init, invalidate, expect, arrive, wait)
_tma = within(hopper.tma, async_copy_global_to_shared)
_products = (fence_async_shared, warpgroup_mma, warpgroup_mma_wait)
_hopper = within(hopper, *_products)
_hopper.mbarrier, _hopper.tma = _mbarrier, _tma
Language.nvidia = types.SimpleNamespace(hopper=_hopper)
EMULATED = [
    (gl, Language()),
    (hopper, _hopper),
    (hopper.mbarrier, _mbarrier),
    (hopper.tma, _tma),
    (hopper.tma.async_copy_global_to_shared, async_copy_global_to_shared),
    *((getattr(hopper, function.__name__), function) for function in _products),
    *((getattr(hopper.mbarrier, f.__name__), f) for f in (init, invalidate, expect, arrive, wait)),
]
