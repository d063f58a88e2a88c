"""Stand-ins for packages that a repository's files import and that are not installed, or whose import raises.

While files are imported a stand-in takes part in everything: it has every attribute, it can be called, subclassed and
used as a decorator, which then gives back what it decorates. Afterwards a model may hold one, and each use is an error
that names the package.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.roots import PACKAGE, is_users
from attn_fuse.explain.problems import in_one_line

# How deep in a repository a module is sought that an import names.
_DEEPEST = 3
_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_LACKS = re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'")
_HAS_NO = re.compile(r"module '?(?P<module>[\w.]+)'? has no attribute '?(?P<name>\w+)'?")
# Packages that nothing can stand in for.
_KEPT = {"torch", "attn_fuse", "numpy"}


class MissingPackage(ExplainError):
    """The model uses a package that is not installed."""


class MissingAttribute(MissingPackage, AttributeError):
    """An attribute that a missing package would bring; an AttributeError, so that `getattr` may have a default."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every package that a file below `roots` imports, or has imported, and nothing else finds.

    names: the packages stood in for. broken: those of them that are installed, with what their import raises.
    say: is told, once each, what stands in place of what. permissive: whether their use is still allowed.
    """

    def __init__(self, roots: Sequence[Path], say: Callable[[str], object] = lambda note: None) -> None:
        self.roots = tuple(roots)
        self.say = functools.cache(say)
        self.is_users = functools.lru_cache(maxsize=4096)(lambda place: is_users(place, roots))
        self.names: list[str] = []
        self.broken: dict[str, str] = {}
        self.given: list[tuple[types.ModuleType, str]] = []
        self.permissive = True
        self.importer = ""
        self.before = frozenset(sys.modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a stand-in, or None where the file may want to know that the package is missing."""
        top, _, rest = fullname.partition(".")
        if top in self.names or fullname.rpartition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname in _KEPT or not self._wanted():
            return None
        if not rest and (spec := self._in_repository(top, target)) is not None:
            return spec
        # A module that an installed package no longer has, or that a checkout lacks.
        self.names.append(fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name, self)

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    def supplies(self, error: BaseException) -> bool:
        """Give what a file's import lacks; whether it could.

        A name that an installed package no longer has is what one loaded module of that package has by it, else a
        stand-in; a package whose import raises is stood in for.
        """
        found = _LACKS.search(str(error)) or _HAS_NO.search(str(error))
        module = sys.modules.get(found["module"]) if found else None
        if found is not None and module is not None and isinstance(error, (ImportError, AttributeError)):
            return self._gives(module, found["name"], isinstance(error, ImportError))
        # What a library runs at its top level; a compiled module that does not load has no frame of its own.
        frames = traceback.extract_tb(error.__traceback__)
        files = [frame.filename for frame in frames if frame.name == "<module>" and not self.is_users(frame.filename)]
        libraries = [_package_of(file) for file in [*files, str(getattr(error, "path", None) or "")]]
        broken = next((name for name in reversed(libraries) if name is not None), None)
        if broken is None or broken in {*self.names, *self.before} or not isinstance(error, Exception):
            return False
        self.names.append(broken)
        self.broken[broken] = in_one_line(error)
        _forget(broken)
        return True

    def _gives(self, module: types.ModuleType, name: str, may_stand_in: bool) -> bool:
        top = module.__name__.partition(".")[0]
        if self.is_users(str(getattr(module, "__file__", ""))) or name in vars(module):
            return False
        loaded = [other for key, other in list(sys.modules.items()) if key.partition(".")[0] == top]
        values = {id(v): v for other in loaded if callable(v := vars(other).get(name))}
        if len(values) != 1 and (top in _KEPT and not may_stand_in):
            return False
        is_elsewhere = len(values) == 1
        value = next(iter(values.values())) if is_elsewhere else StandIn(f"{module.__name__}.{name}", self)
        setattr(module, name, value)
        how = "it is in another module" if is_elsewhere else "stood in for"
        self.say(f"{module.__name__} has no {name} here: {how}")
        self.given.append((module, name))
        return True

    def _in_repository(self, name: str, target: types.ModuleType | None) -> importlib.machinery.ModuleSpec | None:
        # The file or the folder of that name that lies least deep below the roots, which a script puts on the path; or
        # a root itself, which is imported by the name that it was cloned as.
        folder = _folder_with(name, self.roots, str(Path(self.importer).parent))
        if folder is not None:
            sys.path.append(str(folder))
            finders = [finder for finder in sys.meta_path if finder is not self]
            found = (finder.find_spec(name, [str(folder)], target) for finder in finders)
            return next((spec for spec in found if spec is not None), None)
        root = next((root for root in self.roots if root.name.replace("-", "_") == name), None)
        if root is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(root)]
        return spec

    def _wanted(self) -> bool:
        # Whether a file of the user's imports it, also through a library, and nobody catches the failure. A name that
        # `from` asks an installed package for may be no module.
        importers: list[types.FrameType] = []
        for frame in _frames_of_imports(sys._getframe(2)):
            if frame.f_code.co_name == "find_spec" and frame.f_globals.get("__name__") == "importlib.util":
                return False
            if frame.f_code.co_name == "_handle_fromlist" and not importers:
                return False
            if not frame.f_code.co_filename.startswith("<frozen"):
                importers.append(frame)
        users = [frame for frame in importers if self.is_users(frame.f_code.co_filename)]
        if not users or (not self.permissive and users[0] is not importers[0]):
            return False
        self.importer = users[0].f_code.co_filename
        return not any(map(_may_fail, importers))

    def leave(self) -> None:
        """Take the stand-ins, and the modules that hold one, out of `sys.modules`."""
        for module, name in self.given:
            delattr(module, name)
        for name, module in [*sys.modules.items()] if self.names else ():
            if name not in self.before:
                if _holds_one(module):
                    del sys.modules[name]
                continue
            # What was there before stays, without the parts that it never had.
            for key, value in [*vars(module).items()]:
                if type(value) in (StandIn, _Module):
                    delattr(module, key)


