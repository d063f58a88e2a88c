"""The model of a source file: the file imported, its outermost nn.Module class, and an instance built from its defaults.

Takes a file that only defines classes. Whatever is not certain is asked for in an `ExplainError`, never made up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_fuse.errors import ExplainError

CONFIG_NAMES = ("config", "configuration", "cfg", "conf", "args", "params", "hparams", "opt", "options", "settings")


@contextlib.contextmanager
def imported(path: Path) -> Iterator[types.ModuleType]:
    """The file at `path` as a module; within the block it stands in `sys.modules`, and its directory on `sys.path`.

    A file inside a package is imported as a module of that package, so that its relative imports work.

    Raises: ExplainError where there is no such file, or importing it raises.
    """
    if not path.is_file():
        raise ExplainError(f"{path}: {'this is a directory' if path.is_dir() else 'no such file'}; pass a Python file")
    path = path.resolve()
    root, name = _root_and_name(path)
    modules, argv = set(sys.modules), sys.argv
    sys.path.insert(0, str(root))
    sys.argv = [str(path)]
    try:
        yield _module(path, name)
    finally:
        sys.argv = argv
        sys.path.remove(str(root))
        if name not in modules:
            sys.modules.pop(name, None)


def outermost(module: types.ModuleType) -> type[nn.Module]:
    """The nn.Module class of the file that no other one uses; among several, the one that uses the most others.

    Raises: ExplainError where the file defines none, or where several are equally outermost.
    """
    classes = list(dict.fromkeys(value for value in vars(module).values() if _is_module_class(value, module)))
    if not classes:
        raise ExplainError(
            f"{module.__file__}: it defines no nn.Module class; pass --entry EXPR, which gives a model or a function"
        )
    reached = {cls: {other for other in classes if other in _reachable(cls, module)} - {cls} for cls in classes}
    # Two classes that use each other are both outermost: neither is a part of the other.
    outer = [c for c in classes if not any(c in reached[other] and other not in reached[c] for other in classes)]
    most = max(len(reached[cls]) for cls in outer)
    best = [cls for cls in outer if len(reached[cls]) == most]
    if len(best) > 1:
        names = [cls.__name__ for cls in best]
        raise ExplainError(
            f"{module.__file__}: {', '.join(names[:-1])} and {names[-1]} are equally outermost; "
            f"say which with --entry, as in --entry {names[0]}"
        )
    return best[0]


def built(cls: type[nn.Module], namespace: Mapping[str, Any]) -> tuple[nn.Module, tuple[object, ...]]:
    """An instance of `cls` from its defaults and its config class's, and the configs that it was built from.

    Raises: ExplainError where an argument has no default, or where the constructor raises.
    """
    configs: dict[str, object] = {}
    missing: list[str] = []
    hints = _hints(cls)
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        config_class = _config_class(cls, parameter.name, hints.get(parameter.name), namespace)
        if config_class is None:
            missing.append(parameter.name)
        else:
            configs[parameter.name] = _config(cls, config_class)
    if missing:
        raise ExplainError(
            f"cannot build {cls.__name__}: its constructor needs {', '.join(missing)}; "
            f"pass --entry '{cls.__name__}({', '.join(f'{name}=...' for name in missing)})'"
        )
    try:
        return _called(cls, configs), tuple(configs.values())
    except Exception as error:
        raise ExplainError(
            f"cannot build {cls.__name__}: {in_one_line(error)}; build it yourself: --entry '{cls.__name__}(...)'"
        ) from error


def evaluated(flag: str, expression: str, namespace: Mapping[str, Any]) -> Any:
    """The value of the Python expression that a flag was given, in `namespace` and torch's name."""
    try:
        return eval(compile(expression.strip(), f"<{flag}>", "eval"), {"torch": torch, **namespace})
    except Exception as error:
        raise ExplainError(f"{flag} {expression!r} does not evaluate: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """`error` as its type and the first line of its message, with the user's line that raised it."""
    lines = str(error).strip().splitlines()
    library = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    if isinstance(error, SyntaxError):
        where = f"{Path(error.filename or '').name}:{error.lineno}"
        return f"{type(error).__name__}: {error.msg}" + ("" if where.startswith("<") else f" ({where})")
    message = lines[0] if lines else frames[-1].line if frames else ""
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _root_and_name(path: Path) -> tuple[Path, str]:
    # The directory to import from, and the dotted name that the file has there.
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        root, parts = root.parent, [root.name, *parts]
    if len(parts) > 1:
        return root, ".".join(parts)
    # Where another module has the file's name already, the file goes by a longer one.
    name = path.stem
    while name in sys.modules:
        name = f"_{name}"
    return root, name


def _module(path: Path, name: str) -> types.ModuleType:
    try:
        if "." in name:
            module = importlib.import_module(name)
        else:
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise ExplainError(f"{path}: not a Python file; pass one that ends in .py")
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except ExplainError:
        raise
    except SystemExit as error:
        raise ExplainError(f"{path} cannot be imported: it exits; keep what it runs under __main__") from error
    except Exception as error:
        raise ExplainError(f"{path} cannot be imported: {in_one_line(error)}") from error
    if Path(module.__file__ or "").resolve() != path:
        raise ExplainError(f"{path} cannot be imported: {module.__file__} is imported as {name} already")
    return module


def _is_module_class(value: object, module: types.ModuleType) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__


def _reachable(cls: type, module: types.ModuleType) -> set[type]:
    # The classes that the code of `cls` names, and the code of what it names, through the file's own definitions.
    classes: set[type] = set()
    seen: set[int] = set()
    waiting: list[object] = list(_named_by(cls, module))
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            classes.add(value)
        waiting += _named_by(value, module)
    return classes


def _named_by(value: object, module: types.ModuleType) -> Iterator[object]:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if callable(value):
        value = inspect.unwrap(value)
    if isinstance(value, type):
        if value.__module__ == module.__name__:
            yield from value.__bases__
            yield from vars(value).values()
    elif isinstance(value, types.FunctionType):
        if value.__globals__ is vars(module):
            yield from (vars(module)[name] for name in _global_names(value.__code__) if name in vars(module))
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _hints(cls: type) -> dict[str, Any]:
    constructor = cls.__init__  # type: ignore[misc]
    try:
        return typing.get_type_hints(constructor)
    except Exception:  # an annotation that cannot be resolved says nothing
        return {}


def _config_class(cls: type, name: str, hint: Any, namespace: Mapping[str, Any]) -> type | None:
    # The class whose defaults make the constructor's argument `name`, or None where it is no config.
    if hint is not None:
        options = [option for option in typing.get_args(hint) or (hint,) if isinstance(option, type)]
        return next((option for option in options if _is_config_class(option, None)), None)
    if not name.lower().endswith(CONFIG_NAMES):
        return None
    candidates = list(dict.fromkeys(v for v in namespace.values() if _is_config_class(v, namespace.get("__name__"))))
    for wanted in (name.replace("_", ""), f"{cls.__name__}{name}".replace("_", "")):
        for candidate in candidates:
            if candidate.__name__.lower() == wanted.lower():
                return candidate
    candidates = [c for c in candidates if not _without_default(c)] or candidates
    if len(candidates) > 1:
        names = [candidate.__name__ for candidate in candidates]
        raise ExplainError(
            f"cannot build {cls.__name__}: its {name} may be {' or '.join(names)}; "
            f"pass --entry '{cls.__name__}({names[0]}())'"
        )
    return candidates[0] if candidates else None


def _is_config_class(value: object, file_module: str | None) -> typing.TypeGuard[type]:
    # file_module: the module that an unannotated argument's class must be defined in.
    if not isinstance(value, type) or issubclass(value, nn.Module) or value.__module__ in ("builtins", "torch"):
        return False
    if file_module is None:
        return True
    if value.__module__ != file_module:
        return False
    return dataclasses.is_dataclass(value) or value.__name__.lower().endswith(CONFIG_NAMES)


def _config(cls: type, config_class: type) -> object:
    if missing := _without_default(config_class):
        values = ", ".join(f"{name}=..." for name in missing)
        raise ExplainError(
            f"cannot build {cls.__name__}: {config_class.__name__} has no default for {', '.join(missing)}; "
            f"pass --entry '{cls.__name__}({config_class.__name__}({values}))'"
        )
    try:
        return config_class()
    except Exception as error:
        raise ExplainError(
            f"cannot build {cls.__name__}: {config_class.__name__}() raises {in_one_line(error)}; "
            f"pass --entry '{cls.__name__}({config_class.__name__}(...))'"
        ) from error


def _without_default(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a class written in C has no signature
        return []
    return [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _called(cls: type[nn.Module], arguments: Mapping[str, object]) -> nn.Module:
    bound = inspect.signature(cls).bind(**arguments)
    return cls(*bound.args, **bound.kwargs)
