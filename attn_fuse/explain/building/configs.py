"""A config of which no class is known: one that the repository spells out, or small sizes."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import re
import types
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, cast

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.config_reads import Reads, reads_of, tree_in
from attn_fuse.explain.building.sizes import BY_KIND, VOCABULARY, guess_for, value_for
from attn_fuse.explain.opening.no_gpu import on_this_machine
from attn_fuse.explain.opening.open_file import Say
from attn_fuse.explain.reading.config_files import entries_with
from attn_fuse.explain.reading.signatures import without_default
from attn_fuse.explain.reading.snippets import only_defines
from attn_fuse.explain.reading.written_options import options_with
from attn_fuse.explain.steps import TimeUp, limited

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
    "opts",
)
# Names of classes, and of values of a file, that hold a config.
CLASS_NAMES = (*CONFIG_NAMES, "dimensions")
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
    guess: the value of what no source knows, or None to raise there. length: what `len` of it gives, where the model
    asks for that of a vocabulary; None for the number of its entries.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        given: Mapping[str, Any] | None = None,
        groups: Set[str] = frozenset(),
        guess: Any = None,
        length: int | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["_length"] = length
        self.__dict__["_guess"] = guess
        self.__dict__["_name"] = name
        self.__dict__["_options"] = dict(options)
        self.__dict__["_groups"] = frozenset(groups)
        for key, value in (given or {}).items():
            self[key] = self._group(key, value) if type(value) is dict else on_this_machine(key, value)

    def __len__(self) -> int:
        length = self.__dict__.get("_length")
        return super().__len__() if length is None else length

    def __missing__(self, key: str) -> Any:
        options = self.__dict__["_options"]
        value = options.get(key)
        if isinstance(value, dict) or (value is None and key in self.__dict__["_groups"]):
            self[key] = self._group(key, None)
            return self[key]
        value = value if value is not None else value_for(key, None, {**options, **self})
        value = value if value is not None or key in options else guess_for(key, self.__dict__["_guess"])
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


def small_config(
    name: str, reads: Reads, options: Mapping[str, Any], given: Mapping[str, Any], guess: Any = None
) -> SmallConfig:
    """A config for the argument `name`, of which the code reads `reads`; the rest is as for SmallConfig.

    What nothing but the code's own branch for None says is None.
    """
    known = {key for key, value in options.items() if value is not None} | given.keys()
    absent = dict.fromkeys(reads.optional - known)
    length = VOCABULARY if reads.is_counted else None
    return SmallConfig(name, {**reads.values, **options}, {**absent, **given}, reads.groups, guess, length)


def is_config_name(name: str) -> bool:
    """Whether an argument of this name is a config."""
    name = name.lower().strip("_")
    return name.endswith(CONFIG_NAMES) or name in ("hp", "hps")


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
    reads = reads_of(cls, name, path)
    needed = reads.entries
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
    beside = entries_with(needed, name, path)
    if beside is None and reads.own:
        # What other files read of arguments of this name may be of another config.
        needed = reads.own
        beside = entries_with(needed, name, path)
    if beside is not None and 2 * len(needed & beside.values.keys()) >= written.known:
        say(f"{name}: {beside.source}")
        return small_config(name, reads, written.values, beside.values, guess)
    if written.source is not None:
        say(f"{name}: the defaults of {written.source}, and small numbers by name for the rest")
    else:
        say(f"{name}: small numbers by name")
    if guess is not None:
        value = "" if guess is BY_KIND else f", {guess!r},"
        say(f"{name}: a guess{value} for entries whose names say nothing")
    return small_config(name, reads, written.values, {}, guess)


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
        if file != path and only_defines(tree_in(str(file))):
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
