"""What a repository's Python files say of options: defaults of command lines, and modules and classes of settings."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_fuse.explain.opening.no_gpu import on_this_machine
from attn_fuse.explain.reading.literals import literal
from attn_fuse.explain.roots import projects_around, repository_of

# How many files of a repository are read.
MOST_FILES = 200
SETTINGS = re.compile(r"config|cfg|settings|h(yper)?_?param|constants|options|opts|args", re.I)


@dataclass(frozen=True)
class Options:
    """Options that a repository's files spell out.

    source: the file, or file and class, that has the most of the entries that were asked for, or None where none does.
    values: its options, and under names that it lacks those of the other files. known: how many entries it has.
    """

    source: str | None
    values: Mapping[str, Any]
    known: int


def options_with(needed: Set[str], path: Path) -> Options:
    """The options of the repository of `path`, first those of the file that has the most of the entries `needed`.

    Where it has none, those of the project around it: a folder of a project may have a README, too.
    """
    repository = repository_of(path)
    sources: list[tuple[int, str, dict[str, Any]]] = []
    for root in (repository, *projects_around(repository)[:1]):
        for file in itertools.islice(_scripts(root, path), MOST_FILES):
            for source, options in _options_in(file):
                sources.append((len(needed & options.keys()), source, options))
        if any(count for count, _, _ in sources):
            break
    sources.sort(key=lambda one: -one[0])
    if not sources:
        return Options(None, {}, 0)
    known, source, _ = sources[0]
    values: dict[str, Any] = {}
    for _, _, options in reversed(sources):
        values.update({k: v for k, v in options.items() if v is not None or k not in values})
    values = {name: on_this_machine(name, value) for name, value in values.items()}
    return Options(source if known else None, values, known)


def _scripts(root: Path, path: Path) -> Iterator[Path]:
    above = [folder for folder in path.parents if folder.is_relative_to(root)]
    inside = (p for folder in above for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.startswith("."))
    for folder in dict.fromkeys((path.parent, root, *inside)):
        yield from sorted(folder.glob("*.py"))


def _options_in(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        named = SETTINGS.search(file.stem) is not None or SETTINGS.fullmatch(file.parent.name.rstrip("s")) is not None
        tree = ast.parse(text) if "add_argument" in text or named else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return
    if options := _command_line(tree):
        yield file.name, options
    if not named:
        return
    if options := _assigned(tree.body):
        yield file.name, options
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (options := {**_assigned(node.body), **_of_constructor(node)}):
            yield f"{node.name} in {file.name}", options


def _of_constructor(cls: ast.ClassDef) -> dict[str, Any]:
    # What `__init__` sets to a literal, or to the default of a keyword: `self.depth = kwargs.pop("layers", 12)`.
    values: dict[str, Any] = {}
    for function in cls.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "__init__":
            continue
        named = [*function.args.posonlyargs, *function.args.args][-len(function.args.defaults) :]
        defaults = dict(zip((a.arg for a in named), function.args.defaults, strict=False))
        keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        defaults |= {a.arg: given for a, given in keywords if given is not None}
        for node in ast.walk(function):
            match node:
                case ast.Assign([ast.Attribute(ast.Name("self"), name)], given) | ast.AnnAssign(
                    ast.Attribute(ast.Name("self"), name), _, ast.expr() as given
                ):
                    match given:
                        case ast.Call(ast.Attribute(_, "pop" | "get"), [_, default]):
                            given = default
                        case ast.Name(argument) if argument in defaults:
                            given = defaults[argument]
                    with contextlib.suppress(ValueError, TypeError, SyntaxError):
                        values.setdefault(name, literal(given))
    return values


def _command_line(tree: ast.Module) -> dict[str, Any]:
    # As argparse has it: of two arguments for one option the first has the default, and `set_defaults` comes above it.
    options: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(_, "add_argument"), flags, keywords):
                names = [f.value for f in flags if isinstance(f, ast.Constant) and isinstance(f.value, str)]
                given = {k.arg: k.value for k in keywords}
                named = given.get("dest")
                key = named.value if isinstance(named, ast.Constant) else max(names, key=len, default="")
                option = str(key).lstrip("-").replace("-", "_")
                if options.get(option) is None:
                    options[option] = _default(given)
            case ast.Call(ast.Attribute(_, "set_defaults"), [], keywords):
                for keyword in keywords:
                    with contextlib.suppress(ValueError, TypeError, SyntaxError):
                        defaults[str(keyword.arg)] = literal(keyword.value)
    options.pop("", None)
    return {**options, **{name: value for name, value in defaults.items() if name in options}}


def _default(given: Mapping[str | None, ast.expr]) -> Any:
    action = given.get("action")
    if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
        return action.value == "store_false"
    try:
        value = literal(given["default"])
    except (KeyError, ValueError, TypeError, SyntaxError):
        return None
    # Scripts evaluate the text of a sequence.
    if isinstance(value, str) and value[:1] in ("[", "("):
        with contextlib.suppress(ValueError, TypeError, SyntaxError):
            return ast.literal_eval(value)
    return value


def _assigned(body: list[ast.stmt]) -> dict[str, Any]:
    # The literals that statements assign to names.
    values: dict[str, Any] = {}
    for node in body:
        match node:
            case ast.Assign([ast.Name(name)], given) | ast.AnnAssign(ast.Name(name), _, ast.expr() as given):
                with contextlib.suppress(ValueError, TypeError, SyntaxError):
                    values[name] = literal(given)
            case ast.Assign([ast.Attribute() as target], given):
                # `_C.DATA.SIZE = 224` is the entry SIZE of the entry DATA.
                *groups, name = ast.unparse(target).split(".")[1:]
                with contextlib.suppress(ValueError, TypeError, SyntaxError):
                    value = literal(given)
                    held = values
                    for group in groups:
                        held = held.setdefault(group, {})
                    held[name] = value
    return values
