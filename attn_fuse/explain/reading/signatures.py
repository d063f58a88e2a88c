"""The arguments of functions and of constructors: their defaults, their annotations, and what `**kwargs` hands on."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import types
import typing
from collections.abc import Callable
from typing import Any

from torch import nn

from attn_fuse.explain.opening.absent_values import StandIn


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
        own = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # a class written in C has no signature
        return []
    if isinstance(function, type) and any(p.kind is p.VAR_KEYWORD for p in own):
        names = {p.name for p in own}
        handed_on = [p for p in _handed_on(function) if p.name not in names]
        own = [*own, *(p.replace(kind=p.KEYWORD_ONLY) for p in handed_on if p.kind is not p.VAR_POSITIONAL)]
    return own


def _handed_on(cls: type) -> list[inspect.Parameter]:
    # The parameters of the constructor above, or of a module's, that the constructor of `cls` hands its **kwargs on to.
    owner = next((base for base in cls.__mro__ if isinstance(vars(base).get("__init__"), types.FunctionType)), None)
    if owner is None or owner.__module__.startswith("torch."):
        return []
    above = cls.__mro__[cls.__mro__.index(owner) + 1]
    names = vars(owner)["__init__"].__globals__
    for node in ast.walk(tree_of_function(vars(owner)["__init__"])):
        match node:
            case ast.Call(called, given, keywords) if any(k.arg is None for k in keywords):
                is_above = isinstance(called, ast.Attribute) and called.attr == "__init__"
                inner = names.get(called.id) if isinstance(called, ast.Name) else None
                if not is_above and not (isinstance(inner, type) and issubclass(inner, nn.Module)):
                    continue
                parameters = _parameters(inner if isinstance(inner, type) else above)
                count = sum(not isinstance(one, ast.Starred) for one in given)
                named = {keyword.arg for keyword in keywords}
                return [p for p in parameters[count:] if p.name not in named]
    return []


def tree_of_function(function: Any) -> ast.AST:
    """The syntax tree of a function; an empty one where its source cannot be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, ValueError, SyntaxError):
        return ast.Module([], [])


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments of a function or of a class's constructor; none where one cannot be resolved."""
    made_by = [vars(base)["__init__"] for base in reversed(bases_of(function)) if "__init__" in vars(base)]
    hints: dict[str, Any] = {}
    if isinstance(function, type) and issubclass(function, tuple):
        with contextlib.suppress(Exception):
            return typing.get_type_hints(function)
    # Pydantic's models.
    fields = getattr(function, "model_fields", None)
    if isinstance(fields, dict):
        return {name: getattr(field, "annotation", None) for name, field in fields.items()}
    for one in made_by if isinstance(function, type) else [function]:
        # An annotation that cannot be resolved says nothing; nor does that of a base's `*args` of an argument `args`.
        with contextlib.suppress(Exception):
            several = {
                p.name
                for p in inspect.signature(one).parameters.values()
                if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            }
            hints |= {name: hint for name, hint in typing.get_type_hints(one).items() if name not in several}
    # Nor does one of a package that is not installed.
    return {name: hint for name, hint in hints.items() if not isinstance(hint, StandIn)}


def annotation_of(parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter; `Parameter.empty` where it has none, or one of a package that is not installed."""
    return parameter.empty if isinstance(parameter.annotation, StandIn) else parameter.annotation


def bases_of(function: object) -> list[type]:
    """The classes whose constructors may take the arguments of a class; none of a function."""
    if not isinstance(function, type):
        return []
    return [base for base in function.__mro__ if base is not object and base is not nn.Module]
