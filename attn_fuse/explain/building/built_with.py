"""Values for a constructor's arguments whose names say nothing, from what the constructor builds with them.

The code is read, not run: by `nn.Linear(d_input, d_model)` the argument `d_input` is a width, by `range(n)` n is a
number of layers.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from attn_fuse.explain.building.sizes import DEPTH, KERNEL, OUTPUT_NAME, VOCABULARY, Known, value_for
from attn_fuse.explain.reading.signatures import bases_of, defaults_of, tree_of_function

# How many classes deep an argument is followed.
DEEPEST = 4
# What the layers of torch take, by position: a word for each.
_TAKES = {
    "Linear": ("width", "width"), "LazyLinear": ("width",), "Bilinear": ("width", "width", "width"),
    "Embedding": ("things", "width"), "EmbeddingBag": ("things", "width"),
    "LayerNorm": ("width",), "RMSNorm": ("width",), "BatchNorm1d": ("width",), "BatchNorm2d": ("width",),
    "GroupNorm": ("heads", "width"), "MultiheadAttention": ("width", "heads"),
    "TransformerEncoderLayer": ("width", "heads", "width"), "TransformerDecoderLayer": ("width", "heads", "width"),
    "LSTM": ("width", "width", "depth"), "GRU": ("width", "width", "depth"), "RNN": ("width", "width", "depth"),
    "Conv1d": ("width", "width", "kernel"), "Conv2d": ("width", "width", "kernel"),
    "Dropout": ("rate",), "Dropout1d": ("rate",), "Dropout2d": ("rate",), "range": ("depth",),
    "zeros": ("width",) * 4, "ones": ("width",) * 4, "randn": ("width",) * 4, "empty": ("width",) * 4,
}  # fmt: skip
_BY_KEYWORD = {
    "num_embeddings": "things", "embedding_dim": "width", "in_features": "width", "out_features": "width",
    "normalized_shape": "width", "embed_dim": "width", "num_heads": "heads", "in_channels": "width",
    "out_channels": "width", "kernel_size": "kernel", "hidden_size": "width", "input_size": "width",
    "num_layers": "depth", "p": "rate",
}  # fmt: skip


def value_built_with(cls: type, name: str, given: Mapping[str, Any], depth: int = 0) -> Any:
    """A value for the argument `name` of the constructor of `cls`; None where the code does not say what it is.

    given: the values of other arguments, with which it has to fit.
    """
    tree = _constructor(cls)
    if tree is None:
        return None
    if (text := _compared_with(cls, name)) is not None:
        return text
    known = Known.of(given)
    values = {
        "width": known.model_width, "heads": known.head_count, "things": VOCABULARY, "depth": DEPTH, "kernel": KERNEL,
        "rate": 0.0,
    }  # fmt: skip
    for call, place in _calls_with(tree, name):
        word = _word(call, place)
        if word is not None:
            return values[word]
        inner = _class_of(call, cls)
        taken = _parameter(inner, place) if inner is not None and depth < DEEPEST else None
        if inner is not None and taken is not None:
            # An inner module's output is no model's.
            is_width = re.search(OUTPUT_NAME, taken.lower()) is not None
            found = known.model_width if is_width else value_for(taken, None, given)
            found = found if found is not None else value_built_with(inner, taken, given, depth + 1)
            # A size that is handed on has to fit others; a choice, as of a pooling, does not.
            if found is None and isinstance(default := defaults_of(inner).get(taken), (str, bool)):
                found = default
            if found is not None:
                return found
    return False if _only_asked(tree, name) else None


def class_called(cls: type, name: str, depth: int = 0) -> type[nn.Module] | None:
    """The class of the file that the argument `name` may be, where the constructor of `cls`, or of what it is handed on
    to, calls it: one that takes what the call gives and has a word of the name, as Attention for `attn_target`; else
    the only one. None where the argument is not called, or no class is clear."""
    tree = _constructor(cls)
    for node in ast.walk(tree) if tree is not None else ():
        match node:
            case ast.Call(called, given, by_name) if _is_name(called, name):
                keywords = [k.arg for k in by_name if k.arg is not None]
                several = [c for c in _classes_beside(cls) if c is not cls and _takes(c, len(given), keywords)]
                word = re.split(r"_|(?<=[a-z])(?=[A-Z])", name.lower())[0][:3]
                named = [c for c in several if word in c.__name__.lower()]
                return next(iter(named or (several if len(several) == 1 else [])), None)
    for call, place in _calls_with(tree, name) if tree is not None and depth < DEEPEST else ():
        inner = _class_of(call, cls)
        taken = _parameter(inner, place) if inner is not None else None
        if inner is not None and taken is not None and (found := class_called(inner, taken, depth + 1)) is not None:
            return found
    return None


def _classes_beside(cls: type) -> Iterator[type[nn.Module]]:
    for value in vars(sys.modules.get(cls.__module__, object)).values():
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == cls.__module__:
            yield value


def _takes(cls: type, count: int, keywords: list[str]) -> bool:
    try:
        inspect.signature(cls).bind(*[None] * count, **dict.fromkeys(keywords))
    except (TypeError, ValueError):
        return False
    return True


def entries_asked(cls: type, name: str, depth: int = 0) -> int:
    """How many entries the constructor of `cls` reads of the sequence that `name` takes; 0 where it takes none.

    It indexes a sequence, sums it, takes it apart, runs through it, or hands it on to a module that does. Where it
    writes the name anew, it may make the sequence itself.
    """
    tree = _constructor(cls)
    if tree is None or any(
        isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(tree)
    ):
        return 0
    count = 0
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(held, at) if _is_name(held, name):
                last = at.value + 1 if isinstance(at, ast.Constant) and isinstance(at.value, int) else DEPTH
                count = max(count, last, DEPTH)
            case ast.Call(ast.Name("sum" | "len" | "enumerate" | "zip" | "reversed"), given):
                count = max(count, DEPTH if any(_is_name(one, name) for one in given) else 0)
            case ast.For(_, over) | ast.comprehension(_, over) if _is_name(over, name):
                count = max(count, DEPTH)
            case ast.Assign([ast.Tuple(parts)], held) if _is_name(held, name):
                count = max(count, len(parts))
    if count or depth >= DEEPEST:
        return count
    for call, place in _calls_with(tree, name):
        handed = call.args[place] if isinstance(place, int) else next(k.value for k in call.keywords if k.arg == place)
        inner = _class_of(call, cls) if _is_name(handed, name) else None
        taken = _parameter(inner, place) if inner is not None else None
        if inner is not None and taken is not None and (count := entries_asked(inner, taken, depth + 1)):
            return count
    return 0


def _compared_with(cls: type, name: str) -> str | None:
    # The first text that the methods of `cls` compare the argument, or the attribute of its name, with.
    for base in bases_of(cls):
        methods = vars(base).values() if not base.__module__.startswith("torch.") else ()
        for tree in map(tree_of_function, (one for one in methods if isinstance(one, types.FunctionType))):
            for node in ast.walk(tree):
                match node:
                    case ast.Compare(left, [ast.Eq() | ast.In() | ast.NotIn()], [right]) if _is_name(left, name):
                        texts = [one.value for one in ast.walk(right) if isinstance(one, ast.Constant)]
                        if texts and isinstance(texts[0], str):
                            return texts[0]
    return None


def _constructor(cls: type) -> ast.Module | None:
    # The constructors of `cls` and of the classes above it, which it may hand its arguments on to.
    body: list[ast.stmt] = []
    for base in cls.__mro__:
        if "__init__" in vars(base) and not base.__module__.startswith(("torch.", "builtins")):
            with contextlib.suppress(OSError, TypeError, ValueError, SyntaxError):
                body += ast.parse(textwrap.dedent(inspect.getsource(vars(base)["__init__"]))).body
    return ast.Module(body, []) if body else None


def _is_name(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(found) | ast.Attribute(ast.Name("self"), found):
            return found == name
    return False


def _calls_with(tree: ast.AST, name: str) -> Iterator[tuple[ast.Call, int | str]]:
    """The calls that `name` is given to, alone or in arithmetic, with its place there; `[...] * name` is a range."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(_, positional, by_name):
                yield from ((node, n) for n, given in enumerate(positional) if _computed_from(given, name))
                yield from ((node, k.arg) for k in by_name if k.arg is not None and _computed_from(k.value, name))
            case ast.BinOp(ast.List() | ast.ListComp(), ast.Mult(), count) if _is_name(count, name):
                yield ast.Call(ast.Name("range"), [count], []), 0


