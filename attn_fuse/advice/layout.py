"""Layout: the views that give an operand the shape [batch, heads, len, head_dim], as a person would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Node

from attn_fuse.emit.builder import NotEmitted, tensor

_VIEWS = frozenset("permute unsqueeze select narrow flatten unflatten expand contiguous to".split())


def written(node: Node, names: Mapping[Node, str]) -> str:
    """The tensor of `node`, made from nodes in `names` by views and casts. Raises NotEmitted for other operations."""
    chain: list[Node] = []
    while node not in names:
        if node.op != "call_method" or node.target not in _VIEWS:
            raise NotEmitted(f"{node.target} of an operand cannot be written")
        chain.append(node)
        node = node.args[0]
    text, waiting = names[node], [_Entry() for _ in tensor(node).shape]
    for view in reversed(chain):
        if change := _INDEXING.get(str(view.target)):
            change(waiting, tensor(view.args[0]).shape, *view.args[1:])
            continue
        text, waiting = _indexed(text, waiting) + _call(view), [_Entry() for _ in tensor(view).shape]
    return _indexed(text, waiting)


class _Entry(str):
    """One entry of an index. `:` keeps a dimension."""

    __slots__ = ()

    def __new__(cls, text: str = ":") -> _Entry:
        return super().__new__(cls, text)


def _places(entries: list[_Entry]) -> list[int]:
    """The places of the entries that are dimensions of the result."""
    return [n for n, entry in enumerate(entries) if not entry.lstrip("-").isdigit()]


def _unsqueeze(entries: list[_Entry], shape: Any, place: int) -> None:
    places = _places(entries)
    at = places[place] if place < len(places) else len(entries)
    # A dimension of size 1 that was selected and comes back is kept.
    lone = at - 1
    while lone >= 0 and entries[lone] is _KEPT:
        lone -= 1
    if lone >= 0 and entries[lone] is _LONE:
        entries[lone] = _KEPT
    else:
        entries.insert(at, _Entry("None"))


# A selected dimension of size 1, and one that came back.
_LONE, _KEPT = _Entry("0"), _Entry()


def _select(entries: list[_Entry], shape: Any, place: int, index: int) -> None:
    at = _places(entries)[place]
    if entries[at] == "None":
        del entries[at]
    elif entries[at] == ":":
        entries[at] = _LONE if shape[place] == 1 else _Entry(str(index))
    else:
        raise NotEmitted("an element of a slice cannot be written")


def _narrow(entries: list[_Entry], shape: Any, place: int, start: int, count: int) -> None:
    at = _places(entries)[place]
    if entries[at] != ":":
        raise NotEmitted("a slice of a slice cannot be written")
    first = "" if start == 0 else str(start)
    entries[at] = _Entry(f"{first}:" if start + count == shape[place] else f"{first}:{start + count}")


_INDEXING: dict[str, Callable[..., None]] = {"unsqueeze": _unsqueeze, "select": _select, "narrow": _narrow}


def _indexed(text: str, entries: list[_Entry]) -> str:
    while entries and entries[-1] == ":":
        entries = entries[:-1]
    return f"{text}[{', '.join(entries)}]" if entries else text


def _call(view: Node) -> str:
    arguments = list(view.args[1:])
    if view.target == "permute":
        moved = [n for n, place in enumerate(arguments) if n != place]
        if len(moved) == 2:
            from_end = moved[1] == len(arguments) - 1
            first, second = (n - len(arguments) for n in moved) if from_end else moved
            return f".transpose({first}, {second})"
    return f".{view.target}({', '.join(map(str, arguments))})"