class Broken(importlib.abc.MetaPathFinder):
    """Finds the stand-ins of `finder` for installed packages whose import raised, before anything finds those."""

    def __init__(self, finder: Finder) -> None:
        self.finder = finder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the stand-in, or None."""
        if fullname.partition(".")[0] not in self.finder.broken:
            return None
        return importlib.machinery.ModuleSpec(fullname, self.finder, is_package=True)


class _Module(types.ModuleType):
    # A module of a missing package, with every attribute.

    def __init__(self, name: str, finder: Finder) -> None:
        super().__init__(name)
        self._finder = finder
        self.__path__: list[str] = []
        self.__all__: list[str] = []
        # As new as any check asks for.
        self.__version__ = "999.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}", self._finder)


class StandIn:
    """What stands for a value of a missing package."""

    def __init__(self, name: str, finder: Finder) -> None:
        self._name, self._finder = name, finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}", self._finder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType))
        if is_decorator and self._finder.permissive:
            return args[0]
        if not (self._finder.permissive or _building[0]):
            _refuse(self)
        layer = None if self._finder.permissive else _layer(self._name.rpartition(".")[2])
        if layer is None:
            return StandIn(self._name, self._finder)
        self._finder.say(f"in place of {self._name}: nn.{layer.__name__}")
        known = inspect.signature(layer).parameters
        return layer(*args, **{name: value for name, value in kwargs.items() if name in known})

    def _combined(self, *others: object) -> Any:
        self._use()
        return StandIn(self._name, self._finder)

    __or__ = __ror__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _combined
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __mod__ = __neg__ = _combined
    __lt__ = __le__ = __gt__ = __ge__ = __enter__ = _combined

    def __exit__(self, *problem: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        # As in `type(x) == ListConfig`: a class that is there is none of a missing package.
        if not isinstance(other, type):
            self._use()
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        # A framework's module, as LightningModule, adds to nn.Module what training needs.
        name = self._name.rpartition(".")[2]
        if (layer := _layer(name)) is not None:
            self._finder.say(f"in place of {self._name}: nn.{layer.__name__}")
            return (layer,)
        if not re.fullmatch(r"\w+Module", name):
            return (_base(name, self),)
        self._finder.say(f"in place of {self._name}: nn.Module")
        return (_NamedModule,)

    def __instancecheck__(self, value: object) -> bool:
        return False

    __subclasscheck__ = __instancecheck__

    def __bool__(self) -> bool:
        self._use()
        return True

    def __iter__(self) -> Iterator[Any]:
        self._use()
        return iter(())

    def __len__(self) -> int:
        self._use()
        return 0

    def __index__(self) -> int:
        self._use()
        return 1

    def __repr__(self) -> str:
        return f"<{self._name}, not installed>"

    def _use(self) -> None:
        if not self._finder.permissive:
            _refuse(self)


# How many constructors run, one within another.
_building = [0]


@contextlib.contextmanager
def held_by_models() -> Iterator[None]:
    """Within the block, which builds a model, that may hold what a missing package gives, as a tokenizer."""
    _building[0] += 1
    try:
        yield
    finally:
        _building[0] -= 1


def refuse(cls: type) -> None:
    """Raise MissingPackage where a class of a missing package stands in place of a base of `cls`."""
    stand_in = getattr(cls, "stands_for", None)
    if isinstance(stand_in, StandIn):
        _refuse(stand_in)


def about_stand_ins(error: BaseException) -> MissingPackage | None:
    """The error that names the package, where `error` is about the stand-in of one."""
    trace = error.__traceback__
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if type(value) is StandIn and (StandIn.__name__ in str(error)):
                return _missing(value, "", MissingPackage)
        trace = trace.tb_next
    return None


def _refuse(stand_in: StandIn, attribute: str = "", kind: type[MissingPackage] = MissingPackage) -> NoReturn:
    raise _missing(stand_in, attribute, kind)


def _missing(stand_in: StandIn, attribute: str, kind: type[MissingPackage]) -> MissingPackage:
    name = stand_in._name + attribute
    package = name.partition(".")[0]
    raised = stand_in._finder.broken.get(package)
    if raised is not None:
        return kind(
            f"the model uses {name}, and importing {package} raises {raised}; install a version of {package} that "
            f"fits torch {torch.__version__}"
        )
    if package in stand_in._finder.names:
        return kind(f"the model uses {name}, and {package} is not installed; install {package}")
    return kind(
        f"the model uses {name}, which {package} here does not have; install a version of {package} that has it"
    )


def _layer(name: str) -> type[torch.nn.Module] | None:
    # The layer of torch that a class computes which is called after it and how it is computed: FusedLayerNorm, or in
    # one process, ColumnParallelLinear. None for attention: a report on it would be on torch's code, not the model's.
    plain = re.sub("^(Column|Row|Vocab|Tensor|Model|Parallel|Fused|Fast|Mixed|Memory|Efficient)+", "", name)
    layer = getattr(torch.nn, plain, None) if plain != name and "Attention" not in plain else None
    if not (isinstance(layer, type) and issubclass(layer, torch.nn.Module)):
        return None
    return None if layer.forward is torch.nn.Module.forward else layer


class _NamedModule(torch.nn.Module):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()


def _base(name: str, stand_in: StandIn) -> type:
    # The class that a class of the file inherits in place of the missing one.
    def made(cls: type, *args: object, **kwargs: object) -> object:
        # A dataclass has its own constructor and entries.
        if dataclasses.is_dataclass(cls):
            return object.__new__(cls)
        _refuse(stand_in)

    def absent(self: object, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        _refuse(stand_in, f".{attribute}", MissingAttribute)

    return type(name, (), {"__new__": made, "__getattr__": absent, "stands_for": stand_in})


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _package_of(file: str) -> str | None:
    # The installed package that a file belongs to; None for those that nothing can stand in for.
    parts = Path(file).parts
    if "site-packages" not in parts:
        return None
    name = parts[parts.index("site-packages") + 1].removesuffix(".py")
    return None if name in _KEPT else name


@functools.lru_cache(maxsize=256)
def _folder_with(name: str, roots: tuple[Path, ...], beside: str) -> Path | None:
    found: list[Path] = []
    for root in roots:
        for place, folders, files in os.walk(root):
            is_deep = len(Path(place).relative_to(root).parts) >= _DEEPEST
            has_code = name in folders and next((Path(place) / name).glob("*.py"), None) is not None
            if f"{name}.py" in files or has_code:
                found.append(Path(place))
            folders[:] = [] if is_deep else [f for f in folders if not f.startswith(".") and f != "site-packages"]
    return min(found, key=lambda folder: (str(folder) != beside, len(folder.parts), str(folder)), default=None)


def _holds_one(module: types.ModuleType) -> bool:
    # No isinstance: torch.distributed.reduce_op warns when it is asked for its __class__.
    kinds = (StandIn, _Module)
    return type(module) in kinds or any(type(v) in kinds for v in list(getattr(module, "__dict__", {}).values()))


def _frames_of_imports(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    # The calling frames as far as files are imported, but for those of this package.
    own = str(Path(__file__).parent)
    opens = str(Path(__file__).with_name("open_file.py"))
    while frame is not None:
        file = frame.f_code.co_filename
        if file == opens or (file.startswith(str(PACKAGE)) and not file.startswith(own)):
            return
        if not file.startswith(own):
            yield frame
        frame = frame.f_back


def _may_fail(frame: types.FrameType) -> bool:
    return frame.f_lineno in _lines_that_may_fail(frame.f_code.co_filename)


def is_caught(is_users: Callable[[str], bool]) -> bool:
    """Whether a file of the user's, which imports what runs now, catches an import that fails."""
    frames = _frames_of_imports(sys._getframe(1))
    return any(is_users(frame.f_code.co_filename) and _may_fail(frame) for frame in frames)


@functools.lru_cache(maxsize=256)
def _lines_that_may_fail(file: str) -> frozenset[int]:
    # The lines within a `try` that catches a failed import.
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(map(_catches, node.handlers)):
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or node.body[-1].lineno) + 1))
    return frozenset(lines)


def _catches(handler: ast.ExceptHandler) -> bool:
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else _CAUGHT
    return bool(names & _CAUGHT) and not isinstance(handler.body[-1], ast.Raise)
