"""A config for a constructor: an object of its class, one that the repository spells out, or small sizes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.open_file import Say, repository_of
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.sizes import in_words, value_for

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
# How many files of a repository are read for the defaults of its command line.
MOST_FILES = 200


class SmallConfig(dict[str, Any]):
    """A config whose entries come into being when they are asked for, as an attribute or by key.

    options: what a command line of the repository, or a comparison in the model's code, says of an entry; what neither
    does gets a small value by its name. Asking for what no source knows raises ExplainError.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__["_name"] = name
        self.__dict__["_options"] = dict(options)

    def __missing__(self, key: str) -> Any:
        options = self.__dict__["_options"]
        value = options.get(key)
        value = value if value is not None else value_for(key, None, {**options, **self})
        if value is None and key not in options:
            name = self.__dict__["_name"]
            raise ExplainError(f"{name} is made up of small numbers, and none is known for {name}.{key}")
        self[key] = value
        return value

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
    return name.lower().endswith(CONFIG_NAMES)


def config_class(cls: type, name: str, hint: Any, namespace: Mapping[str, Any]) -> type | None:
    """The class whose defaults make the constructor's argument `name`, or None where no class is meant.

    Raises ExplainError where several may be.
    """
    if hint is not None:
        options = [option for option in typing.get_args(hint) or (hint,) if isinstance(option, type)]
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


def config_of(cls: type, config: type, say: Say) -> object:
    """An object of the class `config`, from its defaults, and from small sizes for fields without one.

    Raises ExplainError where a field has neither, or where the class raises.
    """
    given = defaults_of(config)
    missing = {name: value_for(name, hint, given) for name, hint in without_default(config).items()}
    if unknown := [name for name, value in missing.items() if value is None]:
        values = ", ".join(f"{name}=..." for name in unknown)
        raise ExplainError(
            f"cannot build {cls.__name__}: {config.__name__} has no default for {', '.join(unknown)}; "
            f"pass --entry '{cls.__name__}({config.__name__}({values}))'"
        )
    try:
        made = config(**missing)
    except Exception as error:
        raise ExplainError(
            f"cannot build {cls.__name__}: {config.__name__}() raises {in_one_line(error)}; "
            f"pass --entry '{cls.__name__}({config.__name__}(...))'"
        ) from error
    filled = _filled(made)
    if missing or filled:
        say(f"sizes by name: {config.__name__}({in_words({**missing, **filled})})")
    return made


def _filled(config: Any) -> dict[str, Any]:
    # Sets the vocabulary that a config leaves open by -1, as LLaMA's does, and gives what it set.
    filled: dict[str, Any] = {}
    if not dataclasses.is_dataclass(config):
        return filled
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value == -1 and "vocab" in field.name:
            with_value = value_for(field.name)
            try:
                setattr(config, field.name, with_value)
            except AttributeError:  # frozen
                continue
            filled[field.name] = with_value
    return filled


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the arguments of `function`, by name."""
    return {p.name: p.default for p in _parameters(function) if p.default is not p.empty}


def without_default(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of `function` that have no default, by name, with their annotation or None."""
    hints = hints_of(function)
    return {
        p.name: hints.get(p.name)
        for p in _parameters(function)
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # a class written in C has no signature
        return []


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments of a function or of a class's constructor; none where one cannot be resolved."""
    try:
        return typing.get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    except Exception:  # an annotation that cannot be resolved says nothing
        return {}


def _is_config_class(value: object) -> typing.TypeGuard[type]:
    if not isinstance(value, type) or issubclass(value, nn.Module) or value.__module__ == "builtins":
        return False
    return dataclasses.is_dataclass(value) or value.__name__.lower().endswith(CLASS_NAMES)


def config_without_class(cls: type, name: str, namespace: Mapping[str, Any], path: Path, say: Say) -> object:
    """A config for the argument `name` of `cls` where no class says what it is.

    It is a dict or namespace of the file that has the entries that the code reads, else a SmallConfig.
    """
    needed = _entries_of(cls, name)
    best: tuple[int, object, str] | None = None
    for key, value in namespace.items():
        holder = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if key.startswith("__") or not isinstance(value, (dict, types.SimpleNamespace)) or not holder:
            continue
        found = len(needed & holder.keys())
        if found and (best is None or found > best[0]):
            best = (found, value, key)
    if best is not None and best[0] * 2 >= len(needed):
        say(f"{name}: {best[2]}, as the file has it")
        return best[1]
    options, source = _command_line(needed, path)
    compared = _compared(cls, name)
    if source is not None:
        say(f"{name}: the defaults of {source}, and small numbers by name for the rest")
    else:
        say(f"{name}: small numbers by name")
    return SmallConfig(name, {**compared, **options})


def _tree_of(cls: type) -> ast.AST:
    try:
        file = inspect.getsourcefile(cls)
        return ast.parse(Path(file).read_text(encoding="utf-8", errors="replace")) if file else ast.Module([], [])
    except (OSError, TypeError, SyntaxError, ValueError):
        return ast.Module([], [])


def _entries_of(cls: type, name: str) -> set[str]:
    # The attributes and keys that the file's code reads of a value of this name.
    entries: set[str] = set()
    for node in ast.walk(_tree_of(cls)):
        match node:
            case ast.Attribute(ast.Name(holder) | ast.Attribute(_, holder), attribute) if holder == name:
                entries.add(attribute)
            case ast.Subscript(ast.Name(holder), ast.Constant(str() as key)) if holder == name:
                entries.add(key)
    return entries


def _compared(cls: type, name: str) -> dict[str, Any]:
    # The strings that the code compares an entry with: the first is as good as any.
    found: dict[str, Any] = {}
    for node in ast.walk(_tree_of(cls)):
        match node:
            case ast.Compare(ast.Attribute(ast.Name(holder), key), [ast.Eq() | ast.In()], [against]) if holder == name:
                constants = [n.value for n in ast.walk(against) if isinstance(n, ast.Constant)]
                if constants and isinstance(constants[0], str):
                    found.setdefault(key, constants[0])
    return found


def _command_line(needed: set[str], path: Path) -> tuple[dict[str, Any], str | None]:
    # The defaults of the command line, among the scripts of the repository, that has most of the entries.
    best: dict[str, Any] = {}
    source: str | None = None
    root = repository_of(path)
    for file in itertools.islice(_scripts(root, path), MOST_FILES):
        options = _options_in(file)
        if len(needed & options.keys()) > len(needed & best.keys()):
            best, source = options, file.name
    return (best, source) if best else ({}, None)


def _scripts(root: Path, path: Path) -> Iterator[Path]:
    folders = [path.parent, root, *(p for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith("."))]
    for folder in dict.fromkeys(folders):
        yield from sorted(folder.glob("*.py"))


def _options_in(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text) if "add_argument" in text else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return {}
    options: dict[str, Any] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(_, "add_argument"), flags, keywords):
                names = [f.value for f in flags if isinstance(f, ast.Constant) and isinstance(f.value, str)]
                given = {k.arg: k.value for k in keywords}
                named = given.get("dest")
                key = named.value if isinstance(named, ast.Constant) else max(names, key=len, default="")
                options[str(key).lstrip("-").replace("-", "_")] = _default(given)
    options.pop("", None)
    return options


def _default(given: Mapping[str | None, ast.expr]) -> Any:
    action = given.get("action")
    if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
        return action.value == "store_false"
    try:
        return ast.literal_eval(given["default"])
    except (KeyError, ValueError, TypeError, SyntaxError):
        return None
