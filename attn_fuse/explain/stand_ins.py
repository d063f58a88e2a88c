"""Stand-ins for packages that a model's file imports and that are not installed, or whose import raises.

While files are imported a stand-in takes part in everything: it has every attribute, it can be called, subclassed and
used as a decorator, which then gives back what it decorates. Afterwards each use is an error that names the package,
but for a layer that torch has too.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.older import moved_module
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.roots import is_users
from attn_fuse.explain.torch_layers import of_one_process, same_layer

OWN = str(Path(__file__).parents[1])
# How deep in a repository a module is sought that an import names.
DEEPEST = 3
# What packages are called on the package index, where that is not what they are imported as.
ON_INDEX = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
    "torch_scatter": "torch-scatter",
    "ml_collections": "ml-collections",
    "x_transformers": "x-transformers",
    "rotary_embedding_torch": "rotary-embedding-torch",
}
CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
# Loaders that each belong to one module.
OF_ONE_FILE = (
    importlib.machinery.SourceFileLoader,
    importlib.machinery.SourcelessFileLoader,
    importlib.machinery.ExtensionFileLoader,
)
NO_OPERATOR = re.compile(r"operator (?P<namespace>\w+)::(?P<name>\w+) does not exist")
LACKS = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
# Packages that nothing can stand in for.
KEPT = {"torch", "attn_fuse"}


class MissingPackage(ExplainError):
    """The model uses a package that is not installed."""


class MissingAttribute(MissingPackage, AttributeError):
    """An attribute that a missing package would bring; an AttributeError, so that `getattr` may have a default."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every top-level package that a file below `roots` imports and nothing else finds.

    names: the packages stood in for. broken: those of them that are installed, with what their import raises.
    permissive: whether their use is still allowed. say: is told, once each, what torch's own layers stand in for, and
    which modules have moved.
    """

    def __init__(self, roots: Sequence[Path], say: Callable[[str], object] = lambda note: None) -> None:
        self.roots = tuple(roots)
        self.is_users = functools.lru_cache(maxsize=4096)(lambda place: is_users(place, roots))
        self.say = functools.lru_cache(maxsize=None)(say)
        self.names: list[str] = []
        self.defined: list[str] = []
        self.lacking: list[tuple[types.ModuleType, str]] = []
        self.broken: dict[str, str] = {}
        self.permissive = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a stand-in, or None where the file may want to know that the package is missing."""
        top = fullname.partition(".")[0]
        if top in self.names or fullname.rpartition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if not self.wanted():
            return None
        if "." in fullname:
            places = self._users_places(fullname)
            name = fullname.rpartition(".")[2]
            if (file := next(filter(None, (_file_that_defines(name, place) for place in places)), None)) is not None:
                self.defined.append(fullname)
                self.say(f"{fullname} is what {file.name} defines")
                return importlib.machinery.ModuleSpec(fullname, _Defined(file.stem))
            if not places:
                moved = moved_module(fullname)
                if moved is None:
                    return None
                self.say(f"{fullname} is {moved} by now")
                return importlib.machinery.ModuleSpec(fullname, _Moved(moved), is_package=True)
            self.names.append(fullname)
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if (folder := _folder_with(fullname, self.roots)) is not None:
            # A script of the repository puts this folder on the path.
            sys.path.append(str(folder))
            finders = [finder for finder in sys.meta_path if finder is not self]
            return next(filter(None, (finder.find_spec(fullname, [str(folder)], target) for finder in finders)), None)
        self.names.append(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def supplies(self, error: ImportError) -> bool:
        """Give an installed module the name that an import found it to lack; whether it could.

        It is what a loaded module of the same package has by that name, where that is one value, else a stand-in.
        """
        found = LACKS.search(str(error))
        module = sys.modules.get(found[2]) if found else None
        top = found[2].partition(".")[0] if found else ""
        file = getattr(module, "__file__", None)
        if found is None or module is None or file is None or self.is_users(file) or found[1] in vars(module):
            return False
        loaded = [other for name, other in sys.modules.items() if name.partition(".")[0] == top]
        values = {id(v): v for other in loaded if (v := vars(other).get(found[1])) is not None and callable(v)}
        if len(values) == 1:
            self.say(f"{found[2]}.{found[1]} is in another module by now")
            setattr(module, found[1], *values.values())
        else:
            self.say(f"{top} has no {found[2]}.{found[1]} any more: stood in for")
            setattr(module, found[1], _StandIn(f"{found[2]}.{found[1]}", self))
        self.lacking.append((module, found[1]))
        return True

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name, self)

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    def _users_places(self, fullname: str) -> list[Path]:
        # The folders of the user's package that lacks the module: a git submodule was not fetched, the files are to be
        # copied into an installed package, or the folder itself was on the path.
        parent = sys.modules.get(fullname.rpartition(".")[0])
        places = list(getattr(parent, "__path__", ()))
        return [Path(place) for place in places] if all(map(self.is_users, places)) else []

    def wanted(self, is_installed: bool = False) -> bool:
        """Whether a file of the user's imports what the caller's caller looks for, and no importer catches the failure.

        It may import it through a library, as torch.utils.tensorboard; `try: import x` must fail. is_installed: the
        package is there, and its import raises. A library that asked whether it is there counts on it, so that of the
        library's files only that which imports it can have a way without.
        """
        frame, is_users, is_nearest = sys._getframe(2), False, True
        while frame is not None:
            file = frame.f_code.co_filename
            if file == __file__:
                frame = frame.f_back  # type: ignore[assignment]
                continue
            if frame.f_code.co_name == "find_spec" and frame.f_globals.get("__name__") == "importlib.util":
                return False
            if file.startswith(OWN):
                break
            if not file.startswith("<frozen"):
                is_users = is_users or self.is_users(file)
                counts = not is_installed or is_nearest or self.is_users(file)
                is_caught = counts and frame.f_lineno in _lines_that_may_fail(file)
                if (not is_users and not self.permissive) or is_caught:
                    return False
                is_nearest = False
            frame = frame.f_back  # type: ignore[assignment]
        return is_users


