"""A Python file as a module: its repository on the path, and what it lacks stood in for."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.roots import is_users, projects_around, repository_of
from attn_fuse.explain.opening.sources import Say, Sources, parsed, same_folder_after, without_own_compile
from attn_fuse.explain.opening.stand_ins import Broken, Finder
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.steps import TimeUp

# Seconds that a statement of a file may take unless the user says otherwise: a script that trains shows itself by then.
IMPORT_LIMIT = 30.0


@contextlib.contextmanager
def imported(path: Path, say: Say = lambda note: None, limit: float = IMPORT_LIMIT) -> Iterator[types.ModuleType]:
    """The file at `path` as a module; within the block it stands in `sys.modules`, and its import roots on `sys.path`.

    A file inside a package is imported as a module of that package, so that its relative imports work. Packages that
    are not installed are stood in for, and statements that raise or run longer than `limit` seconds are left out, also
    in the files that it imports; `say` is told of both in one line each.
    Raises ExplainError where there is no such file, or where importing it leaves no class and no function.
    """
    if not path.is_file():
        raise ExplainError(f"{path}: {'this is a directory' if path.is_dir() else 'no such file'}; pass a Python file")
    path = path.resolve()
    if path.suffix != ".py":
        raise ExplainError(f"{path}: not a Python file; pass one that ends in .py")
    tree = parsed(path)
    root, name = _root_and_name(path, tree)
    first, last = _roots(path, root)
    roots = [*first, *last]
    # Another file of that name, which the caller has imported, is out of the way within the block.
    aside = {other: sys.modules.pop(other) for other in [*sys.modules] if other == name and _is_a_file(other)}
    before, argv, stdin, kept_path = set(sys.modules), sys.argv, sys.stdin, list(sys.path)
    finder = Finder(roots, say)
    sources = Sources(roots, limit, finder.supplies, say)
    sys.path[:] = [*map(str, first), *kept_path, *map(str, last)]
    sys.argv = [str(path)]
    finders = list(sys.meta_path)
    sys.meta_path[:] = [Broken(finder), sources, *finders, finder]
    try:
        with open(os.devnull) as nothing, without_own_compile(roots, say):
            sys.stdin = nothing
            with same_folder_after():
                module = _module(path, name, sources, limit)
            if sources.moved:
                say("no GPU here: what its files put on cuda is on the CPU")
            if absent := [name for name in finder.names if name not in finder.broken]:
                say(f"not installed, and stood in for: {', '.join(absent)}")
            for package, raised in finder.broken.items():
                say(f"stood in for {package}, whose import raises {raised}")
            finder.permissive = False
            yield module
    finally:
        sys.argv, sys.stdin = argv, stdin
        sys.path[:], sys.meta_path[:] = kept_path, finders
        finder.leave()
        # All are judged before any is gone: where a namespace package lies is asked of its parent.
        new = [other for other in set(sys.modules) - before if other == name or _is_below(sys.modules[other], roots)]
        for other in new:
            sys.modules.pop(other, None)
        sys.modules.update(aside)


def _roots(path: Path, root: Path) -> tuple[list[Path], list[Path]]:
    # The folders to import from before the libraries, and after them: a folder within a package may have the name of a
    # library that the package imports.
    repository = repository_of(path)
    first = dict.fromkeys(filter(Path.is_dir, (root, repository, repository / "src")))
    between = [folder for folder in path.parents if folder.is_relative_to(repository)]
    # An example has its own README, and imports the package around it.
    rest = (*between, *projects_around(repository))
    # Nor may a file hide the package that it is in, which may be without __init__.py.
    package = path.relative_to(repository).parts[0]
    return [*first], [f for f in dict.fromkeys(rest) if f not in first and not (f / f"{package}.py").is_file()]


def _root_and_name(path: Path, tree: ast.Module) -> tuple[Path, str]:
    # The folder to import from, and the dotted name that the file has there.
    root, parts = path.parent, [path.stem]
    levels = max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)
    while root.name.isidentifier() and ((root / "__init__.py").is_file() or len(parts) <= levels):
        root, parts = root.parent, [root.name, *parts]
    repository = repository_of(path)
    below = path.relative_to(repository).with_suffix("").parts
    # A file that has the name of a package that it is in, and that is without __init__.py, would hide the package.
    if len(parts) == 1 < len(below) and below[0] == path.stem and all(map(str.isidentifier, below)):
        root, parts = repository, list(below)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    name = ".".join(parts)
    # A file that has a library's name goes by a longer one.
    while len(parts) == 1 and ((name in sys.modules and not _is_a_file(name)) or not name.isidentifier()):
        name = f"_{name}" if name.isidentifier() else "_" + "".join(c if c.isalnum() else "_" for c in name)
    return root, name


def _is_a_file(name: str) -> bool:
    # Whether a loaded module is a file of somebody's own: none of Python's, of an installed package, or of this one.
    file = getattr(sys.modules[name], "__file__", None)
    is_library = name in sys.stdlib_module_names or "." in name or hasattr(sys.modules[name], "__path__")
    return file is not None and not is_library and is_users(file, (Path(file).parent,))


def _module(path: Path, name: str, sources: Sources, limit: float) -> types.ModuleType:
    package = name.rpartition(".")[0]
    if package:
        with contextlib.suppress(ImportError, ExplainError):
            importlib.import_module(package)
    known = sys.modules.get(name)
    if known is not None:
        source = getattr(known, "__file__", None)
        if source is None or Path(source).resolve() != path:
            raise ExplainError(f"{path} cannot be imported: {source or 'another module'} is imported as {name} already")
        return known
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__, module.__package__ = str(path), package
    if path.name == "__init__.py":
        module.__path__, module.__package__ = [str(path.parent)], name
    raised = sources.run(module, path)
    if raised is not None and not any(_is_model(value, module) for value in vars(module).values()):
        raise ExplainError(f"{path} cannot be imported: {_why(raised, limit)}") from raised
    if package in sys.modules:
        setattr(sys.modules[package], name.rpartition(".")[2], module)
    return module


def _is_below(module: types.ModuleType, roots: Sequence[Path]) -> bool:
    file = getattr(module, "__file__", None)
    try:
        places = [file] if file else list(getattr(module, "__path__", ()))
    except KeyError:  # a namespace package whose parent held a stand-in and is gone
        return True
    return any(is_users(place, roots) for place in places)


def _is_model(value: object, module: types.ModuleType) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__


def _why(error: BaseException, limit: float) -> str:
    if isinstance(error, SystemExit):
        return "it exits; keep what it runs under __main__"
    if isinstance(error, TimeUp):
        return f"it runs a program of more than {limit:g} s; keep that under __main__, or give more with --time-limit"
    return in_one_line(error)
