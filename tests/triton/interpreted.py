"""Tests of Triton kernels on a machine without a GPU.

Triton is told to interpret before it is imported, so such tests run in a process of their own: a module of them has one
test for every other process, `test_in_a_process_that_interprets`, which runs it there.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 from the start")

if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    @functools.cache
    def prepared(function: Any) -> Any:
        """`function` as the interpreter runs it, with what its module calls of Triton's language prepared, too.

        The interpreter would prepare the whole language again for each call of one function from another, a third of
        all its time. The kernel that calls has done so for `tl`, and what is prepared in `tl.core` stays.
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
        """The type of a tuple, worked out when it is asked for: the shape of each tensor is one, and hardly any is."""

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
        """As the interpreter's, which fills a table of all dtypes for each call."""
        element = kind.scalar
        return of_element(element) if type(element) is tl.core.dtype else slow(element)

    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = numpy_dtype
    tl.core._type_for_tuple_values = TupleType


def run_interpreted(file: str) -> None:
    """Run the tests in `file`, but the slow ones, in a process that interprets."""
    if INTERPRETED:
        pytest.skip("runs in that process")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
