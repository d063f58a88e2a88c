"""A Python file as a module, with its repository on the path and stand-ins for what is missing."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.roots import is_users, repository_of
from attn_fuse.explain.opening.sources import Say, Sources, parsed, without_own_compile
from attn_fuse.explain.opening.stand_ins import Finder

# Seconds for each statement of a file unless the user says otherwise.
IMPORT_LIMIT = 30.0


@contextlib.contextmanager
def imported(path: Path, say: Say = lambda note: None, limit: float = IMPORT_LIMIT) -> Iterator[types.ModuleType]:
    """The file at `path` as a module, which stays importable within the block.

    A file inside a package is imported as a module of that package, for its relative imports. Missing packages are
    replaced by stand-ins. Statements that raise or run longer than `limit` seconds are left out, also in the files that
    it imports. `say` receives a note on each of these.
    Raises ExplainError where there is no such file, or where importing it leaves no model.
    """
    if not path.is_file():
        raise ExplainError(f"{path}: {'this is a directory' if path.is_dir() else 'no such file'}; pass a Python file")
    path, say = path.resolve(), functools.cache(say)
    if path.suffix != ".py":
        raise ExplainError(f"{path}: not a Python file; pass one that ends in .py")
    root, name = _root_and_name(path, parsed(path))
    repository = repository_of(path)
    roots = [folder for folder in dict.fromkeys((root, repository, repository / "src")) if folder.is_dir()]
    before = set(sys.modules)
    finder = Finder(path, roots, say)
    sources = Sources(roots, limit, finder.supplies, say)
    with (
        open(os.devnull) as nothing,
        patch.multiple(
            sys,
            path=[*map(str, roots), *sys.path],
            meta_path=[sources, *sys.meta_path, finder],
            argv=[str(path)],
            stdin=nothing,
        ),
        without_own_compile(roots, say),
    ):
        try:
            with contextlib.chdir(repository):
                module = _module(path, name, sources)
            if sources.moved:
                say('no GPU here: "cuda" in its files means the CPU')
            if absent := [name for name in finder.names if name not in finder.broken]:
                say(f"missing packages, replaced by stand-ins: {', '.join(absent)}")
            for package, raised in finder.broken.items():
                say(f"{package} is replaced by a stand-in, since its import raises {raised}")
            finder.permissive = False
            yield module
        finally:
            new = [other for other in {*sys.modules} - before if other == name or _is_below(sys.modules[other], roots)]
            finder.leave()
            for other in new:
                sys.modules.pop(other, None)


def _root_and_name(path: Path, tree: ast.Module) -> tuple[Path, str]:
    # The folder to import from, and the dotted name that the file has there.
    root, parts = path.parent, [path.stem]
    levels = max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)
    while root.name.isidentifier() and ((root / "__init__.py").is_file() or len(parts) <= levels):
        root, parts = root.parent, [root.name, *parts]
    repository = repository_of(path)
    below = path.relative_to(repository).with_suffix("").parts
    # Otherwise a file named like its package would hide that package.
    if len(parts) == 1 < len(below) and below[0] == path.stem and all(map(str.isidentifier, below)):
        root, parts = repository, list(below)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    name = ".".join(parts)
    if len(parts) == 1:
        name = re.sub(r"\W", "_", name)
        # A library may have the name, or it may begin with a digit.
        while name in sys.modules or not name.isidentifier():
            name = f"_{name}"
    return root, name


def _module(path: Path, name: str, sources: Sources) -> types.ModuleType:
    package, _, last = name.rpartition(".")
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
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name]
    if raised is not None and not any(issubclass(cls, nn.Module) for cls in own):
        advice = "; keep programs under __main__, or allow more with --time-limit"
        said = sources.in_words(raised) + ("" if isinstance(raised, Exception) else advice)
        raise ExplainError(f"{path} cannot be imported: {said}") from raised
    if package in sys.modules:
        setattr(sys.modules[package], last, module)
    return module


def _is_below(module: types.ModuleType, roots: list[Path]) -> bool:
    file = getattr(module, "__file__", None)
    with contextlib.suppress(KeyError):  # a namespace package asks its parent, which may be gone
        return any(is_users(place, roots) for place in ([file] if file else getattr(module, "__path__", ())))
    return True
