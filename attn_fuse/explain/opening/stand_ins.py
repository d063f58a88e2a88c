"""Stand-ins for packages that are missing, or whose import raises.

While files are imported, a stand-in takes any use: it has every attribute and can be called, subclassed, and used as a
decorator, which returns what it decorates. Afterwards a model may hold one, but using it is an error that names the
package.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.roots import files_of
from attn_fuse.explain.problems import in_one_line

# How deep in a repository the module of an import is sought.
_DEEPEST = 3
# Packages without a stand-in.
_KEPT = {"torch", "attn_fuse", "numpy"}


class MissingPackage(ExplainError):
    """The model uses a package that is not installed."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for packages that the file at `path` imports, directly or through files and libraries.

    roots: the folders of the user's files. names: the packages that have a stand-in. broken: those among them that are
    installed, with the errors of their import. say: receives a note, once, on each value that is replaced.
    permissive: whether stand-ins may be used.
    """

    def __init__(self, path: Path, roots: Sequence[Path], say: Callable[[str], object]) -> None:
        self.path, self.roots, self.say = path, tuple(roots), say
        self.names: list[str] = []
        self.broken: dict[str, str] = {}
        self.permissive = True
        self.before = frozenset(sys.modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a stand-in or of a module below one; None for other modules."""
        is_one = any(f"{fullname}.".startswith(f"{name}.") for name in self.names)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_one else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return StandIn(spec.name, self)

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    def supplies(self, error: BaseException) -> bool:
        """Provide what a file's import lacks, if possible; whether it was.

        The folder of the repository that holds a missing module joins the path. Other missing packages get a stand-in,
        and so does a package whose import raises.
        """
        chain = (error, error.__context__)
        absent = next((one.name for one in chain if isinstance(one, ModuleNotFoundError) and one.name), None)
        if absent is not None:
            return self._finds(absent)
        # The library whose top level ran last. A compiled module that does not load has no frame, but a path.
        frames = traceback.extract_tb(error.__traceback__)
        files = [frame.filename for frame in frames if frame.name == "<module>"]
        libraries = [_package_of(file) for file in [*files, str(getattr(error, "path", None) or "")]]
        broken = next((name for name in reversed(libraries) if name is not None), None)
        if broken is None or broken in {*self.names, *self.before} or not isinstance(error, Exception):
            return False
        self.names.append(broken)
        self.broken[broken] = in_one_line(error)
        for name in [name for name in sys.modules if name.partition(".")[0] == broken]:
            del sys.modules[name]
        spec = importlib.machinery.ModuleSpec(broken, self, is_package=True)
        sys.modules[broken] = importlib.util.module_from_spec(spec)
        return True

    def _finds(self, name: str) -> bool:
        folder = None if "." in name else _folder_with(name, self.roots, self.path)
        if folder is not None and str(folder) not in sys.path:
            sys.path.append(str(folder))
            return True
        if name in _KEPT or name in self.names:
            return False
        # A name with a dot is a module that an installed package no longer has, or that a checkout lacks.
        self.names.append(name)
        return True

    def leave(self) -> None:
        """Take the stand-ins, and the modules that hold one, out of `sys.modules`."""
        modules: list[tuple[str, Any]] = [*sys.modules.items()] if self.names else []
        for name, module in modules:
            # No isinstance: torch.distributed.reduce_op warns when it is asked for its __class__.
            values = [*getattr(module, "__dict__", {}).items()]
            held = [key for key, value in values if type(value) is StandIn]
            if name in self.before:
                for key in held:
                    delattr(module, key)
            elif held or type(module) is StandIn:
                del sys.modules[name]


