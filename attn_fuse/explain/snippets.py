"""Calls of a class that its repository spells out: under the file's `__main__`, in a README, in a test or a script."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_fuse.explain.open_file import repository_of

MOST_FILES, MOST_CALLS, DEEPEST = 100, 8, 6
# Functions that try a model out.
TRIES = re.compile(r"^(main|test|demo|run|example)", re.I)
# Calls that a value may hold besides those of the file's names.
HARMLESS = {f.__name__: f for f in (int, float, bool, str, len, range, list, tuple, dict, max, min, round)}
# Of a call: those by position, those by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Snippet:
    """A call that some text of the repository spells out.

    text: the call as Python. source: the file that has it. names: the values that it uses.
    """

    text: str
    source: str
    names: Mapping[str, Any]


def calls_of(cls: type[nn.Module], namespace: Mapping[str, Any], path: Path) -> Iterator[Snippet]:
    """The calls of `cls` whose arguments are constants, names of the file, or values the same text assigns to names."""
    found = 0
    for source, tree in _texts(path, cls.__name__):
        for node in _calls(tree, cls.__name__):
            if any(keyword.arg is None for keyword in node.keywords) or any(
                isinstance(a, ast.Starred) for a in node.args
            ):
                continue
            names = _values(node, tree, {**HARMLESS, "torch": torch, "nn": nn, **namespace})
            if names is None or not (node.args or node.keywords):
                continue
            node.func = ast.Name(cls.__name__, ast.Load())
            for keyword in node.keywords:
                if keyword.arg == "pretrained":  # the weights change nothing here
                    keyword.value = ast.Constant(False)
            yield Snippet(ast.unparse(node), source, {cls.__name__: cls, **names})
            found += 1
            if found == MOST_CALLS:
                return


def inputs_of(
    cls: type[nn.Module], namespace: Mapping[str, Any], path: Path
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments, by position and by name, that some text of the repository calls an object of `cls` with."""
    known = {**HARMLESS, "torch": torch, "nn": nn, **namespace}
    found = 0
    for _, tree in _texts(path, cls.__name__):
        models = set(_names_of(tree, cls.__name__))
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Name(called)) if called in models and (node.args or node.keywords):
                    arguments = _evaluated(node, tree, known)
                    if arguments is not None:
                        yield arguments
                        found += 1
            if found == MOST_CALLS:
                return


def _names_of(tree: ast.AST, name: str) -> Iterator[str]:
    # The names that an object of the class, or one moved to a device, is assigned to.
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(target)], value) if any(_calls(value, name)):
                yield target


def _evaluated(
    node: ast.Call, tree: ast.AST, known: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    call = ast.Call(ast.Name("_given", ast.Load()), node.args, node.keywords)
    names = _values(ast.Tuple([*node.args, *(k.value for k in node.keywords)], ast.Load()), tree, known)
    if names is None:
        return None
    try:
        text = ast.unparse(ast.fix_missing_locations(call))
        args, kwargs = eval(text, {**names, "_given": lambda *args, **kwargs: (args, kwargs)})
    except Exception:  # a value that this text alone does not give
        return None
    return (args, kwargs) if any(isinstance(v, torch.Tensor) for v in (*args, *kwargs.values())) else None


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name(called) | ast.Attribute(_, called)) if called == name:
                yield node


def _texts(path: Path, name: str) -> Iterator[tuple[str, ast.AST]]:
    root = repository_of(path)
    for source, tree in _parsed(path.name, path.read_text(encoding="utf-8", errors="replace")):
        # A class or a factory of the file itself calls with what it was given.
        defined = (ast.ClassDef, ast.FunctionDef)
        kept = [n for n in tree.body if not isinstance(n, defined) or TRIES.search(n.name)]
        yield source, ast.Module(kept, [])
    for file in sorted({*root.glob("*.md"), *path.parent.glob("*.md")}):
        text = file.read_text(encoding="utf-8", errors="replace")
        for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.S):
            for source, tree in _parsed(file.name, re.sub(r"^(>>> |\.\.\. )", "", block, flags=re.M)):
                if name in block and imports_class(tree, name, path, root) is not False:
                    yield source, tree
    folders = (root, root / "tests", root / "test", root / "examples", path.parent)
    scripts = (file for folder in dict.fromkeys(folders) for file in sorted(folder.glob("*.py")) if file != path)
    for file in itertools.islice(scripts, MOST_FILES):
        text = file.read_text(encoding="utf-8", errors="replace")
        if f"{name}(" in text and f"class {name}(" not in text:
            yield from (
                (source, tree) for source, tree in _parsed(file.name, text) if imports_class(tree, name, path, root)
            )


def imports_class(tree: ast.AST, name: str, path: Path, root: Path) -> bool | None:
    """Whether `tree` has the class `name` from the file at `path`; None where it imports none of that name.

    Two files of a repository may each have a class of this name, of other sizes. A package may hand the name on.
    """
    below = path.relative_to(root).parts if path.is_relative_to(root) else (path.name,)
    homes = {path.stem, *below[:-1]}
    found: bool | None = None
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module, aliases) if any(alias.name in (name, "*") for alias in aliases):
                is_home = module is None or module.rpartition(".")[2] in homes
                found = found or (is_home if is_home or any(alias.name == name for alias in aliases) else found)
            case ast.Import(aliases) if any(alias.name.rpartition(".")[2] in homes for alias in aliases):
                found = True
            case ast.ImportFrom(_, aliases) if any(alias.name in homes for alias in aliases):
                found = True
    return found


def _parsed(source: str, text: str) -> Iterator[tuple[str, ast.Module]]:
    try:
        yield source, ast.parse(text)
    except (SyntaxError, ValueError):
        return


def _values(node: ast.AST, tree: ast.AST, known: Mapping[str, Any], depth: int = 0) -> dict[str, Any] | None:
    # The values of the names that `node` uses, by name; None where one has none.
    values: dict[str, Any] = {}
    bound = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - bound:
        if name in known:
            values[name] = known[name]
            continue
        given = next(_assigned(tree, name), None) if depth < DEEPEST else None
        inner = _values(given, tree, known, depth + 1) if given is not None else None
        if given is None or inner is None:
            return None
        try:
            values[name] = eval(compile(ast.Expression(given), "<snippet>", "eval"), dict(inner))
            for attribute, value in _attributes_set(tree, name):
                setattr(values[name], attribute, value)
        except Exception:  # a value that this text alone does not give
            return None
    return values


def _attributes_set(tree: ast.AST, name: str) -> Iterator[tuple[str, Any]]:
    # What the text writes into an object after it made it, as configs are often filled.
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Attribute(ast.Name(target), attribute)], ast.Constant(value)) if target == name:
                yield attribute, value


def _assigned(tree: ast.AST, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(target)], value) if target == name:
                yield value
