"""What torch has in place of the fused and parallel layers of packages that are not installed.

Packages such as apex and fairscale bring torch's own layers with another implementation: for one process
`ColumnParallelLinear` computes what `nn.Linear` computes. Their names say so, in words on how and not on what.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

# Words on how a layer is computed.
ON_HOW = {
    "Column", "Efficient", "Fast", "Fp8", "Fused", "Memory", "Mixed", "Model", "Parallel", "Row", "Tensor", "Triton",
    "Vocab",
}  # fmt: skip
# What is never stood in for: a report on it would be on torch's code, and not on the model's.
SUBJECTS = ("Attention", "Transformer", "Parallel")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")
# What functions that ask for a process among many give for a single one, and the words for the group that they ask of.
OF_ONE_PROCESS = {"world_size": 1, "rank": 0}
GROUPS = "context|data|expert|global|local|model|parallel|pipeline|sequence|tensor"


def same_layer(name: str) -> type[nn.Module] | None:
    """The layer of torch.nn that a class called `name` computes, as a class that takes further keyword arguments.

    None where the name says anything beside how the layer is computed, and for attention.
    """
    words = WORD.findall(name)
    if "".join(words) != name:
        return None
    while words and words[0] in ON_HOW:
        words.pop(0)
    of_torch = "".join(words)
    layer = getattr(nn, of_torch, None)
    if not isinstance(layer, type) or not issubclass(layer, nn.Module) or any(s in of_torch for s in SUBJECTS):
        return None
    return None if layer.forward is nn.Module.forward else _tolerant(layer)


def same_function(name: str) -> Callable[..., Any] | None:
    """What a function called `name` computes: one of torch.nn.init, or what repeats a number, as `to_2tuple`."""
    if (repeated := re.fullmatch(r"to_(\d)tuple", name)) is not None:
        return functools.partial(_tuple_of, int(repeated[1]))
    return getattr(nn.init, name, None) if name.endswith("_") and not name.startswith("_") else None


def _tuple_of(count: int, value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,) * count


def of_one_process(name: str) -> int | None:
    """What a function called `name` gives where there is a single process, as `get_model_parallel_world_size`."""
    asked = re.fullmatch(rf"(?:get_)?(?:(?:{GROUPS})_)*(world_size|rank)", name)
    return OF_ONE_PROCESS[asked[1]] if asked else None


def _tolerant(layer: type[nn.Module]) -> type[nn.Module]:
    constructor: Callable[..., None] = layer.__init__
    known = inspect.signature(constructor).parameters

    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **{name: value for name, value in kwargs.items() if name in known})

    return type(layer.__name__, (layer,), {"__init__": construct})
