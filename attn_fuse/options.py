"""The options of the backend, and the context manager that chooses kernels."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from attn_fuse.errors import OptionError, nearest
from attn_fuse.kernels import KERNELS
from attn_fuse.report import SiteReport
from attn_fuse.torch_internals import inductor_modes, inductor_options, known_backends

PICKS = ("fastest", "measured", "memory", "fused")
_MEASURING_MODES = ("max-autotune", "max-autotune-no-cudagraphs")

_chosen: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar("attn_fuse_kernels", default=None)


@dataclass(frozen=True)
class Options:
    """The options of ``torch.compile(model, backend="attn_fuse", options={...})``.

    inner_backend: the compiler of the rewritten graph, as the name of a Dynamo backend or a callable
        ``(graph_module, example_inputs) -> callable``.
    kernels: the names of the kernels allowed, in order of preference; None allows all.
    pick: "fastest" fuses a site if stored measurements promise a gain (`python -m attn_fuse.bench` shows them, and
        measures this device); "measured" times each site while compiling, on stand-ins of its sizes, and keeps the
        result; "memory" is "fastest", and also fuses sites that are up to 1.25 times as slow on a kernel, if attention
        takes an estimated tenth or more of the step's peak memory (`picker.peak`); "fused" fuses every site that some
        kernel can run.
    strict: raise `NotFusedError` if a site stays unfused.
    fuel: the max number of sites to rewrite, for bisecting; None sets no limit.
    check: run every graph as written and rewritten on its first inputs, compare outputs, gradients and written inputs,
        and undo rewrites that make them differ.
    seconds: the max time to find attention in one graph; later sites stay as written.
    try_unmeasured: allow our kernels without measurements on this device if much could be gained. They must pass a
        self-check and be faster in it (`picker.site_run`).
    mode: torch.compile's `mode`, for the inner backend; torch.compile itself takes a mode or options, not both.
        Without a pick, "max-autotune" and "max-autotune-no-cudagraphs" also set pick="measured".
    inductor: Inductor's options by name, as in plain torch.compile; they override those of the mode. The measurements
        of pick="measured" run without them.
    repro: a folder for scripts, made if missing. Each attention on which attn_fuse fails, by an exception or by a wrong
        result in `check` or a self-check, gets a script that shows the failure.
    compiles: False leaves the rewritten graph uncompiled, to report on it. Not for users.
    """

    inner_backend: str | Callable[..., Any] = "inductor"
    kernels: tuple[str, ...] | None = None
    pick: Literal["fastest", "measured", "memory", "fused"] = "fastest"
    strict: bool = False
    fuel: int | None = None
    check: bool = False
    seconds: float = 60.0
    try_unmeasured: bool = True
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    repro: str | None = None
    compiles: bool = True


def parse_options(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """The `Options` of a user's mapping. mode: torch.compile's `mode`, given beside them.

    Raises OptionError for an unknown name or an impossible value.
    """
    options = dict(options or {})
    known = {field.name for field in fields(Options)} - {"compiles"}
    for name in options:
        if name not in known:
            raise OptionError(f"attn_fuse has no option {name!r}.{_inductors(name) or nearest(name, known)}")
    for flag in ("strict", "check", "try_unmeasured"):
        _require(options, flag, "True or False", lambda v: isinstance(v, bool))
    _require(options, "repro", "the path of a folder, or None", _is_path)
    if options.get("repro") is not None:
        options["repro"] = os.fspath(options["repro"])
    _require(options, "seconds", "a number of seconds, more than 0", _is_duration)
    _require(options, "fuel", "a whole number of rewrites, 0 or more", _is_count)
    _require(options, "pick", " or ".join(map(repr, PICKS)), lambda v: v in PICKS)
    _require_inner_backend(options.setdefault("inner_backend", "inductor"))
    _require(options, "mode", "a name or None", lambda v: v is None or isinstance(v, str))
    _require(options, "inductor", "a dictionary of Inductor's options", lambda v: isinstance(v, Mapping))
    if mode is not None and options.setdefault("mode", mode) != mode:
        raise OptionError(f"mode={mode!r} and options={{'mode': {options['mode']!r}}} contradict each other: give one.")
    if options.get("mode") == "default":
        options["mode"] = None
    if options["inner_backend"] == "inductor":
        if options.get("mode") is not None and options["mode"] not in inductor_modes():
            raise OptionError(f"Inductor has no mode {options['mode']!r}.{nearest(options['mode'], inductor_modes())}")
        options["inductor"] = _known_to_inductor(options.get("inductor", {}))
    elif options.get("inductor"):
        raise OptionError(
            f"attn_fuse option inductor={options['inductor']!r}: the inner backend is {options['inner_backend']!r}, "
            "not Inductor; leave one of the two out."
        )
    if options.get("kernels") is not None:
        options["kernels"] = kernel_names(options["kernels"])
    if options.get("mode") in _MEASURING_MODES:
        options.setdefault("pick", "measured")
    return Options(**options)


def _require_inner_backend(backend: object) -> None:
    if not (callable(backend) or (isinstance(backend, str) and backend)):
        raise OptionError(f"attn_fuse option inner_backend={backend!r}: it must be a backend's name or a callable.")
    if backend == "attn_fuse" or getattr(backend, "__module__", None) == "attn_fuse.backend":
        raise OptionError(
            "inner_backend='attn_fuse': the inner backend compiles the graphs that attn_fuse rewrote; name another, or "
            "leave the option out for 'inductor'."
        )
    if isinstance(backend, str) and backend not in known_backends():
        raise OptionError(
            f"torch has no inner backend {backend!r}.{nearest(backend, known_backends() - {'attn_fuse'})}"
        )


def _known_to_inductor(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` by their names in Inductor's config. Dashes count as underscores, as in torch.compile.

    Raises OptionError for an unknown name or a value of another type.
    """
    if not options:
        return {}
    types, known = inductor_options(), {}
    for given, value in options.items():
        name = str(given).replace("-", "_")
        if name not in types:
            close = nearest(name, types)
            hint = close if "Did you mean" in close else " torch._inductor.list_options() names all."
            raise OptionError(f"Inductor has no option {given!r}.{hint}")
        wanted = types[name]
        if wanted is not None and not isinstance(value, wanted):
            raise OptionError(f"Inductor's option {given}={value!r}: it must be of type {wanted.__name__}.")
        known[name] = value
    return known


