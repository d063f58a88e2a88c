"""A model of fewer layers than its defaults say, for one that is too large."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.arguments import Call, call_of
from attn_fuse.explain.building.sizes import DEPTH_NAME, in_words
from attn_fuse.explain.opening.open_file import Say
from attn_fuse.explain.reading.signatures import defaults_of

# How deep a config may be within another.
DEEPEST = 3
# Sequences of the numbers of layers of several stages.
STAGES_NAME = r"depths?$|blocks$|layers$"
# What a model of few layers may still have too many of, and how many it gets: more experts than a token goes to.
FEW_OF = ((r"experts$", 8), (r"vocab(ulary)?_?size$|^n_?(words|vocab)$|vocab_len$", 1000))


def shrunk(
    cls: type[nn.Module], namespace: Mapping[str, Any], path: Path, layers: int, few: bool, why: str, say: Say
) -> Call:
    """A call of `cls` with `layers` layers where a default says more, also one of the config that stands for None, and
    what says its sizes. few: whether it has few experts and words, too. why: to say of it.

    Raises ExplainError where no default says how many layers there are.
    """
    for with_none in (False, True):
        silent: list[str] = []
        _, holders = call_of(cls, namespace, path, silent.append, with_none=with_none)
        fewer = fewer_by_default(cls, layers, few)
        # A default is of the class, and of its next model, too.
        copies = {name: copy.copy(value) for name, value in defaults_of(cls).items() if _is_config(value)}
        shared = {id(value) for value in defaults_of(cls).values()}
        own = [config for config in holders if _is_config(config) and id(config) not in shared]
        for config in (*own, *copies.values()):
            fewer |= _shrink(config, layers, few)
        if fewer:
            break
    if not fewer:
        raise ExplainError(f"cannot build {cls.__name__}: no default says how many layers it has")
    for note in silent:
        say(note)
    say(f"fewer layers{', experts and words' if few else ''}, {why}: {in_words(fewer)}")
    given, defaults = holders[-1], defaults_of(cls)
    made = given.items() if isinstance(given, dict) else ()
    arguments = {name: value for name, value in made if name not in defaults or value is not defaults[name]}
    arguments |= {name: value for name, value in fewer.items() if name in defaults}
    return lambda: cls(**{**copies, **arguments}), (*copies.values(), *holders)


def _is_config(value: object) -> bool:
    is_code = isinstance(value, (type, types.ModuleType, Mapping)) or callable(value)
    return not is_code and hasattr(value, "__dict__")


def _shrink(config: object, layers: int, few: bool, depth: int = 0) -> dict[str, Any]:
    # What a config gets less of; those within it are copied before they are changed.
    fewer: dict[str, Any] = {}
    for name, value in [*vars(config).items()]:
        if (less := _fewer(name, value, layers, few)) is not None:
            object.__setattr__(config, name, less)
            fewer[name] = less
        elif _is_config(value) and depth + 1 < DEEPEST:
            inner = copy.copy(value)
            if within := _shrink(inner, layers, few, depth + 1):
                object.__setattr__(config, name, inner)
                fewer |= within
    return fewer


def fewer_by_default(cls: type[nn.Module], layers: int, few: bool = False) -> dict[str, Any]:
    """The arguments of `cls` whose defaults say that there are more layers than `layers`, with as many.

    few: whether those of experts and words count, too.
    """
    found = {name: _fewer(name, value, layers, few) for name, value in defaults_of(cls).items()}
    return {name: value for name, value in found.items() if value is not None}


def _fewer(name: str, value: Any, layers: int, few: bool) -> Any:
    # A number of layers, or the numbers of several stages, where that is less, and the same of `few`; None where it is
    # not.
    if few and type(value) is int:
        less = next((most for pattern, most in FEW_OF if re.search(pattern, name.lower()) and value > most), None)
        if less is not None:
            return less
    if re.search(DEPTH_NAME, name.lower()) and isinstance(value, int) and value > 2:
        return layers
    if re.search(STAGES_NAME, name.lower()) and isinstance(value, (list, tuple)):
        less = _at_most(value, layers)
        return less if less != value else None
    return None


def _at_most(value: Any, layers: int) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_at_most(one, layers) for one in value)
    return min(value, layers) if type(value) is int else value