def _computed_from(given: ast.AST, name: str) -> bool:
    match given:
        case ast.BinOp(left, _, right):
            return _computed_from(left, name) or _computed_from(right, name)
        case ast.UnaryOp(_, operand):
            return _computed_from(operand, name)
    return _is_name(given, name)


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
    return ""


def _word(call: ast.Call, place: int | str) -> str | None:
    takes = _TAKES.get(_called(call))
    if takes is None:
        return None
    if isinstance(place, str):
        return _BY_KEYWORD.get(place)
    return takes[place] if place < len(takes) else None


def _class_of(call: ast.Call, cls: type) -> type | None:
    found = vars(sys.modules.get(cls.__module__, object)).get(_called(call))
    return found if isinstance(found, type) and issubclass(found, nn.Module) and found is not cls else None


def _parameter(cls: type, place: int | str) -> str | None:
    names = [n for n in inspect.signature(cls).parameters if n not in ("args", "kwargs")]
    if isinstance(place, str):
        return place if place in names else None
    return names[place] if place < len(names) else None


def _only_asked(tree: ast.AST, name: str) -> bool:
    """Whether the constructor only asks whether `name` is true."""
    tests = [node.test for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp))]
    asked = {id(part) for test in tests for part in ast.walk(test) if _is_name(part, name)}
    stored = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(_is_name(target, name) for target in node.targets)
    }
    uses = [
        node
        for node in ast.walk(tree)
        if _is_name(node, name) and isinstance(getattr(node, "ctx", None), ast.Load) and id(node) not in stored
    ]
    return bool(asked) and all(id(node) in asked for node in uses)