def _inductors(name: object) -> str:
    """A hint for an option of Inductor given among ours; "" for any other name."""
    known = isinstance(name, str) and name.replace("-", "_") in inductor_options()
    return f" Inductor's options go into options={{'inductor': {{{name!r}: ...}}}}." if known else ""


def kernel_names(names: object) -> tuple[str, ...]:
    """`names` as a tuple of known kernel names. Raises OptionError for an unknown name."""
    known = [kernel.name for kernel in KERNELS]
    if not isinstance(names, (str, list, tuple)):
        raise OptionError(f"kernels={names!r} is not a list of kernel names. Known: {', '.join(known)}.")
    listed = (names,) if isinstance(names, str) else tuple(names)
    for name in listed:
        if name not in known:
            raise OptionError(f"attn_fuse has no kernel {name!r}.{nearest(name, known)}")
    return listed


@contextlib.contextmanager
def use_kernels(*names: str) -> Iterator[None]:
    """Within the block, compiled models run attention on these kernels only, preferred in this order.

    Like `torch.nn.attention.sdpa_kernel`, the block also affects models compiled before it; their first call inside
    compiles them again. Without a name, every attention runs as written. The block overrides
    ``options={"kernels": ...}``. Raises OptionError for an unknown kernel name.
    """
    token = _chosen.set(kernel_names(names))
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_kernels() -> tuple[str, ...] | None:
    """The kernels of the innermost `use_kernels` block; None outside."""
    return _chosen.get()


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _is_path(value: object) -> bool:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    return path is None or (isinstance(path, str) and path != "")


def _is_duration(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _require(options: Mapping[str, Any], name: str, wanted: str, holds: Callable[[Any], Any]) -> None:
    if name in options and not holds(options[name]):
        raise OptionError(f"attn_fuse option {name}={options[name]!r}: it must be {wanted}.")


class Fuel:
    """A limit on the number of sites to rewrite. An allowed site stays allowed when its graph is recompiled."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._spent: set[str] = set()

    def allows(self, site: SiteReport) -> bool:
        """Whether `site` may be rewritten; an allowed site counts against the limit from then on."""
        key = str(site.location)
        if self._limit is not None and key not in self._spent and len(self._spent) >= self._limit:
            return False
        self._spent.add(key)
        return True


# One torch.compile call hands the same mapping to the backend for every graph of the model.
_tanks: dict[int, tuple[object, Fuel]] = {}


def fuel_of(options: Mapping[str, Any] | None) -> Fuel:
    """The fuel shared by all graphs compiled with this mapping object."""
    if not options or options.get("fuel") is None:
        return Fuel(None)
    return _tanks.setdefault(id(options), (options, Fuel(options["fuel"])))[1]
