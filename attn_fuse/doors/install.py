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
    """Compiles graphs in Inductor's stead.

    picks: whether `options` came with a pick of the user's. draws: whether reports have pictures of the masks.
    """

    options: Options
    fuel: Fuel
    picks: bool
    draws: bool = False

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], inductor: Mapping[str, Any]) -> Callable[..., Any]:
        """`graph` with its attention on fused kernels, compiled by Inductor. inductor: the options of this compile."""
        options = dataclasses.replace(self.options, inductor={**self.options.inductor, **inductor})
        if inductor.get("max_autotune") and not self.picks:
            options = dataclasses.replace(options, pick="measured")
        return Attempt(options, self.fuel, draws=self.draws).compiled(graph, inputs)


def install(options: Mapping[str, Any] | None = None) -> contextlib.AbstractContextManager[object]:
    """From now on every ``torch.compile`` with backend "inductor", the default, fuses attention as attn_fuse does.

    This is the way in for what calls torch.compile itself and knows no other backend: Trainer, accelerate, Lightning,
    diffusers. `mode` and Inductor's options stay in force; other backends, torch.export and AOTInductor stay as they
    are, and so does what must be stored, as by ``aot_compile``. What torch.compile was called on before `install` stays
    plain, and what it was called on until `uninstall` stays fused.

    options: as in ``torch.compile(model, backend="attn_fuse", options=...)``, but for `inner_backend`. Another
    `install` replaces them. `with attn_fuse.install():` undoes itself at the end of the block.
    Raises OptionError for an option that does not exist or has an impossible value.
    """
    parsed = parse_options(options)
    if parsed.inner_backend != "inductor":
        raise OptionError(
            f"attn_fuse.install: inner_backend={parsed.inner_backend!r}: installed, attn_fuse goes before Inductor; "
            'for another inner backend call torch.compile(model, backend="attn_fuse", options=...).'
        )
    picks = "pick" in (options or {}) or parsed.pick != "fastest"
    before = inductor_door()
    open_inductor_door(Door(parsed, Fuel(parsed.fuel), picks))
    undone = contextlib.ExitStack()
    undone.callback(open_inductor_door, before)
    return undone


def uninstall() -> None:
    """Undo `install`, however often it was called; without one it does nothing."""
    open_inductor_door(None)
