"""What the code of a model reads of its config: the names of entries, and values that its conditions suit."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attn_fuse.explain.building.sizes import value_for
from attn_fuse.explain.reading.signatures import tree_of_function
from attn_fuse.explain.roots import repository_of

# Fewer entries than these say little of a config: what the other files read of it is asked, too.
FEW = 4


@dataclass(frozen=True)
class Reads:
    """What code reads of a config.

    entries: their names. own: those that the file of the class reads. groups: those that hold entries themselves, as
    DATA does in `cfg.DATA.SIZE`. values: of some entries what suits the conditions of the code. optional: those that
    may be None. is_counted: whether the code asks for the length of the config itself, as of a tokenizer, which is that
    of its vocabulary.
    """

    entries: Set[str]
    groups: Set[str]
    values: dict[str, Any]
    optional: set[str]
    is_counted: bool = False
    own: Set[str] = frozenset()


def reads_of(cls: Callable[..., Any], name: str, path: Path) -> Reads:
    """What the file of `cls`, and the files of its repository that are imported, read of the argument `name`."""
    own, beside = _tree_of(cls), [*_trees_beside(path)]
    entries = of_own = _entries_of(own, name)
    if len(entries) < FEW:
        entries = entries.union(*(_entries_of(tree, name) for tree in beside))
    groups = _groups_of(own, name).union(*(_groups_of(tree, name) for tree in beside))
    values: dict[str, Any] = {}
    for tree in (*beside, own):
        values |= _asked_by_conditions(tree, name)
    optional = {key for tree in (*beside, own) for key in _optional(tree, name)}
    return Reads(entries, groups, values, optional, _is_counted(own, name), of_own)


def is_read_as_config(cls: Callable[..., Any], name: str) -> bool:
    """Whether the constructor of `cls` reads attributes of the argument `name`, as a vocabulary's size of a tokenizer.

    Not where it calls one: small numbers cannot be called.
    """
    made_by = vars(cls).get("__init__") if isinstance(cls, type) else None
    tree = tree_of_function(made_by) if made_by is not None else ast.Module([], [])
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _starts_at(node.func, name)
    }
    read = _entries_of(tree, name)
    # One letter that is only handed on: what the file reads of it.
    if not read and len(name) == 1:
        read = {entry for entry in _entries_of(_tree_of(cls), name) if not hasattr(torch.Tensor, entry)}
        return len(read) >= FEW and not called
    return bool(read) and not called


def entry_for(cls: Callable[..., Any], key: str) -> Any:
    """A value for an entry of a config that the code of `cls` reads: one that it is compared with, or a small one."""
    for node in ast.walk(_tree_of(cls)):
        match node:
            case ast.Compare(ast.Attribute(_, attribute), [ast.Eq()], [ast.Constant(str() as value)]):
                if attribute == key:
                    return value
    return value_for(key)


def _trees_beside(path: Path) -> Iterator[ast.AST]:
    # The files of the repository that are imported with this one.
    root = str(repository_of(path))
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.startswith(root) and "site-packages" not in file:
            yield tree_in(file)


def _tree_of(cls: Callable[..., Any]) -> ast.AST:
    try:
        return tree_in(inspect.getsourcefile(cls))
    except (OSError, TypeError):
        return ast.Module([], [])


def tree_in(file: str | None) -> ast.Module:
    """The code of a file; no statement where it cannot be read."""
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8", errors="replace")) if file else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _entries_of(tree: ast.AST, name: str) -> set[str]:
    # The attributes and keys that the code reads of a value of this name.
    entries: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(holder) | ast.Attribute(_, holder), attribute) if holder == name:
                entries.add(attribute)
            case ast.Subscript(ast.Name(holder), ast.Constant(str() as key)) if holder == name:
                entries.add(key)
            case ast.Call(ast.Name("getattr"), [ast.Name(holder), ast.Constant(str() as key), *_]) if holder == name:
                entries.add(key)
    # A config that is a mapping has methods.
    return entries - vars(dict).keys()


def _is_counted(tree: ast.AST, name: str) -> bool:
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name("len"), [ast.Name(counted) | ast.Attribute(_, counted)]) if counted == name:
                return True
    return False


def _groups_of(tree: ast.AST, name: str) -> set[str]:
    # The entries of a value of this name of which the code reads entries.
    return {
        node.value.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and _starts_at(node.value, name)
        # A text has methods.
        and not hasattr(str, node.attr)
    }


def _starts_at(node: ast.expr, name: str) -> bool:
    while isinstance(node, ast.Attribute):
        if node.attr == name:
            return True
        node = node.value
    return isinstance(node, ast.Name) and node.id == name


def _asked_by_conditions(tree: ast.AST, name: str) -> dict[str, Any]:
    # Values that suit the conditions of the code: of an entry that it compares with strings the first, which is as good
    # as any; False for one that it only tests; the default of a `getattr`. An entry may be kept as an attribute of the
    # module first.
    kept: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self"), attribute)], given) if key := _entry_read(given, name):
                kept[attribute] = key
    texts: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    reads: dict[str, list[bool]] = {}
    tests = {id(test) for node in ast.walk(tree) for test in _conditions(node)}
    handed_on = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
    }
    for node in ast.walk(tree):
        key = _entry_read(node, name)
        if key is not None and not (id(node) in handed_on and key in kept.values()):
            reads.setdefault(key, []).append(id(node) in tests)
        match node:
            case ast.Attribute(ast.Name("self"), attribute, ast.Load()) if attribute in kept:
                reads.setdefault(kept[attribute], []).append(id(node) in tests)
            case ast.Compare(left, [ast.Eq() | ast.In()], [against]):
                key = _entry_read(left, name) or kept.get(left.attr if isinstance(left, ast.Attribute) else "")
                constants = [n.value for n in ast.walk(against) if isinstance(n, ast.Constant)]
                if key is not None and constants and isinstance(constants[0], str):
                    texts.setdefault(key, constants[0])
            case ast.Call(ast.Name("getattr"), [ast.Name(holder), ast.Constant(str(key)), default]) if holder == name:
                with contextlib.suppress(ValueError):
                    defaults[key] = ast.literal_eval(default)
    return {key: False for key, every in reads.items() if all(every)} | texts | defaults


def _optional(tree: ast.AST, name: str) -> Iterator[str]:
    # The entries for which a branch of the code says what is done without: `if config.pretrained is not None`.
    for node in ast.walk(tree):
        match node:
            case ast.If(ast.Compare(left, [ast.Is() | ast.IsNot()], [ast.Constant(None)]), body, _) | ast.IfExp(
                ast.Compare(left, [ast.Is() | ast.IsNot()], [ast.Constant(None)]), body, _
            ):
                raises = isinstance(body, list) and isinstance(body[-1], ast.Raise)
                if (key := _entry_read(left, name)) and not raises:
                    yield key


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    # The operands of a condition that are tested for truth.
    waiting = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While)) else []
    while waiting:
        match waiting.pop():
            case ast.BoolOp(_, values):
                waiting += values
            case ast.UnaryOp(ast.Not(), operand):
                waiting.append(operand)
            case test:
                yield test


def _entry_read(node: ast.AST, name: str) -> str | None:
    match node:
        case ast.Attribute(ast.Name(holder), key, ast.Load()) if holder == name:
            return key
        case ast.Subscript(ast.Name(holder), ast.Constant(str(key)), ast.Load()) if holder == name:
            return key
    return None