class StandIn:
    """Stands for a missing package, or for a value of one: it has every attribute."""

    # As new as any check asks for.
    __version__ = "999.0.0"
    # Whether a model is being built, which may hold stand-ins.
    _is_held = False

    def __init__(self, name: str, finder: Finder) -> None:
        self._name, self._finder = name, finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}", self._finder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._finder.permissive or self._is_held):
            raise _missing(self)
        is_decorator = len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType))
        return args[0] if is_decorator and self._finder.permissive else StandIn(self._name, self._finder)

    def _combined(self, *others: object) -> Any:
        self._use()
        return StandIn(self._name, self._finder)

    __or__ = __ror__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _combined
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __mod__ = __neg__ = _combined
    __lt__ = __le__ = __gt__ = __ge__ = __enter__ = _combined

    def __exit__(self, *problem: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        # `type(x) == ListConfig` is false: no object belongs to a class of a missing package.
        if not isinstance(other, type):
            self._use()
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        name = self._name.rpartition(".")[2]
        if not re.fullmatch(r"\w+Module", name):
            return (type(name, (_Base,), {"stands_for": self}),)
        # A framework's module, such as LightningModule, adds to nn.Module what training needs.
        self._finder.say(f"in place of {self._name}: nn.Module")
        return (_NamedModule,)

    def __instancecheck__(self, value: object) -> bool:
        return False

    __subclasscheck__ = __instancecheck__

    def __bool__(self) -> bool:
        self._use()
        return True

    def __iter__(self) -> NoReturn:
        raise _missing(self)

    __len__ = __index__ = __iter__

    def __repr__(self) -> str:
        return f"<{self._name}, not installed>"

    def _use(self) -> None:
        if not self._finder.permissive:
            raise _missing(self)


class _NamedModule(nn.Module):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()


class _Base:
    # Stands in for a missing base class. Only a dataclass may be made without it: it has its own constructor.
    stands_for: StandIn

    def __new__(cls, *args: object, **kwargs: object) -> _Base:
        if not dataclasses.is_dataclass(cls):
            raise _missing(cls.stands_for)
        return object.__new__(cls)


def held_by_models() -> AbstractContextManager[object]:
    """A block that builds a model, which may hold what a missing package gives, such as a tokenizer."""
    return patch.object(StandIn, "_is_held", True)


def refuse(cls: type) -> None:
    """Raise MissingPackage where a base of `cls` belongs to a missing package."""
    if issubclass(cls, _Base):
        raise _missing(cls.stands_for)


def about_stand_ins(error: BaseException) -> MissingPackage | None:
    """The error that names the package, where `error` is about the type of a stand-in."""
    frames = traceback.walk_tb(error.__traceback__) if StandIn.__name__ in str(error) else ()
    values = (value for frame, _ in frames for value in frame.f_locals.values())
    return next((_missing(value) for value in values if type(value) is StandIn), None)


def _missing(stand_in: StandIn) -> MissingPackage:
    name, finder = stand_in._name, stand_in._finder
    package = name.partition(".")[0]
    if package in finder.broken:
        why = f"and importing {package} raises {finder.broken[package]}; install another version of {package}"
    elif package in finder.names:
        why = f"and {package} is not installed; install {package}"
    else:
        why = f"which the installed {package} lacks; install another version of {package}"
    return MissingPackage(f"the model uses {name}, {why}")


def _package_of(file: str) -> str | None:
    # The installed package that a file belongs to; None if it has no stand-in.
    parts = Path(file).parts
    if "site-packages" not in parts:
        return None
    name = parts[parts.index("site-packages") + 1].partition(".")[0]
    return None if name in _KEPT else name


def _folder_with(name: str, roots: Sequence[Path], path: Path) -> Path | None:
    # The folder with a module of a name that is nearest to the file at `path`.
    found = [root.parent for root in roots if root.name == name]
    for root in roots:
        for place, folders, files in os.walk(root):
            is_deep = len(Path(place).relative_to(root).parts) >= _DEEPEST
            if f"{name}.py" in files or (name in folders and files_of(Path(place, name), ".py")):
                found.append(Path(place))
            folders[:] = [] if is_deep else [f for f in folders if not f.startswith(".") and f != "site-packages"]

    def rank(folder: Path) -> tuple[int, int, str]:
        return -len(os.path.commonpath([folder, path])), len(folder.parts), str(folder)

    return min(found, key=rank, default=None)
