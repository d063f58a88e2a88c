"""A config of a class: which one a constructor takes, and an object of it."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.config_reads import Reads
from attn_fuse.explain.building.configs import CLASS_NAMES, SmallConfig, UnknownEntry, is_config_name, small_config
from attn_fuse.explain.building.sizes import guess_for, in_words, may_be_none, value_for
from attn_fuse.explain.opening.open_file import Say
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.reading.config_files import entries_with
from attn_fuse.explain.reading.signatures import bases_of, defaults_of, tree_of_function, without_default
from attn_fuse.explain.reading.snippets import HARMLESS, calls_of
from attn_fuse.explain.repairing.messages import said_in


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
        options = [one for one in several if isinstance(one, type) and one is not Any and not _is_bag(one)]
        named = is_config_name(name)
        return next((o for o in options if _is_config_class(o) or (named and o.__module__ != "builtins")), None)
    if not is_config_name(name):
        return None
    own = [v for v in namespace.values() if _is_config_class(v) and v.__module__ == namespace.get("__name__")]
    imported = (v for v in namespace.values() if _is_config_class(v) and not v.__module__.startswith("torch"))
    candidates = list(dict.fromkeys(own)) or list(dict.fromkeys(v for v in imported if not _is_bag(v)))
    for wanted in (name.replace("_", ""), f"{cls.__name__}{name}".replace("_", "")):
        for candidate in candidates:
            if candidate.__name__.lower() == wanted.lower():
                return candidate
    candidates = [c for c in candidates if is_config_name(c.__name__)] or candidates
    candidates = [c for c in candidates if not without_default(c)] or candidates
    if len(candidates) > 1:
        names = [candidate.__name__ for candidate in candidates]
        raise ExplainError(
            f"cannot build {cls.__name__}: its {name} may be {' or '.join(names)}; "
            f"pass --entry '{cls.__name__}({names[0]}())'"
        )
    return candidates[0] if candidates else None


def _is_bag(cls: type) -> bool:
    # Whether a class holds entries and says none, as omegaconf's DictConfig does, and OmegaConf, which makes those.
    is_mapping = hasattr(cls, "keys") and hasattr(cls, "__getitem__")
    is_maker = cls.__module__.partition(".")[0] == "omegaconf"
    return is_mapping or is_maker or cls in (argparse.Namespace, types.SimpleNamespace)


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
        missing = {
            name: config_of(cls, hint, path, say, with_none, guess)
            if _is_config_class(hint)
            else value_for(name, hint, given)
            for name, hint in needs.items()
        }
    unknown = [name for name, value in missing.items() if value is None]
    if unknown and guess is not None:
        hints = {name: needs.get(name) for name in unknown if needs.get(name) not in (str, "str")}
        guesses = {name: None if may_be_none(hint) else guess_for(name, guess) for name, hint in hints.items()}
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


def as_assigned(config: type, name: str, reads: Reads) -> SmallConfig | None:
    """A config with the entries that the constructor of `config` assigns, for one that cannot be called; None where it
    assigns none. What it computes from files, or from its arguments, is small.

    name, reads: of the argument that the config is for.
    """
    made_by = vars(config).get("__init__")
    if not isinstance(made_by, types.FunctionType):
        return None
    me = types.SimpleNamespace()
    scope = {"__builtins__": HARMLESS, "torch": torch, "self": me}
    for node in ast.walk(tree_of_function(made_by)):
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self"), attribute)], given):
                # What the constructor's arguments, or a file, would have to give.
                with contextlib.suppress(Exception):
                    value = eval(compile(ast.Expression(given), config.__name__, "eval"), dict(scope))
                    is_open = value in (0, -1) and "vocab" in attribute and type(value) is int
                    setattr(me, attribute, value_for(attribute) if is_open else value)
    return small_config(name, reads, {}, vars(me)) if vars(me) else None


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


# Sizes that no model has as 0.
_OF_ALL = re.compile(
    r"(vocab(ulary)?_?size|block_size|(n|num)_?(layers?|heads?)|n_?embd|d_?model|hidden_(size|dim)|embed(ding)?_(size|dim))"
)


def _filled(config: Any, with_none: bool) -> tuple[Any, dict[str, Any]]:
    # The config with the numbers that it leaves open, and those: a vocabulary of -1, as in LLaMA's, a width of 0, and
    # `n: int` with the default None, as in makemore's; with_none: what may be None, too.
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
        is_open = type(value) is int and ((value == -1 and "vocab" in name) or (value == 0 and _OF_ALL.fullmatch(name)))
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
