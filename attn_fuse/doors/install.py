"""Install: plain ``torch.compile(model)`` runs attention on fused kernels, for tools that only know "inductor"."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from attn_fuse.backend import Attempt
from attn_fuse.errors import OptionError
from attn_fuse.options import Fuel, Options, parse_options
from attn_fuse.torch_internals import inductor_door, open_inductor_door


@dataclasses.dataclass(frozen=True)
class Door:
    """Compiles graphs in place of Inductor.

    picks: whether the user chose a pick. draws, codes: whether reports have pictures of the masks, and code.
    """

    options: Options
    fuel: Fuel
    picks: bool
    draws: bool = False
    codes: bool = False

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], inductor: Mapping[str, Any]) -> Callable[..., Any]:
        """`graph` with its attention on fused kernels, compiled by Inductor with the options `inductor`."""
        options = dataclasses.replace(self.options, inductor={**self.options.inductor, **inductor})
        if inductor.get("max_autotune") and not self.picks:
            options = dataclasses.replace(options, pick="measured")
        return Attempt(options, self.fuel, draws=self.draws, codes=self.codes).compiled(graph, inputs)


def install(options: Mapping[str, Any] | None = None) -> contextlib.AbstractContextManager[object]:
    """Make every ``torch.compile`` with the default backend "inductor" fuse attention from now on.

    For tools that call torch.compile themselves and know no other backend: Trainer, accelerate, Lightning, diffusers.
    `mode` and Inductor's options stay in force. Other backends, torch.export, AOTInductor and ``aot_compile`` are not
    affected. Models given to torch.compile before `install` stay plain; models given to it until `uninstall` stay
    fused.

    options: as in ``torch.compile(model, backend="attn_fuse", options=...)``, except `inner_backend`. Another `install`
    replaces them. `with attn_fuse.install():` undoes it at the end of the block.
    Raises OptionError for an unknown option or an impossible value.
    """
    parsed = parse_options(options)
    if parsed.inner_backend != "inductor":
        raise OptionError(
            f"attn_fuse.install: inner_backend={parsed.inner_backend!r}: an installed attn_fuse runs before Inductor; "
            'for another inner backend call torch.compile(model, backend="attn_fuse", options=...).'
        )
    picks = "pick" in (options or {}) or parsed.pick != "fastest"
    before = inductor_door()
    open_inductor_door(Door(parsed, Fuel(parsed.fuel), picks))
    undone = contextlib.ExitStack()
    undone.callback(open_inductor_door, before)
    return undone


def uninstall() -> None:
    """Undo `install`, however often it was called."""
    open_inductor_door(None)
