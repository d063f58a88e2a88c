"""One way of writing attention: the program, what it is called with, and what is to be expected of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.models.modules import ModuleOf

Inputs = Callable[[torch.dtype], tuple[Any, ...]]


@dataclass(frozen=True)
class Spelling:
    """One way of writing attention.

    program: makes the callable or module anew; seed torch before, since modules draw their weights.
    inputs: makes its positional arguments, floating-point ones in the dtype asked for.
    sites: how many attentions it contains.
    training: whether gradients are compared; not where eager has none, as with a cache written in place.
    dropout: whether it drops weights in train mode; it is compared with that off.
    exception: why it is no single softmax attention and stays as written, in mathematics; None where it is one.
    dynamic: what `torch.compile` is told of sizes.
    dtype: the one its arguments come in.
    reason: why it is refused, in words of the report; of look-alikes alone.
    """

    name: str
    group: str
    program: Callable[[], Callable[..., Any]]
    inputs: Inputs
    sites: int = 1
    training: bool = True
    dropout: bool = False
    exception: str | None = None
    dynamic: bool | None = None
    dtype: torch.dtype = torch.float32
    reason: str = ""


def function(group: str, written: Callable[..., Any], inputs: Inputs, name: str = "", **facts: Any) -> Spelling:
    """`written` itself is the program."""
    return Spelling(name or written.__name__, group, lambda: written, inputs, **facts)


def module(group: str, kind: Callable[[], nn.Module], inputs: Inputs, name: str = "", **facts: Any) -> Spelling:
    """An instance of `kind` is the program, with weights large enough that scores differ."""
    return Spelling(name or kind.__name__, group, lambda: ModuleOf(kind), inputs, **facts)


def heads(
    batch: int = 2,
    heads: int = 3,
    q_len: int = 7,
    kv_len: int = 11,
    head_dim: int = 16,
    value_dim: int | None = None,
    kv_heads: int | None = None,
) -> Inputs:
    """Query, key and value as [batch, heads, len, head_dim]."""
    kv_heads = kv_heads or heads
    sizes = ((heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim or head_dim))
    return noise(*((batch, *size) for size in sizes))


def square(length: int = 7, **sizes: int) -> Inputs:
    """Query, key and value of one length."""
    return heads(q_len=length, kv_len=length, **sizes)


def heads_last(batch: int = 2, heads: int = 3, q_len: int = 7, kv_len: int = 11, head_dim: int = 16) -> Inputs:
    """Query, key and value as [batch, len, heads, head_dim]."""
    return noise((batch, q_len, heads, head_dim), *[(batch, kv_len, heads, head_dim)] * 2)


def hidden(length: int = 11, batch: int = 2, width: int = 24) -> Inputs:
    """What a module takes: [batch, len, width]."""
    return noise((batch, length, width))


def noise(*shapes: tuple[int, ...]) -> Inputs:
    """A random tensor of each shape."""
    return lambda dtype: tuple(torch.randn(shape).to(dtype) for shape in shapes)


def given(*made: Callable[[], Any]) -> Inputs:
    """What each function returns: masks, lengths, ids."""
    return lambda dtype: tuple(make() for make in made)


def joined(*parts: Inputs) -> Inputs:
    """The arguments of all parts, one after the other."""
    return lambda dtype: tuple(value for part in parts for value in part(dtype))