class _Moved(importlib.abc.Loader):
    # Loads a module under the name that it had in an older version of its package.

    def __init__(self, now: str) -> None:
        self.now = now

    def exec_module(self, module: types.ModuleType) -> None:
        names = vars(importlib.import_module(self.now))
        vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})


class _Defined(importlib.abc.Loader):
    # Loads what a module of the package defines: `from utils import f`, where the folder utils, which holds the file
    # that defines f, was on the path.

    def __init__(self, module: str) -> None:
        self.module = module

    def exec_module(self, module: types.ModuleType) -> None:
        package, _, name = module.__name__.rpartition(".")
        sys.modules[module.__name__] = getattr(importlib.import_module(f"{package}.{self.module}"), name)


class _Guard(importlib.abc.MetaPathFinder):
    # Finds installed packages as the finders after it do. One whose import raises, as that of a compiled package does
    # that was built for another torch, is as one that is not installed: `finder` stands in for it, or an importer that
    # can do without it gets an ImportError.

    def __init__(self, finder: Finder) -> None:
        self.finder = finder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if path is not None or top in sys.stdlib_module_names or top in KEPT:
            return None
        others = [other for other in sys.meta_path if other is not self and other is not self.finder]
        spec = next(filter(None, (other.find_spec(fullname, path, target) for other in others)), None)
        # Other loaders may be shared by several modules, and must not change.
        if spec is None or not isinstance(spec.loader, OF_ONE_FILE) or self.finder.is_users(str(spec.origin)):
            return None
        self._guard(spec.loader, fullname)
        return spec

    def _guard(self, loader: Any, name: str) -> None:
        create, run = loader.create_module, loader.exec_module

        def creates(spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
            try:
                made: types.ModuleType | None = create(spec)
            except Exception as error:
                if not self.finder.wanted(is_installed=True):
                    raise ImportError(f"importing {name} raises {in_one_line(error)}") from error
                return self._stood_in(name, error)
            return made

        def runs(module: types.ModuleType) -> None:
            if isinstance(module, _StandInModule):
                return
            try:
                self._run(run, module)
            except Exception as error:
                if not self.finder.wanted(is_installed=True):
                    raise ImportError(f"importing {name} raises {in_one_line(error)}") from error
                _forget(name)
                sys.modules[name] = self._stood_in(name, error)

        loader.create_module, loader.exec_module = creates, runs

    def _run(self, run: Callable[[types.ModuleType], object], module: types.ModuleType) -> None:
        # A package whose compiled operators could not be loaded, as they are of another torch, registers kernels for
        # them all the same: torchvision. They are declared then, so that what the package has in Python can be used;
        # to call one is an error still.
        while True:
            try:
                run(module)
            except RuntimeError as error:
                lacks = NO_OPERATOR.search(str(error))
                if lacks is None or lacks[0] in _declared:
                    raise
                _declared[lacks[0]] = library = torch.library.Library(lacks["namespace"], "FRAGMENT")
                library.define(f"{lacks['name']}(Tensor x) -> Tensor")
                _forget(module.__name__)
                sys.modules[module.__name__] = module
            else:
                return

    def _stood_in(self, name: str, error: Exception) -> types.ModuleType:
        self.finder.names.append(name)
        self.finder.broken[name] = in_one_line(error)
        made = _StandInModule(name, self.finder)
        made.__spec__ = importlib.machinery.ModuleSpec(name, self.finder, is_package=True)
        return made


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


# The declared operators, by what their absence raised, and their libraries, with which they would go.
_declared: dict[str, torch.library.Library] = {}


@contextlib.contextmanager
def standing_in(roots: Sequence[Path], say: Callable[[str], object] = lambda note: None) -> Iterator[Finder]:
    """Stand-ins for what files below `roots` import within the block; `say` is told of those that torch's layers are.

    At its end they leave `sys.modules`, and so do the modules that hold one.
    """
    finder = Finder(roots, say)
    guard = _Guard(finder)
    find_spec = importlib.util.find_spec

    @functools.wraps(find_spec)
    def without_stand_ins(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        # Who asks whether a package is there is told the truth.
        return None if name.partition(".")[0] in finder.names else find_spec(name, package)

    importlib.util.find_spec = without_stand_ins
    sys.meta_path.insert(0, guard)
    sys.meta_path.append(finder)
    try:
        yield finder
    finally:
        importlib.util.find_spec = find_spec
        sys.meta_path.remove(guard)
        sys.meta_path.remove(finder)
        for name in finder.defined:
            sys.modules.pop(name, None)
        for module, name in finder.lacking:
            delattr(module, name)
        if finder.names:
            for name in [name for name, module in list(sys.modules.items()) if _holds_one(module)]:
                del sys.modules[name]


def _file_that_defines(name: str, folder: Path) -> Path | None:
    # The first file in a folder that defines a name at its top.
    pattern = re.compile(rf"^(def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", re.M)
    files = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    return next((file for file in files if pattern.search(file.read_text(encoding="utf-8", errors="replace"))), None)


@functools.lru_cache(maxsize=256)
def _folder_with(name: str, roots: tuple[Path, ...]) -> Path | None:
    # The folder below the roots that has a file, or a package, of the name; the least deep one.
    found: list[Path] = []
    for root in roots:
        for place, folders, files in os.walk(root):
            depth = len(Path(place).relative_to(root).parts)
            folders[:] = [f for f in folders if not f.startswith(".") and f != "site-packages" and depth < DEEPEST]
            if f"{name}.py" in files or (name in folders and (Path(place) / name / "__init__.py").is_file()):
                found.append(Path(place))
    return min(found, key=lambda folder: (len(folder.parts), str(folder)), default=None)


def _holds_one(module: types.ModuleType) -> bool:
    stand_ins = (_StandIn, _StandInModule)
    # No isinstance: torch.distributed.reduce_op warns when it is asked for its __class__.
    return type(module) in stand_ins or any(
        type(v) in stand_ins for v in list(getattr(module, "__dict__", {}).values())
    )


@functools.lru_cache(maxsize=256)
def _lines_that_may_fail(file: str) -> frozenset[int]:
    # The lines within a `try` that catches a failed import.
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(_catches_imports(handler) for handler in node.handlers):
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or node.body[-1].lineno) + 1))
    return frozenset(lines)


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    if isinstance(handler.body[-1], ast.Raise):
        return False
    return handler.type is None or any(
        isinstance(node, ast.Name) and node.id in CAUGHT for node in ast.walk(handler.type)
    )


