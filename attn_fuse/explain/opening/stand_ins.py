"""Stand-ins for packages that a model's file imports and that are not installed, or whose import raises.

While files are imported a stand-in takes part in everything: it has every attribute, it can be called, subclassed and
used as a decorator, which then gives back what it decorates. Afterwards each use is an error that names the package,
but for a layer that torch has too.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_fuse.explain.opening.absent_values import StandIn, StandInModule
from attn_fuse.explain.opening.older import moved_module
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.roots import PACKAGE, is_users

OWN = str(PACKAGE)
# How deep in a repository a module is sought that an import names.
DEEPEST = 3
# Of how many files of a repository the imports are read.
MOST_FILES = 2000
CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
# Loaders that each belong to one module.
OF_ONE_FILE = (
    importlib.machinery.SourceFileLoader,
    importlib.machinery.SourcelessFileLoader,
    importlib.machinery.ExtensionFileLoader,
)
IMPORTS = re.compile(r"^\s*(?:from|import)\s+(\w+)\.(\w+)", re.M)
NAMES = re.compile(r"^\s*from\s+(\w+)\s+import\s+\(?(\w+(?:\s*,\s*\w+)*)", re.M)
NO_OPERATOR = re.compile(r"operator (?P<namespace>\w+)::(?P<name>\w+) does not exist")
LACKS = re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'")
HAS_NO = re.compile(r"module '?(?P<module>[\w.]+)'? has no attribute '?(?P<name>\w+)'?")
# One package under two names.
SAME = {
    "lightning": "pytorch_lightning",
    "lightning.pytorch": "pytorch_lightning",
    "pytorch_lightning": "lightning.pytorch",
}
# Packages that nothing can stand in for.
KEPT = {"torch", "attn_fuse"}


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
        same = SAME.get(fullname, "")
        if same and importlib.machinery.PathFinder.find_spec(same.partition(".")[0]) is not None:
            self.say(f"{fullname} is {same} here")
            return importlib.machinery.ModuleSpec(fullname, _Moved(same), is_package=True)
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
        if (folder := _package_without_init(fullname, self.roots)) is not None:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            return spec
        self.names.append(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def supplies(self, error: ImportError | AttributeError) -> bool:
        """Give an installed module the name that a file found it to lack; whether it could.

        It is what a loaded module of the same package has by that name, where that is one value, else a stand-in.
        """
        found = LACKS.search(str(error)) or HAS_NO.search(str(error))
        module = sys.modules.get(found["module"]) if found else None
        top = found["module"].partition(".")[0] if found else ""
        file = getattr(module, "__file__", None)
        if found is None or module is None or file is None or self.is_users(file) or found["name"] in vars(module):
            return False
        if isinstance(error, AttributeError) and top in KEPT:
            return False
        loaded = [other for name, other in sys.modules.items() if name.partition(".")[0] == top]
        values = {id(v): v for other in loaded if (v := vars(other).get(found["name"])) is not None and callable(v)}
        if len(values) == 1:
            self.say(f"{found['module']}.{found['name']} is in another module by now")
            setattr(module, found["name"], *values.values())
        else:
            self.say(f"{top} has no {found['module']}.{found['name']} any more: stood in for")
            setattr(module, found["name"], StandIn(f"{found['module']}.{found['name']}", self))
        self.lacking.append((module, found["name"]))
        return True

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name, self)

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
            if isinstance(module, StandInModule):
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
        made = StandInModule(name, self.finder)
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


def _folders(root: Path, deepest: int | None = None) -> Iterator[tuple[Path, list[str], list[str]]]:
    # The folders of a repository with the names of what they hold.
    for place, folders, files in os.walk(root):
        is_deep = deepest is not None and len(Path(place).relative_to(root).parts) >= deepest
        folders[:] = [] if is_deep else [f for f in folders if not f.startswith(".") and f != "site-packages"]
        yield Path(place), folders, files


@functools.lru_cache(maxsize=256)
def _folder_with(name: str, roots: tuple[Path, ...]) -> Path | None:
    # The folder below the roots that has a file, or a package, of the name; the least deep one.
    found = [
        place
        for root in roots
        for place, folders, files in _folders(root, DEEPEST)
        if f"{name}.py" in files or (name in folders and (place / name / "__init__.py").is_file())
    ]
    return min(found, key=lambda folder: (len(folder.parts), str(folder)), default=None)


@functools.lru_cache(maxsize=256)
def _package_without_init(name: str, roots: tuple[Path, ...]) -> Path | None:
    # The folder that has every module below `name` that files below the roots import: a root, which was cloned as
    # `name`, or a folder of that name.
    for root in roots:
        below = _imported_below(root).get(name, ())
        folders = [place for place, _, _ in _folders(root) if place.name == name] if below else []
        for folder in (root, *sorted(folders, key=lambda one: len(one.parts))) if below else ():
            if all((folder / module).is_dir() or (folder / f"{module}.py").is_file() for module in below):
                return folder
    return None


@functools.lru_cache(maxsize=8)
def _imported_below(root: Path) -> dict[str, set[str]]:
    # The modules and names that the files of a repository import of each package.
    found: dict[str, set[str]] = {}
    files = (place / file for place, _, files in _folders(root) for file in files if file.endswith(".py"))
    for file in itertools.islice(files, MOST_FILES):
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            for package, module in IMPORTS.findall(text):
                found.setdefault(package, set()).add(module)
            # A package without an __init__ has nothing else to import by name.
            for package, names in NAMES.findall(text):
                found.setdefault(package, set()).update(name.strip() for name in names.split(","))
    return found


def _holds_one(module: types.ModuleType) -> bool:
    stand_ins = (StandIn, StandInModule)
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
