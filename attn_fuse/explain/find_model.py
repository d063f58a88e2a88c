"""The model of a source file: its outermost nn.Module class, an instance from its defaults, and inputs that it runs on.

A file that only defines classes will do. An `ExplainError` asks for what is uncertain: we never make it up.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError

CONFIG_NAMES = ("config", "configuration", "cfg", "conf", "args", "params", "hparams", "options", "settings")
LENGTH_NAMES = (
    "block_size",
    "n_positions",
    "max_position_embeddings",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "seq_len",
    "seq_length",
    "sequence_length",
    "context_length",
    "context_size",
    "context_len",
    "n_ctx",
    "max_len",
    "max_length",
)
PICTURE_NAMES = ("image_size", "img_size", "input_size", "resolution")

# Sequence lengths: of a first cheap run, for a model that declares none, and the max that is tried unasked.
SHORT, USUAL, LONGEST = 8, 64, 1024


@contextlib.contextmanager
def imported(path: Path) -> Iterator[types.ModuleType]:
    """The file at `path` as a module; within the block it stands in `sys.modules`, and its import root on `sys.path`.

    A file inside a package is imported as a module of that package, so that its relative imports work.
    Raises ExplainError where there is no such file, or importing it raises.
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
    """The nn.Module class of the file that no other class uses; of several, the class that uses the most others.

    Raises ExplainError where the file defines none, or where several are equally outermost.
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
    """An instance of `cls`, built from the defaults of `cls` and of its config classes, and the configs.

    namespace: the names of the file, among which the config classes are sought.
    Raises ExplainError where an argument has no default, or where the constructor raises.
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
    """The value of the Python expression that `flag` was given; `namespace` and `torch` are its names.

    Raises ExplainError where it does not evaluate.
    """
    try:
        return eval(compile(expression.strip(), f"<{flag}>", "eval"), {"torch": torch, **namespace})
    except Exception as error:
        raise ExplainError(f"{flag} {expression!r} does not evaluate: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """The type of `error`, the first line of its message, and the user's file and line that raised it."""
    lines = str(error).strip().splitlines()
    library = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    if isinstance(error, SyntaxError):
        where = f"{Path(error.filename or '').name}:{error.lineno}"
        return f"{type(error).__name__}: {error.msg}" + ("" if where.startswith("<") else f" ({where})")
    message = lines[0] if lines else frames[-1].line if frames else ""
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model, by position and by name; as text, their dtypes and shapes."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([*map(_in_words, self.args), *(f"{name}={_in_words(v)}" for name, v in self.kwargs.items())])


def inputs_for(model: nn.Module, configs: Sequence[object] = (), targets: bool = False) -> Inputs:
    """Inputs that `model` runs on, of the length that it or one of `configs` declares.

    targets: whether to pass integer targets too, where forward has a parameter for them.
    Raises ExplainError where no guess runs.
    """
    trial = _Trial(model, targets)
    holders = [model, *configs, *(getattr(model, name) for name in CONFIG_NAMES if hasattr(model, name))]
    length = _declared(holders, LENGTH_NAMES)
    ran = (
        _on_tokens(trial, model, length)
        or _on_pictures(trial, model, _declared(holders, PICTURE_NAMES))
        or _on_floats(trial, model, length)
    )
    if ran is not None:
        return ran.inputs
    tried = f"with {trial.failures[0]}" if trial.failures else "it has no embedding, convolution or linear layer"
    raise ExplainError(
        f"no inputs found that {type(model).__name__} runs on ({tried}); "
        f"pass them with --inputs, as in --inputs 'torch.randn(1, 64, 512)'"
    )


@dataclass(frozen=True)
class _Ran:
    # Inputs that the model ran on, and what each of its embeddings was given.
    inputs: Inputs
    embedded: list[tuple[nn.Embedding, Tensor]]


class _Trial:
    """Runs the model on guesses of its first argument, with the other required ones filled in by name."""

    def __init__(self, model: nn.Module, targets: bool) -> None:
        self.model = model
        self.parameters = list(inspect.signature(model.forward).parameters.values())
        self.targets = next((p.name for p in self.parameters[1:] if targets and p.name in ("targets", "labels")), None)
        weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        self.device, self.dtype = weight.device, weight.dtype
        self.failures: list[str] = []

    def __call__(self, first: Tensor) -> _Ran | None:
        for inputs in self._guesses(first.to(self.device)):
            try:
                with torch.no_grad(), _embedded(self.model) as embedded:
                    self.model(*inputs.args, **inputs.kwargs)
                return _Ran(inputs, embedded)
            except Exception as error:
                self.failures.append(f"{inputs}: {in_one_line(error)}")
        return None

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype)

    def _guesses(self, first: Tensor) -> Iterator[Inputs]:
        if not self.parameters:
            yield Inputs()
            return
        others = [p for p in self.parameters[1:] if p.default is p.empty and p.name != self.targets and _is_named(p)]
        masks: list[Tensor | None] = [None]
        if any("mask" in p.name for p in others) and first.dim() > 1:
            length = first.shape[1]
            masks += [torch.ones(shape, device=self.device) for shape in ((length, length), (1, length))]
        for mask in masks:
            values = {p.name: _filler(p, first, mask) for p in others}
            args = (first, *(values.pop(p.name) for p in others if p.kind is not p.KEYWORD_ONLY))
            if self.targets is not None and not first.is_floating_point():
                yield Inputs(args, {**values, self.targets: first.roll(-1)})
            yield Inputs(args, values)