class _StandInModule(types.ModuleType):
    # A module with every attribute.

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
        return _StandIn(f"{self.__name__}.{name}", self._finder)


class _StandIn:
    # What stands for a value of a missing package.

    def __init__(self, name: str, finder: Finder) -> None:
        self._name, self._finder = name, finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self._name}.{name}", self._finder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._finder.permissive:
            return self._in_torch(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType, staticmethod, classmethod)):
            return args[0]
        return _StandIn(self._name, self._finder)

    def __getitem__(self, key: object) -> Any:
        self._use()
        return _StandIn(self._name, self._finder)

    def __or__(self, other: object) -> Any:
        return _StandIn(self._name, self._finder)

    __ror__ = __or__

    def _combined(self, *others: object) -> Any:
        self._use()
        return _StandIn(self._name, self._finder)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _combined
    __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __mod__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _combined
    )

    def _in_torch(self, *args: Any, **kwargs: Any) -> Any:
        # What torch has in place of a missing layer, or of a question on processes.
        name = self._name.rpartition(".")[2]
        layer, answer = same_layer(name), of_one_process(name)
        if layer is not None:
            with contextlib.suppress(TypeError):
                made = layer(*args, **kwargs)
                self._finder.say(_said(self._name, f"nn.{layer.__name__}"))
                return made
        elif answer is not None:
            self._finder.say(_said(self._name, f"{answer}, for one process"))
            return answer
        if _held and layer is None:
            _held[-1].append(self)
            return _StandIn(self._name, self._finder)
        return _refuse(self)

    def __eq__(self, other: object) -> bool:
        self._use()
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        name = self._name.rpartition(".")[2]
        # A plain Module may be that of another framework, as flax's.
        layer = same_layer(name) or (_Module if re.fullmatch(r"\w+Module", name) else None)
        if layer is None:
            return (_base(self._name, self),)
        self._finder.say(_said(self._name, "nn.Module" if layer is _Module else f"nn.{layer.__name__}"))
        return (layer,)

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __subclasscheck__(self, value: type) -> bool:
        return False

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

    def __enter__(self) -> Any:
        self._use()
        return self

    def __exit__(self, *problem: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<{self._name}, not installed>"

    def _use(self) -> None:
        if not self._finder.permissive:
            _refuse(self)


# What the constructors that run, one within another, called of missing packages.
_held: list[list[_StandIn]] = []


@contextlib.contextmanager
def held_by_models(say: Callable[[str], object]) -> Iterator[None]:
    """Within the block, which builds a model, what a missing package gives may be held, as a tokenizer is that the
    model's forward never uses; `say` is told of it.

    To use it is an error still. Raises MissingPackage in place of what else is raised after such a call.
    """
    held: list[_StandIn] = []
    _held.append(held)
    try:
        yield
    except MissingPackage:
        raise
    except Exception:
        if held:
            _refuse(held[0])
        raise
    finally:
        _held.pop()
    for name in dict.fromkeys(one._name for one in held):
        say(f"held and never used, so that it may be missing: {name}")


def refuse(cls: type) -> None:
    """Raise MissingPackage where a class of a missing package stands in place of `cls`."""
    stand_in = getattr(cls, "stands_for", None)
    if isinstance(stand_in, _StandIn):
        _refuse(stand_in)


def _said(name: str, in_place: str) -> str:
    package, _, rest = name.partition(".")
    return f"in place of {package}'s {rest.rpartition('.')[2]}: {in_place}"


def _refuse(stand_in: _StandIn, attribute: str = "", kind: type[MissingPackage] = MissingPackage) -> NoReturn:
    name = stand_in._name + attribute
    package = name.partition(".")[0]
    on_index = ON_INDEX.get(package, package)
    raised = stand_in._finder.broken.get(package)
    if raised is not None:
        raise kind(
            f"the model uses {name}, and importing {package} raises {raised}; install a {on_index} that fits "
            f"torch {torch.__version__}"
        )
    if package not in stand_in._finder.names and not stand_in._finder.is_users(_file_of(package)):
        raise kind(f"the model uses {name}, which {package} no longer has; install a {on_index} that has it")
    raise kind(f"the model uses {name}, and {package} is not installed; install {on_index}")


def _file_of(package: str) -> str:
    module = sys.modules.get(package)
    return str(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), ""))


class _Module(torch.nn.Module):
    # nn.Module in place of a framework's, as BaseModule or LightningModule, which adds to it what training needs.

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()


def _base(name: str, stand_in: _StandIn) -> type:
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

    return type(name.rpartition(".")[2], (), {"__new__": made, "__getattr__": absent, "stands_for": stand_in})
