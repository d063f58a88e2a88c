"""Configs that name what they build: Hydra's `_target_`, `target` with `params`, `class_path` with `init_args`, and the
`type` of a registry."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.arguments import Call, call_of
from attn_fuse.explain.opening.open_file import Say
from attn_fuse.explain.reading.config_files import documents_of
from attn_fuse.explain.reading.signatures import defaults_of, without_default

# The key that names a class or a function, and the one below which its arguments stand, where it has one.
SPELLINGS = (("_target_", None), ("target", "params"), ("class_path", "init_args"))
# How deep in a config a name is sought, and how many configs of a class are tried.
DEEPEST, MOST = 8, 3
# A value that another entry of the same file gives.
ELSEWHERE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class Target:
    """A config of a class.

    source: the file, and the key in it. arguments: by name, as the file has them. document: all that the file says.
    """

    cls: type
    source: str
    arguments: Mapping[str, Any]
    document: object

    def call(self, namespace: Mapping[str, Any], path: Path, say: Say) -> Call:
        """A call of the class with these arguments, and what says its sizes; what is missing is made up.

        Raises ExplainError where an argument is not known, or names what cannot be imported.
        """
        return _call(self.cls, self.arguments, self.document, namespace, path, say)


def targets_of(cls: type, path: Path) -> Iterator[Target]:
    """The configs of the repository of `path` that name `cls`, those first that name it in its own module.

    A config of a class of the same name elsewhere counts where it has arguments that `cls` takes.
    """
    taken = without_default(cls).keys() | defaults_of(cls).keys()
    found: list[tuple[bool, Target]] = []
    for source, document, _ in documents_of(path):
        for place, name, arguments in _named(document):
            own = {key: value for key, value in arguments.items() if key in taken}
            if name.rpartition(".")[2] == cls.__name__ and own:
                is_elsewhere = name.rpartition(".")[0] != cls.__module__
                found.append((is_elsewhere, Target(cls, f"{source}{place}", own, document)))
        for place, arguments in _typed(document, cls.__name__):
            own = {key: value for key, value in arguments.items() if key in taken}
            if own and arguments.keys() - own.keys() <= {"type"}:
                found.append((True, Target(cls, f"{source}{place}", own, document)))
    found.sort(key=lambda one: one[0])
    yield from (target for _, target in found[:MOST])


def _named(value: object, place: str = "", depth: int = 0) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    # The dotted names in a config, each with the key below which it stands and with its arguments.
    if depth > DEEPEST:
        return
    if isinstance(value, dict):
        if (named := _name_in(value)) is not None:
            yield place, *named
        for key, inner in value.items():
            yield from _named(inner, f"{place}.{key}" if place else f": {key}", depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _named(inner, place, depth + 1)


def _typed(value: object, name: str, place: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # The groups of a config whose type is a class of that name, as the registries of mmcv and BasicSR have them.
    if isinstance(value, dict) and depth <= DEEPEST:
        if value.get("type") == name:
            yield place, value
        for key, inner in value.items():
            yield from _typed(inner, name, f"{place}.{key}" if place else f": {key}", depth + 1)


def _name_in(value: object) -> tuple[str, Mapping[str, Any]] | None:
    if not isinstance(value, dict):
        return None
    for key, below in SPELLINGS:
        name = value.get(key)
        if isinstance(name, str) and "." in name:
            arguments = value if below is None else value.get(below) or {}
            return (name, arguments) if isinstance(arguments, dict) else None
    return None


def _call(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    document: object,
    namespace: Mapping[str, Any],
    path: Path,
    say: Say,
) -> Call:
    given: dict[str, Any] = {}
    parts: dict[str, Callable[[], Any]] = {}
    for key, value in arguments.items():
        if key.startswith("_"):
            continue
        known = _resolved(value, document)
        if known is ELSEWHERE:
            continue
        if next(_named(known), None) is not None:
            parts[key] = functools.partial(_built, known, document, path, say)
        else:
            given[key] = known
    return call_of(function, namespace, path, say, given=given, given_parts=parts)


def _built(value: object, document: object, path: Path, say: Say) -> Any:
    # What a config builds.
    if isinstance(value, list):
        return [_built(inner, document, path, say) for inner in value]
    named = _name_in(value)
    if named is None:
        return {k: _built(v, document, path, say) for k, v in value.items()} if isinstance(value, dict) else value
    name, arguments = named
    module, _, attribute = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ExplainError(f"a config names {name}, and it cannot be imported: {error}") from error
    if isinstance(value, dict) and value.get("_partial_"):
        return functools.partial(function, **{k: v for k, v in arguments.items() if not k.startswith("_")})
    return _call(function, arguments, document, vars(importlib.import_module(module)), path, say)[0]()


def _resolved(value: Any, document: object) -> Any:
    # A value, where it stands elsewhere in the document that one; ELSEWHERE where nothing there says it.
    if not isinstance(value, str) or "${" not in value:
        return value
    asked = ELSEWHERE.fullmatch(value)
    held: Any = document
    for key in asked[1].split(".") if asked else ():
        held = held.get(key, ELSEWHERE) if isinstance(held, dict) else ELSEWHERE
    return held if asked and not (isinstance(held, str) and "${" in held) else ELSEWHERE
