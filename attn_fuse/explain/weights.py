"""Models whose constructor loads weights: where the file is not there, or on the network, they stay random."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class _Absent(dict[str, Any]):
    # What loading gives: empty, and the same below every key, as checkpoints keep weights below "model".

    def __missing__(self, key: str) -> _Absent:
        return self

    def __delitem__(self, key: str) -> None:
        pass

    def pop(self, key: str, default: Any = None) -> Any:
        return self if default is None else default


@contextlib.contextmanager
def random_weights(say: Callable[[str], object]) -> Iterator[None]:
    """Within the block weights that are not on this machine are not loaded; `say` is told of each source once."""
    told: set[str] = set()
    load, download, into = torch.load, torch.hub.download_url_to_file, nn.Module.load_state_dict

    def absent(source: object) -> _Absent:
        name = str(source).rpartition("/")[2]
        if name not in told:
            told.add(name)
            say(f"random weights in place of {name}")
        return _Absent()

    def loads(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and not os.path.exists(file):
            return absent(os.fspath(file))
        return load(file, *args, **kwargs)

    def fills(self: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
        if told and isinstance(state, dict) and not state:
            return into(self, {}, strict=False)
        return into(self, state, *args, **kwargs)

    torch.load = loads  # type: ignore[assignment]
    # What it would have downloaded is then a file that is not there.
    torch.hub.download_url_to_file = lambda *args, **kwargs: None
    nn.Module.load_state_dict = fills  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.load, torch.hub.download_url_to_file = load, download
        nn.Module.load_state_dict = into  # type: ignore[method-assign]
