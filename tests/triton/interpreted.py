"""Tests of Triton kernels on a machine without a GPU.

Triton must be told to interpret before it is imported, so test_interpreted.py runs these tests in processes of their
own. `TRITON_INTERPRET=1 pytest tests/triton/test_flash.py` runs those of one file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 from the start")

if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    @functools.cache
    def prepared(function: Any) -> Any:
        """`function` as the interpreter runs it, with the parts of Triton's language that its module uses.

        The interpreter would spend a third of its time preparing the whole language at every call from one function to
        another. The calling kernel has prepared `tl` already, and changes of `tl.core` stay.
        """
        if any(value is tl.core for value in function.fn.__globals__.values()):
            interpreter._patch_lang(function.fn)
        return function.rewrite()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return prepared(function)(*args, **kwargs)
        except Exception as problem:
            raise interpreter.InterpreterError(repr(problem)) from problem

    class TupleType(tl.core.tuple_type):
        """The type of a tuple, computed on demand, because every tensor's shape is a tuple and few types are needed."""

        def __init__(self, values: Any, fields: Any = None) -> None:
            self._values, self._fields = values, fields

        @functools.cached_property
        def _known(self) -> Any:
            return tl.core.tuple_type(*known(self._values, self._fields))

        types = property(lambda self: self._known.types)
        fields = property(lambda self: self._known.fields)
        name = property(lambda self: self._known.name)

    def known(values: Any, fields: Any) -> tuple[list[Any], Any]:
        given = (int, float, tl.core.dtype)
        return [tl.core.constexpr_type(x) if isinstance(x, given) else x.type for x in values], fields

    slow = interpreter._get_np_dtype
    of_element = functools.cache(slow)

    def numpy_dtype(kind: Any) -> Any:
        """Like the interpreter's function, which fills a table of all dtypes at each call."""
        element = kind.scalar
        return of_element(element) if type(element) is tl.core.dtype else slow(element)

    class Memory:
        """The memory that a kernel may touch: from the first to the last byte of each tensor argument.

        A GPU stops a kernel only when it leaves mapped memory, so most reads beyond a tensor go unnoticed there.
        """

        def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
            merged: list[list[int]] = []
            for begin, end in sorted(extent(tensor) for tensor in tensors if tensor.numel()):
                if merged and begin <= merged[-1][1]:
                    merged[-1][1] = max(merged[-1][1], end)
                else:
                    merged.append([begin, end])
            self._begins, self._ends = np.array(merged, dtype=np.int64).reshape(-1, 2).T

        def check(self, pointers: Any, active: Any) -> None:
            """Raise IndexError if any of the `active` pointers is outside."""
            size = pointers.get_element_ty().primitive_bitwidth // 8
            begins = pointers.data[np.broadcast_to(active.data, pointers.data.shape)].astype(np.int64)
            of = np.searchsorted(self._begins, begins, "right") - 1
            outside = (of < 0) | (begins + size > self._ends[of])
            if outside.any():
                begin = begins[outside][0]
                gap = min(np.abs(self._begins - begin).min(), np.abs(self._ends - begin).min())
                raise IndexError(f"{outside.sum()} of {begins.size} elements are outside, the first by {gap} bytes")

    def extent(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize

    memory = Memory([])
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    arguments_of, load_of, store_of = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def arguments(self: Any, given: Any, named: Any) -> Any:
        global memory
        on_host = arguments_of(self, given, named)
        memory = Memory(x for x in pytree.tree_leaves(on_host) if isinstance(x, torch.Tensor))
        return on_host

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        memory.check(pointers, mask)
        return load_of(self, pointers, mask, *others)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        memory.check(pointers, mask)
        return store_of(self, pointers, value, mask, *others)

    executor._init_args_hst = arguments
    builder.create_masked_load, builder.create_masked_store = load, store
    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = numpy_dtype
    tl.core._type_for_tuple_values = TupleType
