"""Config files of a repository, YAML, JSON, TOML and Python: which of their mappings has the entries a model reads."""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attn_fuse.explain.reading.literals import literal
from attn_fuse.explain.roots import repository_of

MOST_FILES, MOST_BYTES, DEEPEST = 200, 200_000, 4
# Fewer arguments than these, in a file that does not name the class, may be another's.
FEW = 3
PASSED_OVER = {"node_modules", "venv", "env", "site-packages", "__pycache__"}
SUFFIXES = (".yaml", ".yml", ".json", ".toml")
SETTINGS = re.compile(r"config|cfg|settings|param|options|defaults", re.I)
SMALL = re.compile(r"default|tiny|nano|small|base|mini", re.I)


@dataclass(frozen=True)
class Entries:
    """A mapping of a config file.

    source: the file's name, and the key below which the mapping stands there. text: the whole file's.
    """

    source: str
    values: Mapping[str, Any]
    text: str = ""


def entries_with(needed: Set[str], name: str, path: Path) -> Entries | None:
    """The mapping with the most of the entries `needed`, in the config files of the repository that holds `path`.

    name: of the argument that takes the mapping; of equal ones, that whose file or key shares a word with it is taken.
    Entries that a Python file sets are defaults, and a file that sets some of the same anew is laid over them.
    None where no mapping has half of them.
    """
    words = set(name.lower().split("_"))
    best: tuple[tuple[int, int, bool], Entries] | None = None
    every = list(_all_entries(path))
    for found in every:
        count = len(needed & found.values.keys())
        shared = len(words & set(re.split(r"[^a-z]+", found.source.lower())))
        score = (count, shared, bool(SMALL.search(found.source)))
        if count and count * 2 >= len(needed) and (best is None or score > best[0]):
            best = score, found
    return _with_file_over(best[1], every, needed, path.stem) if best is not None else None


def _with_file_over(defaults: Entries, every: Sequence[Entries], needed: Set[str], model: str) -> Entries:
    # model: the name of its file, which that of its settings may have, too.
    file, python, _ = defaults.source.partition(".py: ")
    if not python:
        return defaults
    over = [
        e
        for e in every
        if e.source.endswith(SUFFIXES) or (".py: " in e.source and not e.source.startswith(f"{file}.py"))
        if needed & e.values.keys() and e.values.keys() <= defaults.values.keys()
    ]
    if not over:
        return defaults
    first = max(over, key=lambda e: (model in e.source, len(needed & e.values.keys()), bool(SMALL.search(e.source))))
    source = f"{defaults.source}, and {first.source} over it"
    return Entries(source, _laid_over(defaults.values, first.values), first.text)


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: _laid_over(below[k], v) for k, v in above.items() if isinstance(v, dict) and type(below.get(k)) is dict}
    return {**below, **above, **both}


