"""A config for a constructor: an object of its class, one that the repository spells out, or small sizes."""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.config_files import entries_with
from attn_fuse.explain.messages import said_in
from attn_fuse.explain.no_gpu import on_this_machine
from attn_fuse.explain.open_file import Say
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.roots import repository_of
from attn_fuse.explain.signatures import bases_of, defaults_of, tree_of_function, without_default
from attn_fuse.explain.sizes import in_words, may_be_none, value_for
from attn_fuse.explain.snippets import calls_of, only_defines
from attn_fuse.explain.steps import TimeUp, limited
from attn_fuse.explain.written_options import options_with

CONFIG_NAMES = (
    "config",
    "configs",
    "configuration",
    "cfg",
    "conf",
    "args",
    "params",
    "hparams",
    "options",
    "settings",
    "opt",
)
# Names of classes, and of values of a file, that hold a config.
CLASS_NAMES = (*CONFIG_NAMES, "dimensions")
# Fewer entries than these say little of a config: what the other files read of it is asked, too.
FEW = 4
# Seconds of a function that gives a config.
SECONDS = 5.0


class UnknownEntry(ExplainError, AttributeError):
    """An entry of a config that no source knows; an AttributeError, so that `getattr` with a default gives that."""


class SmallConfig(dict[str, Any]):
    """A config whose entries come into being when they are asked for, as an attribute or by key.

    options: what a command line of the repository, or a comparison in the model's code, says of an entry; what neither
    does gets a small value by its name. Asking for what no source knows raises UnknownEntry.
    given: entries that are there from the start, as a config file has them; a mapping among them is a SmallConfig too.
    groups: names of entries that hold entries themselves, as DATA does in `cfg.DATA.SIZE`.
    guess: the value of what no source knows, or None to raise there.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        given: Mapping[str, Any] | None = None,
        groups: Set[str] = frozenset(),
        guess: Any = None,
    ) -> None:
        super().__init__()
        self.__dict__["_guess"] = guess
        self.__dict__["_name"] = name
        self.__dict__["_options"] = dict(options)
        self.__dict__["_groups"] = frozenset(groups)
        for key, value in (given or {}).items():
            self[key] = self._group(key, value) if type(value) is dict else on_this_machine(key, value)

    def __missing__(self, key: str) -> Any:
        options = self.__dict__["_options"]
        value = options.get(key)
        if isinstance(value, dict) or (value is None and key in self.__dict__["_groups"]):
            self[key] = self._group(key, None)
            return self[key]
        value = value if value is not None else value_for(key, None, {**options, **self})
        value = value if value is not None or key in options else self.__dict__["_guess"]
        if value is None and key not in options:
            name = self.__dict__["_name"]
            raise UnknownEntry(
                f"{name} is made up of small numbers, and none is known for {name}.{key}; write a file that sets "
                f"`model`, and pass it with --setup FILE"
            )
        self[key] = value
        return value

    def _group(self, key: str, given: Mapping[str, Any] | None) -> SmallConfig:
        options = self.__dict__["_options"].get(key)
        own = options if isinstance(options, dict) else {}
        held = self.__dict__
        return SmallConfig(f"{held['_name']}.{key}", own, given, held["_groups"], held["_guess"])

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def get(self, key: str, default: Any = None) -> Any:
        """The entry, or `default`: who names a default does not need the entry."""
        return self[key] if key in self or key in self.__dict__["_options"] else default


def is_config_name(name: str) -> bool:
    """Whether an argument of this name is a config."""
    name = name.lower().strip("_")
    return name.endswith(CONFIG_NAMES) or name in ("hp", "hps")


def config_class(cls: Callable[..., Any], name: str, hint: Any, namespace: Mapping[str, Any]) -> type | None:
    """The class whose defaults make the constructor's argument `name`, or None where no class is meant.

    A model says it as `config_class`, as Hugging Face's do, or checks it. Raises ExplainError where several may be.
    """
    said = getattr(cls, "config_class", None) or _checked_class(cls, name)
    if is_config_name(name) and isinstance(said, type):
        return said
    if hint not in (None, Any):
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        several = typing.get_args(hint) if is_union else (hint,)
        # A plain bag of entries, whose class says none.
        bags = (argparse.Namespace, types.SimpleNamespace)
        options = [option for option in several if isinstance(option, type) and option not in (Any, *bags)]
        named = is_config_name(name)
        return next((o for o in options if _is_config_class(o) or (named and o.__module__ != "builtins")), None)
    if not is_config_name(name):
        return None
    own = [v for v in namespace.values() if _is_config_class(v) and v.__module__ == namespace.get("__name__")]
    candidates = list(dict.fromkeys(own)) or list(
        dict.fromkeys(v for v in namespace.values() if _is_config_class(v) and not v.__module__.startswith("torch"))
    )
    for wanted in (name.replace("_", ""), f"{cls.__name__}{name}".replace("_", "")):
        for candidate in candidates:
            if candidate.__name__.lower() == wanted.lower():
                return candidate
    candidates = [c for c in candidates if not without_default(c)] or candidates
    if len(candidates) > 1:
        names = [candidate.__name__ for candidate in candidates]
        raise ExplainError(
            f"cannot build {cls.__name__}: its {name} may be {' or '.join(names)}; "
            f"pass --entry '{cls.__name__}({names[0]}())'"
        )
    return candidates[0] if candidates else None


def _checked_class(cls: Callable[..., Any], name: str) -> type | None:
    # The class of which a constructor, or one that it inherits, demands that its argument be an instance.
    for base in bases_of(cls):
        made_by = vars(base).get("__init__")
        if not isinstance(made_by, types.FunctionType) or made_by.__module__.startswith("torch."):
            continue
        for node in ast.walk(tree_of_function(made_by)):
            match node:
                case ast.Assert(demanded) | ast.If(ast.UnaryOp(ast.Not(), demanded), [ast.Raise(), *_]):
                    wanted = _class_in(demanded, name)
                    found = made_by.__globals__.get(wanted) if wanted else None
                    if isinstance(found, type):
                        return found
    return None


def _class_in(test: ast.expr, name: str) -> str | None:
    match test:
        case ast.Call(ast.Name("isinstance"), [ast.Name(given), ast.Name(wanted)]) if given == name:
            return wanted
    return None


def config_of(
    cls: Callable[..., Any], config: type, path: Path, say: Say, with_none: bool = False, guess: Any = None
) -> object:
    """An object of the class `config`, from its defaults; fields without one come from a config file, or are small.

    with_none: whether fields that may be None, as they are by default, get a value by name, too. guess: the value of a
    field of which no source knows; None for none.
    Raises UnknownEntry where a field has none, and ExplainError where the class raises.
    """
    given, needs = defaults_of(config), without_default(config)
    if needs and path.is_file():
        names = vars(sys.modules.get(config.__module__, types))
        for snippet in calls_of(config, names, path):
            with contextlib.suppress(Exception):  # a call of an older version of the class
                called = eval(snippet.text, dict(snippet.names))
                say(f"{config.__name__}: as in {snippet.source}")
                return cast("object", called)
    written = entries_with(needs.keys(), config.__name__, path) if needs else None
    if written is not None and needs.keys() <= written.values.keys():
        missing = {name: value for name, value in written.values.items() if name in needs or name in given}
        say(f"{config.__name__}: {written.source}")
    else:
        written = None
        missing = {name: value_for(name, hint, given) for name, hint in needs.items()}
    unknown = [name for name, value in missing.items() if value is None]
    if unknown and guess is not None:
        hints = {name: needs.get(name) for name in unknown if needs.get(name) not in (str, "str")}
        guesses = {name: None if may_be_none(hint) else guess for name, hint in hints.items()}
        say(f"guesses, for names that say nothing: {config.__name__}({in_words(guesses)})")
        missing, unknown = {**missing, **guesses}, [name for name in unknown if name not in guesses]
    if unknown:
        values = ", ".join(f"{name}=..." for name in unknown)
        raise UnknownEntry(
            f"cannot build {cls.__name__}: {config.__name__} has no default for {', '.join(unknown)}; "
            f"pass --entry '{cls.__name__}({config.__name__}({values}))'"
        )
    try:
        made = _with_configs_within(config, missing, given)
    except Exception as error:
        raise ExplainError(
            f"cannot build {cls.__name__}: {config.__name__}() raises {in_one_line(error)}; "
            f"pass --entry '{cls.__name__}({config.__name__}(...))'"
        ) from error
    made, filled = _filled(made, with_none)
    if written is not None:
        missing = {}
    if missing or filled:
        say(f"sizes by name: {config.__name__}({in_words({**missing, **filled})})")
    return made


def _with_configs_within(config: type, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> object:
    # An object of a config class; where it makes further configs of mappings that are None by default, these get what
    # their classes ask for.
    within: dict[str, Any] = {}
    needed: dict[str, Any] = {}
    while True:
        try:
            return config(**arguments, **{name: dict(needed) for name in within})
        except TypeError as error:
            more = {name: value_for(name, None, needed) for name in said_in(str(error)).missing if name not in needed}
            wants_mapping = "must be a mapping, not NoneType" in str(error) and not within
            if wants_mapping:
                within = {name: None for name, value in defaults.items() if value is None and is_config_name(name)}
            elif within and more and None not in more.values():
                needed |= more
            else:
                raise
            if not within:
                raise


def _filled(config: Any, with_none: bool) -> tuple[Any, dict[str, Any]]:
    # The config with the numbers that it leaves open, and those: a vocabulary of -1, as in LLaMA's, and `n: int` with
    # the default None, as in makemore's; with_none: what may be None, too.
    is_tuple = isinstance(config, tuple) and hasattr(config, "_fields")
    filled: dict[str, Any] = {}
    if is_tuple:
        hints = type(config).__annotations__
    elif dataclasses.is_dataclass(config):
        hints = {one.name: one.type for one in dataclasses.fields(config)}
    else:
        hints = dict.fromkeys(getattr(config, "__dict__", {}))
    for name, hint in hints.items():
        value = getattr(config, name, None)
        is_open = value == -1 and "vocab" in name and not isinstance(value, bool)
        is_open = is_open or (value is None and (hint in (int, "int") or (with_none and "int" in str(hint))))
        with_value = value_for(name) if is_open else None
        if with_value is None:
            continue
        if not is_tuple:
            try:
                setattr(config, name, with_value)
            except AttributeError:  # frozen
                continue
        filled[name] = with_value
    return config._replace(**filled) if is_tuple else config, filled


def _is_config_class(value: object) -> typing.TypeGuard[type]:
    if not isinstance(value, type) or issubclass(value, nn.Module) or value.__module__ == "builtins":
        return False
    return dataclasses.is_dataclass(value) or value.__name__.lower().endswith(CLASS_NAMES)


def config_without_class(
    cls: Callable[..., Any],
    name: str,
    namespace: Mapping[str, Any],
    path: Path,
    say: Say,
    guess: Any = None,
    rank: int = 0,
) -> object:
    """A config for the argument `name` of `cls` where no class says what it is.

    It is a dict or namespace of the file that has the entries that the code reads, else a SmallConfig. guess: what its
    entries are that no source knows; None for none. rank: which one of the file, 0 for the one that has most of them.
    Raises ExplainError where the file has none of that rank above 0.
    """
    needed = _entries_of(_tree_of(cls), name)
    if len(needed) < FEW:
        needed = needed.union(*(_entries_of(tree, name) for tree in _trees_beside(path)))
    found = (*_holders(namespace), *_made_by_functions(namespace, path))
    counted = [(len(needed & _entries(value)), value, key) for key, value in found]
    in_file = [one for one in sorted(counted, key=lambda one: -one[0]) if one[0] and one[0] * 2 >= len(needed)]
    if rank < len(in_file):
        _, value, key = in_file[rank]
        say(f"{name}: {key}, as the file has it")
        # Neither a constructor nor a search may write into the file's own.
        with contextlib.suppress(Exception):  # a value that cannot be copied
            return copy.deepcopy(value)
        return value
    if rank:
        raise ExplainError(f"cannot build {cls.__name__}: its file has {len(in_file)} values for {name}")
    written = options_with(needed, path)
    compared: dict[str, Any] = {}
    for tree in (*_trees_beside(path), _tree_of(cls)):
        compared |= _asked_by_conditions(tree, name)
    groups = _groups_of(_tree_of(cls), name).union(*(_groups_of(tree, name) for tree in _trees_beside(path)))
    beside = entries_with(needed, name, path)
    if beside is not None and 2 * len(needed & beside.values.keys()) >= written.known:
        say(f"{name}: {beside.source}")
        return SmallConfig(name, {**compared, **written.values}, beside.values, groups, guess)
    if written.source is not None:
        say(f"{name}: the defaults of {written.source}, and small numbers by name for the rest")
    else:
        say(f"{name}: small numbers by name")
    if guess is not None:
        say(f"{name}: a guess, {guess!r}, for entries whose names say nothing")
    return SmallConfig(name, {**compared, **written.values}, groups=groups, guess=guess)


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


def _holders(namespace: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    # Values of the file that hold entries, and those that a table of the file has.
    for key, value in namespace.items():
        if key.startswith("__"):
            continue
        if _entries(value):
            yield key, value
        if isinstance(value, dict):
            yield from ((f"{key}[{inner!r}]", held) for inner, held in value.items() if _entries(held))


def _made_by_functions(namespace: Mapping[str, Any], path: Path) -> Iterator[tuple[str, object]]:
    # What functions give, as get_config does, that need no argument: of the file, and of files beside it that are
    # called after configs.
    package = str(namespace.get("__package__") or "")
    modules = [dict(namespace)]
    for file in sorted(path.parent.glob("*config*.py")) if path.is_file() else ():
        if file != path and only_defines(_tree_in(str(file))):
            with contextlib.suppress(Exception):  # a file that cannot be imported holds no config
                modules.append(vars(importlib.import_module(f"{package}.{file.stem}" if package else file.stem)))
    for names in modules:
        for name, made_by in [*names.items()]:
            if not isinstance(made_by, types.FunctionType) or not re.search(r"(config|cfg|hparams)s?$", name):
                continue
            # Whatever a function raises that wants a command line or a file.
            with contextlib.suppress(Exception, SystemExit, TimeUp), limited(SECONDS):
                value = None if without_default(made_by) else made_by()
                if _entries(value):
                    yield f"{name}()", value


def _entries(value: object) -> Set[str]:
    # The names of what a dict, a namespace or an object with keys, as a ConfigDict, holds.
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value).keys()
    if not hasattr(type(value), "keys") or not hasattr(type(value), "__getitem__"):
        return set()
    return {key for key in dict(cast("Mapping[Any, Any]", value)) if isinstance(key, str)}


def _trees_beside(path: Path) -> Iterator[ast.AST]:
    # The files of the repository that are imported with this one.
    root = str(repository_of(path))
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.startswith(root) and "site-packages" not in file:
            yield _tree_in(file)


def _tree_in(file: str | None) -> ast.Module:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8", errors="replace")) if file else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _tree_of(cls: Callable[..., Any]) -> ast.AST:
    try:
        return _tree_in(inspect.getsourcefile(cls))
    except (OSError, TypeError):
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
    return entries


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


def entry_for(cls: Callable[..., Any], key: str) -> Any:
    """A value for an entry of a config that the code of `cls` reads: one that it is compared with, or a small one."""
    for node in ast.walk(_tree_of(cls)):
        match node:
            case ast.Compare(ast.Attribute(_, attribute), [ast.Eq()], [ast.Constant(str() as value)]):
                if attribute == key:
                    return value
    return value_for(key)


def _asked_by_conditions(tree: ast.AST, name: str) -> dict[str, Any]:
    # Values that suit the conditions of the code: of an entry that it compares with strings the first, which is as good
    # as any; False for one that it only tests. An entry may be kept as an attribute of the module first.
    kept: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self"), attribute)], given) if key := _entry_read(given, name):
                kept[attribute] = key
    texts: dict[str, Any] = {}
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
    return {key: False for key, every in reads.items() if all(every)} | texts


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