@contextlib.contextmanager
def _embedded(model: nn.Module) -> Iterator[list[tuple[nn.Embedding, Tensor]]]:
    # A list that receives each embedding of the model that is called within the block, with its input.
    calls: list[tuple[nn.Embedding, Tensor]] = []
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    hooks = [m.register_forward_pre_hook(lambda module, args: calls.append((module, args[0]))) for m in embeddings]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _filler(parameter: inspect.Parameter, first: Tensor, mask: Tensor | None) -> object:
    if "mask" in parameter.name:
        return mask
    if parameter.annotation in (int, "int") or parameter.name in ("start_pos", "pos", "offset", "step", "past_len"):
        return 0
    return first


def _on_tokens(trial: _Trial, model: nn.Module, length: int | None) -> _Ran | None:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        return None
    # Descending tokens: a model makes no such positions or token types of its own, so we know its token embeddings.
    vocab = min(embedding.num_embeddings for embedding in embeddings)
    lengths = (min(SHORT, length or SHORT), min(length or USUAL, LONGEST))
    probe = _first(trial(torch.arange(size).flip(0)[None] % vocab) for size in lengths)
    if probe is None:
        return None
    tokens = probe.inputs.args[0] if probe.inputs.args else torch.empty(0)
    takers = [module for module, given in probe.embedded if torch.equal(given.flatten(), tokens.flatten())]
    if not takers:
        return None
    if length is None:
        length = min((m.num_embeddings for m, _ in probe.embedded if m not in takers), default=USUAL)
    vocab = min(module.num_embeddings for module in takers)
    return trial(torch.randint(vocab, (1, min(length, LONGEST)))) or probe


def _on_pictures(trial: _Trial, model: nn.Module, size: int | None) -> _Ran | None:
    convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if convolution is None:
        return None
    sizes = (size,) if size else (224, 32)
    return _first(trial(trial.floats(1, convolution.in_channels, size, size)) for size in sizes)


def _on_floats(trial: _Trial, model: nn.Module, length: int | None) -> _Ran | None:
    linear = next((module for module in model.modules() if isinstance(module, nn.Linear)), None)
    if linear is None:
        return None
    short = trial(trial.floats(1, SHORT, linear.in_features))
    return trial(trial.floats(1, min(length or USUAL, LONGEST), linear.in_features)) or short


def _first(runs: Iterator[_Ran | None]) -> _Ran | None:
    return next((ran for ran in runs if ran is not None), None)


def _declared(holders: Sequence[object], names: Sequence[str]) -> int | None:
    # The first positive whole number that one of the holders has under one of the names.
    for name in names:
        for holder in holders:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if isinstance(value, (tuple, list)) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _in_words(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__


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
    source = getattr(module, "__file__", None) or "another module"
    if Path(source).resolve() != path:
        raise ExplainError(f"{path} cannot be imported: {source} is imported as {name} already")
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
        named = name.lower().endswith(CONFIG_NAMES)
        return next((o for o in options if _is_config_class(o) or (named and o.__module__ != "builtins")), None)
    if not name.lower().endswith(CONFIG_NAMES):
        return None
    own = [v for v in namespace.values() if _is_config_class(v) and v.__module__ == namespace.get("__name__")]
    candidates = list(dict.fromkeys(own))
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


def _is_config_class(value: object) -> typing.TypeGuard[type]:
    if not isinstance(value, type) or issubclass(value, nn.Module):
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
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _called(cls: type[nn.Module], arguments: Mapping[str, object]) -> nn.Module:
    bound = inspect.signature(cls).bind(**arguments)
    return cls(*bound.args, **bound.kwargs)
