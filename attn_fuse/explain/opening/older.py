"""Names, modules and arguments that older code uses, and that the libraries of today no longer have."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

DATACLASS = dataclasses.dataclass
# torch 1.13 removed it, and models took these names from it.
SIX = "torch._six"
OF_SIX: dict[str, Any] = {
    "container_abcs": collections.abc,
    "string_classes": (str, bytes),
    "int_classes": int,
    "inf": math.inf,
    "nan": math.nan,
    "FileNotFoundError": FileNotFoundError,
    "PY3": True,
    "PY37": True,
}
OF_NUMPY: dict[str, Any] = {"int": int, "float": float, "object": object, "complex": complex, "Inf": math.inf}
# torch 1.9 removed it, and DETR's descendants copied torch's attention, which used it.
OF_LINEAR: dict[str, Any] = {"_LinearWithBias": torch.nn.Linear}
OF_TYPING = ("List", "Optional", "Tuple", "Union")
UNEXPECTED = re.compile(r"([\w.]+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
# What timm calls, or once called, the record of where a model's pretrained weights are.
OF_WEIGHTS = re.compile(r"(default|pretrained)_cfg(_overlay)?|cache_dir")
OF_COLLECTIONS = ("Iterable", "Mapping", "MutableMapping", "Sequence", "Callable", "Hashable")


def imported_part(error: AttributeError) -> bool:
    """Import the module below a package that the package lacks as a name; whether there is one.

    An older version of the package imported it.
    """
    if not isinstance(error.obj, types.ModuleType) or not hasattr(error.obj, "__path__"):
        return False
    try:
        importlib.import_module(f"{error.obj.__name__}.{error.name}")
    except Exception:  # it may be missing, or not run on this machine
        return False
    return str(error.name) in vars(error.obj)


def older_models() -> None:
    """Give transformers' models what version 5 no longer does, where transformers is imported: the methods that make
    masks, and a table of tied weights, which version 5 makes in `post_init`, for those that call `init_weights` alone
    or that name the tied weights in a list.

    An empty table ties no weights.
    """
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return
    for name, value in OF_TRANSFORMERS.items():
        if not hasattr(base, name):
            setattr(base, name, value)
    expanded = getattr(base, "get_expanded_tied_weights_keys", None)
    if expanded is not None and not hasattr(expanded, "__wrapped__"):
        setattr(base, "get_expanded_tied_weights_keys", _of_lists(expanded))  # noqa: B010


def _of_lists(expanded: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expanded)
    def expands(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Version 4 had a list, of weights that are tied to the embedding, and tied them itself.
        return {} if isinstance(self._tied_weights_keys, list) else expanded(self, *args, **kwargs)

    return expands


def _head_mask(self: object, head_mask: Any, num_hidden_layers: int, is_attention_chunked: bool = False) -> list[None]:
    if head_mask is not None:
        raise NotImplementedError("transformers has no get_head_mask any more")
    return [None] * num_hidden_layers


def _inverted_mask(self: Any, encoder_attention_mask: torch.Tensor) -> torch.Tensor:
    # [batch, keys] or [batch, queries, keys], 1 where a key is seen, as what is added to scores.
    mask = (
        encoder_attention_mask[:, None] if encoder_attention_mask.dim() == 3 else encoder_attention_mask[:, None, None]
    )
    return (1 - mask.to(self.dtype)) * torch.finfo(self.dtype).min


OF_TRANSFORMERS: dict[str, Any] = {
    "all_tied_weights_keys": {}, "get_head_mask": _head_mask, "invert_attention_mask": _inverted_mask,
}  # fmt: skip


def _dataclass(cls: Any = None, /, **options: Any) -> Any:
    # Before Python 3.11 a field's default could be an object of another dataclass.
    def decorated(one: type) -> Any:
        for name in inspect.get_annotations(one):
            default = vars(one).get(name)
            if dataclasses.is_dataclass(default) and not isinstance(default, type) and type(default).__hash__ is None:
                made = functools.partial(copy.deepcopy, default)
                setattr(one, name, dataclasses.field(default_factory=made))
        return DATACLASS(one, **options)

    return decorated if cls is None else decorated(cls)


@contextlib.contextmanager
def older_names() -> Iterator[None]:
    """Within the block what torch, NumPy, collections and dataclasses once had can be imported; what exists stays as it
    is."""
    added: list[tuple[types.ModuleType, str]] = []

    def add(module: types.ModuleType, name: str, value: object) -> None:
        if name not in vars(module):
            setattr(module, name, value)
            added.append((module, name))

    if importlib.util.find_spec("numpy") is not None:
        for name, value in OF_NUMPY.items():
            add(importlib.import_module("numpy"), name, value)
    for name, value in OF_LINEAR.items():
        add(torch.nn.modules.linear, name, value)
    # Modules of torch once had these of typing, and files import them from there.
    for name in OF_TYPING:
        add(torch.nn.modules.conv, name, getattr(typing, name))
    for name in OF_COLLECTIONS:
        add(collections, name, getattr(collections.abc, name))
    lacks_six = SIX not in sys.modules and importlib.util.find_spec(SIX) is None
    if lacks_six:
        six = types.ModuleType(SIX)
        vars(six).update(OF_SIX)
        sys.modules[SIX] = six
    dataclasses.dataclass = _dataclass
    try:
        yield
    finally:
        dataclasses.dataclass = DATACLASS
        for module, name in added:
            delattr(module, name)
        if lacks_six:
            sys.modules.pop(SIX, None)


@contextlib.contextmanager
def older_layers(say: Callable[[str], object]) -> Iterator[None]:
    """Within the block torch's TransformerEncoder and TransformerDecoder take layers that know no `is_causal`, which
    torch 2.0 began to pass on; `say` is told of each."""
    stacks = (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)
    constructors = [vars(stack)["__init__"] for stack in stacks]
    say = functools.lru_cache(maxsize=None)(say)  # of several classes of one name once

    def taking(construct: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(construct)
        def constructs(self: Any, *args: Any, **kwargs: Any) -> None:
            for layer in (*args[:1], *(v for name, v in kwargs.items() if name in ("encoder_layer", "decoder_layer"))):
                _ignore_causal(type(layer), say)
            construct(self, *args, **kwargs)

        return constructs

    for stack, construct in zip(stacks, constructors, strict=True):
        setattr(stack, "__init__", taking(construct))  # noqa: B010
    try:
        yield
    finally:
        for stack, construct in zip(stacks, constructors, strict=True):
            setattr(stack, "__init__", construct)  # noqa: B010


def _ignore_causal(layer: type, say: Callable[[str], object]) -> None:
    forward = vars(layer).get("forward")
    if not isinstance(forward, types.FunctionType):
        return
    parameters = inspect.signature(forward).parameters
    if any(p.kind is p.VAR_KEYWORD or "is_causal" in p.name for p in parameters.values()):
        return

    @functools.wraps(forward)
    def ignoring(
        self: Any,
        *args: Any,
        is_causal: Any = None,
        tgt_is_causal: Any = None,
        memory_is_causal: Any = None,
        **given: Any,
    ) -> Any:
        return forward(self, *args, **given)

    layer.forward = ignoring  # type: ignore[attr-defined]
    say(f"{layer.__name__} is of an older torch: is_causal is not passed to it, its mask says as much")


@contextlib.contextmanager
def byte_masks(say: Callable[[str], object]) -> Iterator[None]:
    """Within the block masks of bytes fill as Boolean ones, as older torch had it; `say` is told of the first."""
    told: list[str] = []

    def filling(fill: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fill)
        def filled(self: torch.Tensor, mask: Any, value: Any) -> Any:
            if isinstance(mask, torch.Tensor) and mask.dtype is torch.uint8:
                if not told:
                    told.append("masks of bytes are Boolean here, which this torch asks for")
                    say(told[0])
                mask = mask.bool()
            return fill(self, mask, value)

        return filled

    fills = {name: getattr(torch.Tensor, name) for name in ("masked_fill", "masked_fill_")}
    for name, fill in fills.items():
        setattr(torch.Tensor, name, filling(fill))
    try:
        yield
    finally:
        for name, fill in fills.items():
            setattr(torch.Tensor, name, fill)


def moved_module(name: str) -> str | None:
    """Where an installed package now has the module that it once had as `name`; None where that is not clear.

    A module that moved keeps its own name, or hides it behind an underscore. Of several the one below a folder of the
    same name is meant.
    """
    top, *parts = name.split(".")
    package = sys.modules.get(top)
    scores: dict[str, int] = {}
    for root in map(Path, getattr(package, "__path__", ())):
        for place, folders, files in os.walk(root):
            folders[:] = [folder for folder in folders if (Path(place) / folder / "__init__.py").is_file()]
            below = Path(place).relative_to(root).parts
            for found in (*folders, *(file[:-3] for file in files if file.endswith(".py"))):
                if found.lstrip("_") == parts[-1].lstrip("_"):
                    scores[".".join((top, *below, found))] = _common_end((*below, parts[-1]), parts)
    best = [found for found, score in scores.items() if score == max(scores.values())]
    return best[0] if len(best) == 1 and best[0] != name else None


def _common_end(one: tuple[str, ...], other: list[str]) -> int:
    equal = (a == b for a, b in zip(reversed(one), reversed(other), strict=False))
    return next((i for i, same in enumerate(equal) if not same), min(len(one), len(other)))


@contextlib.contextmanager
def without_argument(error: TypeError, is_users: Callable[[str], bool], say: Callable[[str], object]) -> Iterator[bool]:
    """Within the block a class may be built with the argument that `error` says it lacks, if that makes no difference.

    An older version of a library's class had the argument, and None, 0 or False left out what it was for; another value
    of it still raises. What only says of pretrained weights where they are, a library hands on to a user's class, too.
    `say` is told. Gives whether `error` is of such an argument.
    """
    found = UNEXPECTED.search(str(error))
    cls = _class_called(error, found[1]) if found else None
    if found is None or cls is None:
        yield False
        return
    of_weights = OF_WEIGHTS.fullmatch(found[2]) is not None
    if not of_weights and is_users(str(getattr(sys.modules.get(cls.__module__), "__file__", ""))):
        yield False
        return
    built, argument, has_own = getattr(cls, "__init__"), found[2], "__init__" in vars(cls)  # noqa: B009

    @functools.wraps(built)
    def builds(self: Any, *args: Any, **kwargs: Any) -> None:
        if of_weights:
            kwargs.pop(argument, None)
        elif argument in kwargs and _is_off(kwargs[argument]):
            value = kwargs.pop(argument)
            say(f"{cls.__module__.partition('.')[0]}'s {cls.__name__} has no {argument} any more: {value} left out")
        built(self, *args, **kwargs)

    setattr(cls, "__init__", builds)  # noqa: B010
    try:
        yield True
    finally:
        if has_own:
            setattr(cls, "__init__", built)  # noqa: B010
        else:
            delattr(cls, "__init__")


def _is_off(value: object) -> bool:
    return value is None or (isinstance(value, (bool, int, float)) and value == 0)


def _class_called(error: TypeError, name: str) -> type | None:
    # The class of that qualified name among what the code that raised `error` can see.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return None
    seen = {**trace.tb_frame.f_globals, **trace.tb_frame.f_locals}
    modules = [value for value in seen.values() if isinstance(value, types.ModuleType)]
    seen_inside = itertools.chain.from_iterable(vars(module).values() for module in modules)
    values = (v.func if isinstance(v, functools.partial) else v for v in (*seen.values(), *seen_inside))
    return next((v for v in values if inspect.isclass(v) and v.__qualname__ == name), None)