def arguments_in(needed: Set[str], taken: Set[str] | None, name: str, path: Path) -> Entries | None:
    """The arguments of a constructor that a config file of the repository of `path` spells out, or None.

    needed: those that have no default. taken: those that the constructor takes, or None for any. name: of the class.
    A file that names the class and has all that is needed comes first, then that with the most,
    at least half of it and FEW.
    """
    best: Entries | None = None
    most = max(FEW, (len(needed) + 1) // 2) - 1
    for found in _all_entries(path):
        if taken is not None and not found.values.keys() <= taken:
            continue
        if needed <= found.values.keys() and name in found.text:
            return found
        if (count := len(needed & found.values.keys())) > most:
            best, most = found, count
    return best


def documents_of(path: Path) -> Iterator[tuple[str, object, str]]:
    """The config files of the repository that holds `path`: the name of each, what it says, and its text."""
    root = repository_of(path)
    for file in itertools.islice(_files(root), MOST_FILES):
        text = _text_of(file)
        yield str(file.relative_to(root)), _parsed(file.suffix, text), text


def _all_entries(path: Path) -> Iterator[Entries]:
    for source, document, text in documents_of(path):
        for found in _nested(source, document, 0):
            yield replace(found, text=text)
            # yacs' names are capitals, and code that lowers them reads the others.
            if found.values and all(key.isupper() for key in found.values):
                yield replace(found, values={k.lower(): _lowered(v) for k, v in found.values.items()}, text=text)


def _lowered(value: object) -> object:
    return {str(key).lower(): _lowered(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _files(root: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in PASSED_OVER and not f.startswith("."))
        yield from (Path(place) / n for n in sorted(names) if n.endswith(SUFFIXES))
        is_of_settings = SETTINGS.search(str(Path(place).relative_to(root))) is not None
        yield from (
            Path(place) / n for n in sorted(names) if n.endswith(".py") and (is_of_settings or SETTINGS.search(n))
        )


def _nested(source: str, value: object, depth: int) -> Iterator[Entries]:
    if not isinstance(value, dict) or depth > DEEPEST:
        return
    # What another file or the command line fills in says nothing here.
    known = {str(k): v for k, v in value.items() if not (isinstance(v, str) and ("${" in v or v == "???"))}
    yield Entries(source, known)
    for key, inner in known.items():
        yield from _nested(f"{source}: {key}" if depth == 0 else f"{source}.{key}", inner, depth + 1)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size < MOST_BYTES else ""
    except OSError:
        return ""


def _parsed(suffix: str, text: str) -> object:
    try:
        if suffix == ".json":
            return json.loads(text)
        if suffix == ".py":
            return _of_python(text)
        return tomllib.loads(text) if suffix == ".toml" else _of_yaml(text)
    except (ValueError, SyntaxError, RecursionError):
        return None


def _of_python(text: str) -> dict[str, object]:
    # The dicts that a file of settings spells out, by the names that it, or its functions, give them.
    tree = ast.parse(text)
    found = _spelled_out(tree.body, set())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            held = _spelled_out(node.body, {argument.arg for argument in node.args.args})
            found |= {node.name if len(held) == 1 else f"{node.name}.{name}": value for name, value in held.items()}
    return found


def _spelled_out(body: Sequence[ast.stmt], holders: set[str]) -> dict[str, object]:
    # The dicts that statements spell out, by name. holders: names that have entries already; so do those that get what
    # a call gives, as in `_C = CfgNode()`, of which entries are set one by one. A name may be short for an entry, as in
    # `model = config.model = CfgNode()`.
    found: dict[str, object] = {}
    short: dict[str, list[str]] = {}
    for node in body:
        match node:
            case ast.Assign(targets, ast.Call(_, [], []) | ast.Attribute()):
                value = node.value
                entries = [ast.unparse(t).split(".") for t in (*targets, value) if isinstance(t, ast.Attribute)]
                entry = next((keys for keys in entries if keys[0] in holders), None)
                if entry is not None:
                    short |= {target.id: entry for target in targets if isinstance(target, ast.Name)}
                    continue
        match node:
            case ast.Assign([ast.Name(name)], ast.Dict() as written):
                with contextlib.suppress(ValueError, TypeError):
                    found[name] = literal(written)
            case ast.Assign([ast.Name(name)], ast.Call(_, [], given)):
                holders.add(name)
                with contextlib.suppress(ValueError, TypeError):
                    if given:
                        found[name] = {k.arg: literal(k.value) for k in given if k.arg is not None}
            case ast.Assign([ast.Attribute() as target], value):
                name, *keys = ast.unparse(target).split(".")
                name, *keys = *short.get(name, [name]), *keys
                if name in holders and all(key.isidentifier() for key in keys):
                    with contextlib.suppress(ValueError, TypeError):
                        _set(found, [name, *keys], literal(value))
    return found


def _set(held: dict[str, Any], keys: Sequence[str], value: object) -> None:
    # Raises TypeError where an entry on the way holds no entries.
    for key in keys[:-1]:
        held = held.setdefault(key, {})
    held[keys[-1]] = value


def _of_yaml(text: str) -> object:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        return plain_yaml(text)
    try:
        return yaml.safe_load(text)
    except Exception:  # tags and templates
        return None


def plain_yaml(text: str) -> object:
    """What `text` says in the YAML that configs use, for where PyYAML is missing: mappings, lists, numbers, strings.

    None where it uses more of the language than that.
    """
    lines = []
    for line in text.splitlines():
        bare = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if bare.strip() not in ("", "---"):
            lines.append((len(bare) - len(bare.lstrip()), bare.strip()))
    try:
        value, rest = _block(lines, 0)
    except (IndexError, RecursionError):
        return None
    return value if rest == len(lines) else None


def _block(lines: list[tuple[int, str]], start: int) -> tuple[object, int]:
    # The value of the lines from `start` on that are indented as it is, and the line after them.
    indent, at = lines[start][0], start
    if lines[start][1].startswith("- "):
        items: list[object] = []
        while at < len(lines) and lines[at][0] == indent and lines[at][1].startswith("- "):
            inner = lines[at][1][2:].strip()
            if re.match(r"[\w.-]+\s*:(\s|$)", inner):
                shifted = [*lines[:at], (indent + 2, inner), *lines[at + 1 :]]
                item, at = _block(shifted, at)
            else:
                item, at = _scalar(inner), at + 1
            items.append(item)
        return items, at
    values: dict[str, object] = {}
    while at < len(lines) and lines[at][0] == indent:
        matched = re.match(r"""(["']?)([^"':]+)\1\s*:(?:\s+(.*))?$""", lines[at][1])
        if matched is None:
            break
        key, given = matched[2].strip(), matched[3]
        at += 1
        if given:
            values[key] = _scalar(given)
        elif at < len(lines) and (lines[at][0] > indent or (lines[at][0] == indent and lines[at][1].startswith("- "))):
            values[key], at = _block(lines, at)
        else:
            values[key] = None
    return values, at


def _scalar(text: str) -> object:
    words = {"true": True, "false": False, "yes": True, "no": False, "null": None, "~": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if re.fullmatch(r"\[.*\]", text):
        return [_scalar(part.strip()) for part in text[1:-1].split(",") if part.strip()]
    return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else text
