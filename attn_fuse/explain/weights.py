"""Models whose constructor loads weights: where the file is not there, or on the network, they stay random."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# How the note begins that says which weights are not there.
RANDOM = "random weights in place of"


class _Absent(dict[str, Any]):
    # What loading gives: nothing, and the same below every key, as checkpoints keep weights below "model".

    def __missing__(self, key: str) -> _Absent:
        return self

    def pop(self, key: str, default: Any = None) -> Any:
        return self if default is None else default


@contextlib.contextmanager
def random_weights(say: Callable[[str], object]) -> Iterator[None]:
    """Within the block weights that cannot be loaded are left as they are, and `say` is told which.

    `torch.load` and `torch.hub.load_state_dict_from_url` are caught.
    """
    load, from_url, into = torch.load, torch.hub.load_state_dict_from_url, nn.Module.load_state_dict

    absent: list[object] = []

    def absent_ones(place: object) -> _Absent:
        absent.append(place)
        say(f"{RANDOM} {place}")
        return _Absent()

    def loads(file: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(file, *args, **kwargs)
        except OSError:
            return absent_ones(file)

    def from_there(url: str, *args: Any, **kwargs: Any) -> Any:
        return absent_ones(url)

    def fills(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        # What code makes of absent weights, entry by entry, is empty.
        if state_dict or not (isinstance(state_dict, _Absent) or absent):
            return into(self, state_dict, *args, **kwargs)
        # As if all had been there: the caller may ask what was not.
        return type(into(self, {}, strict=False))([], [])

    torch.load, torch.hub.load_state_dict_from_url = loads, from_there  # type: ignore[assignment]
    nn.Module.load_state_dict = fills  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.load, torch.hub.load_state_dict_from_url = load, from_url
        nn.Module.load_state_dict = into  # type: ignore[method-assign]
