"""Functions of a repository that give a model: of the model's own file, and of files that import its class.

What a function gives is read from its `return`, not from its name: a call of the class, of a class below it, or of
another such function.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from torch import nn

from attn_fuse.explain.reading.signatures import defaults_of, hints_of, without_default
from attn_fuse.explain.reading.snippets import imports_class, only_defines
from attn_fuse.explain.roots import repository_of

MOST_FILES, MOST_FACTORIES = 200, 6
SMALL = re.compile(r"tiny|nano|mini|small|(^|_)(xs|s)(_|\d|$)|base|(^|_)b(_|\d|$)", re.I)
# Functions that load weights, or train.
LOADS = re.compile(r"load|download|checkpoint|weights|main|train|test|eval|demo|from_pretrained", re.I)


def factories_of(cls: type[nn.Module], namespace: Mapping[str, Any], path: Path) -> Iterator[Callable[..., Any]]:
    """The functions that give a `cls`: those of its own file, then those of other files, small models first.

    namespace: the names of the file at `path`, which defines `cls`.
    """
    yield from factories_in(cls, namespace)
    for module in _importing(cls, path):
        functions = [v for v in vars(module).values() if _is_of(v, module.__name__)]
        yield from _giving(cls, functions, {n for n, v in vars(module).items() if v is cls})


def factories_in(cls: type[nn.Module], namespace: Mapping[str, Any]) -> list[Callable[..., Any]]:
    """The functions that give a `cls` among the definitions of the file whose names are `namespace`."""
    functions = [v for v in namespace.values() if _is_of(v, str(namespace.get("__name__")))]
    return _giving(cls, functions, {n for n, v in namespace.items() if v is cls})


def chains_in(module: types.ModuleType, made_by: Set[str] = frozenset({"Sequential"})) -> list[type[nn.Module]]:
    """What functions of a file give as an `nn.Sequential`, as classes with the function's name and arguments.

    made_by: the names of the functions that make the model; by default `nn.Sequential` does.
    A function that another definition of the file uses gives a part of a model, and is left out.
    """
    functions = [v for v in vars(module).values() if _is_of(v, module.__name__) and not LOADS.search(v.__name__)]
    trees = {function: tree for function in functions if (tree := _tree_of(function)) is not None}
    giving = [function for function, tree in trees.items() if _gives(tree, made_by)]
    if not giving:
        return []
    file = ast.parse(Path(str(module.__file__)).read_bytes())
    definitions = [node for node in file.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    used = {
        inner.id
        for node in definitions
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and inner.id != node.name
    }
    return [_as_class(function) for function in giving if function.__name__ not in used]


def _as_class(function: types.FunctionType) -> type[nn.Module]:
    # A class whose call is that of the function; what comes out is no object of it.
    @functools.wraps(function)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    @functools.wraps(function)
    def init(self: object, *args: Any, **kwargs: Any) -> None: ...

    names = {"__new__": new, "__init__": init, "__module__": function.__module__, "__doc__": function.__doc__}
    return type(function.__name__, (nn.Sequential,), {**names, "__signature__": inspect.signature(function)})


def _is_of(value: object, module: str) -> bool:
    return isinstance(value, types.FunctionType) and value.__module__ == module


def _giving(cls: type[nn.Module], functions: list[types.FunctionType], names: Set[str]) -> list[Callable[..., Any]]:
    trees = {function: tree for function in functions if (tree := _tree_of(function)) is not None}
    giving, known = [f for f in functions if hints_of(f).get("return") is cls], set(names)
    known |= {function.__name__ for function in giving}
    while new := [f for f, tree in trees.items() if f not in giving and _gives(tree, known)]:
        giving += new
        known |= {function.__name__ for function in new}
    kept = [f for f in giving if not LOADS.search(f.__name__) and not defaults_of(f).get("pretrained")]
    kept.sort(key=lambda f: (bool(without_default(f)), SMALL.search(f.__name__) is None, len(without_default(f))))
    return list(itertools.islice(kept, MOST_FACTORIES))


def _tree_of(function: types.FunctionType) -> ast.FunctionDef | None:
    try:
        source = inspect.getsource(inspect.unwrap(function))
        (tree,) = ast.parse(inspect.cleandoc(f"\n{source}") if source[:1].isspace() else source).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _gives(tree: ast.FunctionDef, known: Set[str]) -> bool:
    """Whether a `return` of the function gives what one of the callables named `known` gives, alone or in a tuple."""
    made = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_call(node.value, known)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        if any(_is_call(value, known, made) for value in values):
            return True
    return False


def _is_call(node: ast.expr, known: Set[str], made: Set[str] = frozenset()) -> bool:
    # Also of a method of what is called, as `Model(...).eval()`, and of a function that is handed the class; and one of
    # the names `made`, or a method of it.
    while isinstance(node, ast.Call):
        match node.func:
            case ast.Name(name) | ast.Attribute(ast.Name(), name) if name in known:
                return True
            case ast.Attribute(inner):
                node = inner
            case _:
                return any(isinstance(a, ast.Name) and a.id in known for a in node.args[:1])
    return isinstance(node, ast.Name) and node.id in made


def _importing(cls: type[nn.Module], path: Path) -> Iterator[types.ModuleType]:
    # The modules of other files that import the class, those beside it first. One that cannot be imported is left out.
    root, name = repository_of(path), cls.__name__
    package = cls.__module__.rpartition(".")[0]
    top = path.parents[package.count(".") + 1] if package else path.parent
    around = [path.parent, *(p for p in path.parents if p.is_relative_to(root))]
    files = (file for folder in dict.fromkeys(around) for file in sorted(folder.glob("*.py")) if file != path)
    for file in itertools.islice(files, MOST_FILES):
        text = file.read_text(encoding="utf-8", errors="replace")
        if not re.search(rf"\b{re.escape(name)}\b", text) or re.search(rf"^class {re.escape(name)}\b", text, re.M):
            continue
        with contextlib.suppress(Exception, SystemExit):
            tree = ast.parse(text)
            if not only_defines(tree) or not imports_class(tree, name, path, root):
                continue
            below = file.relative_to(top).with_suffix("").parts if file.is_relative_to(top) else (file.stem,)
            dotted = ".".join(below[:-1] if below[-1] == "__init__" else below)
            module = sys.modules.get(dotted) or importlib.import_module(dotted)
            if Path(str(module.__file__)).resolve() == file.resolve():
                yield module
