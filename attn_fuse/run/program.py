"""Program: a user's script or module, run as by `python SCRIPT ARGS` or `python -m MODULE ARGS`."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import pkgutil
import runpy
import shlex
import sys
import types
from dataclasses import dataclass
from typing import Any

_HERE = os.path.dirname(__file__) + os.sep
# The functions by which `python -m` and `python FOLDER` find code are private.
_runpy: Any = runpy


class CannotRun(Exception):
    """There is no such program; the message is one line."""


@dataclass(frozen=True)
class Program:
    """A program. argv: the path of a script, folder or archive, or a module's name, then its arguments."""

    argv: tuple[str, ...]
    is_module: bool

    def __str__(self) -> str:
        return ("-m " if self.is_module else "") + shlex.join(self.argv)

    def run(self) -> None:
        """Run the program as the main module, for good. Raises CannotRun, and what the program raises."""
        main = types.ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        sys.argv[:] = self.argv
        code = self._code(main)
        # Spawned workers import the main module, and pickles name its classes.
        sys.modules["__main__"] = main
        exec(code, vars(main))

    def _code(self, main: types.ModuleType) -> types.CodeType:
        """The code of the program; sets the names that Python gives a main module."""
        path, whole = self.argv[0], os.path.abspath(self.argv[0])
        code: types.CodeType
        if self.is_module:
            sys.argv[0] = "-m"  # Python's value while it imports the packages around the module
            _, spec, code = _runpy._get_module_details(path, CannotRun)
            sys.argv[0] = spec.origin
        elif pkgutil.get_importer(whole) is not None:
            _put_on_path(whole)
            _, spec, code = _runpy._get_main_module_details(CannotRun)
        else:
            loader = importlib.machinery.SourceFileLoader("__main__", whole)
            try:
                source = loader.get_data(whole)
            except OSError as error:
                raise CannotRun(f"{path}: {(error.strerror or str(error)).lower()}") from error
            _put_on_path(os.path.dirname(os.path.realpath(path)))
            vars(main).update(__file__=whole, __loader__=loader, __cached__=None)
            # `get_code` would write bytecode beside the script.
            code = loader.source_to_code(source, whole)  # type: ignore[no-untyped-call, unused-ignore]
            return code
        vars(main).update(
            __file__=spec.origin, __loader__=spec.loader, __cached__=spec.cached, __package__=spec.parent, __spec__=spec
        )
        return code


def _put_on_path(folder: str) -> None:
    # Replaces the working directory, which -m put first.
    if not sys.flags.safe_path:
        sys.path[0] = folder


def show_program_frames_alone() -> None:
    """Start the traceback of the exception that ends the program in the program's own code."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen ")):
            trace = trace.tb_next
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = show
