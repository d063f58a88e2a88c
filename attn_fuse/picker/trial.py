"""Trial: one site timed as written and on each kernel, on stand-ins for what it reads.

For ``options={"pick": "measured"}``. The region becomes a graph of its own, once as written and once for each kernel;
the inner backend compiles each graph, and they run in turn. The times are kept, in memory and on disk, under a hash of
all that they depend on, so that identical layers and later runs do not measure again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.splice import emit
from attn_fuse.errors import named
from attn_fuse.graph.alone import alone, number_of
from attn_fuse.graph.modes import mode_now
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import Region
from attn_fuse.kernels import switches
from attn_fuse.kernels.cache import cache_dir
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, write_whole
from attn_fuse.picker.pick import Stopwatch, Times
from attn_fuse.picker.timing import free_memory, interleaved, this_device
from attn_fuse.report import log
from attn_fuse.torch_internals import FakeTensorMode, apart_from_dynamo, compile_with, without_inductor_attention

# Raise it when the format of the files or the way of measuring changes.
_VERSION = 2
_ROUNDS, _SECONDS, _SHORTEST = 11, 1.0, 1e-3
# Tensors of the size of the scores that the program as written keeps, by whether it trains: a training step keeps the
# scores, the weights, their gradients and what dropout kept.
SCORES_ALIVE = {False: 3, True: 6}

_known: dict[str, Times] = {}


def stopwatch_of(inner_backend: str | Callable[..., Any], compile_mode: str | None) -> Callable[..., Stopwatch]:
    """A function that makes the stopwatch of a site; see `Trial` for its arguments.

    inner_backend, compile_mode: what compiles the graphs that are measured.
    """

    def stopwatch(
        region: Region, attention: Attention, facts: Facts, mode: FakeTensorMode, values: Mapping[Node, Any]
    ) -> Stopwatch:
        return Trial(region, attention, facts, mode, values, inner_backend, compile_mode).measure

    return stopwatch


@dataclass(frozen=True)
class Trial:
    """One site to measure. values: contents of leaves. inner_backend, compile_mode: what compiles the graphs."""

    region: Region
    attention: Attention
    facts: Facts
    mode: FakeTensorMode
    values: Mapping[Node, Any]
    inner_backend: str | Callable[..., Any]
    compile_mode: str | None

    def measure(self, case: Case, kernels: Sequence[Kernel]) -> Times:
        """The times of the site as written and on `kernels`, or why there are none (`Times.failed`). Never raises."""
        try:
            key = self._key(kernels)
            known = _known.get(key) or _stored(key)
            if known is None:
                known = self._measured(case, kernels)
                if not known.failed:
                    _store(key, case, known)
            _known[key] = known
            return known
        except Exception as problem:  # nothing that goes wrong in here may break the model
            log.warning("an attention could not be measured", exc_info=True)
            return Times({}, {}, named(problem))

    def _measured(self, case: Case, kernels: Sequence[Kernel]) -> Times:
        device = self.facts.device
        free, needed = free_memory(device), self.facts.score_bytes * SCORES_ALIVE[case.training]
        if free is not None and needed > free / 2:
            return Times({}, {}, f"as written it takes {needed / 2**30:.1f} GiB or more, of {free / 2**30:.1f} free")
        started = time.perf_counter()
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            apart_from_dynamo(),
            without_inductor_attention(),
            torch.set_grad_enabled(case.training),
        ):
            leaves = [_stand_in(leaf, self.values.get(leaf), case.training) for leaf in self.region.leaves]
            runs: dict[str, Callable[[], object]] = {}
            why_not: dict[str, str] = {}
            for kernel in (None, *kernels):
                try:
                    run = functools.partial(_run, self._compiled(kernel, leaves), leaves, case.training)
                    run()
                    runs[AS_WRITTEN if kernel is None else kernel.name] = run
                except Exception as problem:
                    if kernel is None:
                        return Times({}, {}, f"as written: {named(problem)}")
                    why_not[kernel.name] = f"running it here failed: {named(problem)}"
            times = interleaved(runs, device, _ROUNDS, _SECONDS * len(runs), _SHORTEST)
        log.info("measured in %.1f s: %s: %s", time.perf_counter() - started, case, times)
        return Times({name: timing.median for name, timing in times.items()}, why_not)

    def _compiled(self, kernel: Kernel | None, leaves: list[Any]) -> Callable[..., Any]:
        """The site alone, on `kernel` (None: as written), compiled."""
        program, inside = alone(self.region)
        if kernel is not None:
            emit(inside, self.attention, self.facts, kernel.emit, self.mode)
        for node in program.graph.nodes:
            node.meta = {}  # Dynamo's notes are about other tensors
        program.recompile()
        return compile_with(self.inner_backend, without_graphs(self.compile_mode), program, leaves)

    def _key(self, kernels: Sequence[Kernel]) -> str:
        """A hash of all that the times depend on."""

        def kind(leaf: Node) -> Any:
            value = value_of(leaf)
            if not isinstance(value, torch.Tensor):
                return number_of(value)
            sizes = [[number_of(n) for n in ns] for ns in (value.size(), value.stride())]
            return *sizes, str(value.dtype), value.requires_grad

        device, program = self.facts.device, alone(self.region)[0]
        what = (
            _VERSION, str(this_device(device)), torch.__version__, program.code, [*map(kind, self.region.leaves)],
            mode_now(), self.facts.training, self.facts.bias_needs_grad, [k.name for k in kernels],
            str(self.inner_backend), self.compile_mode, tuple(switches.current()),
            switches.float32_precision(device),
        )  # fmt: skip
        return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


def _stand_in(leaf: Node, value: Any, training: bool) -> Any:
    """A copy of `value`, or a tensor like `leaf` without one; symbolic sizes and numbers as on the first call."""
    like = value_of(leaf)
    if not isinstance(like, torch.Tensor):
        return number_of(like if value is None else value)
    wanted = training and like.requires_grad
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format).requires_grad_(wanted)
    size, stride = [[number_of(n) for n in ns] for ns in (like.size(), like.stride())]
    made = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        if like.dtype == torch.bool:
            made.fill_(True)
        elif like.dtype.is_floating_point:
            made.normal_()
        else:
            made.zero_()  # a position that every table has
    return made.requires_grad_(wanted)


def _run(compiled: Callable[..., Any], leaves: list[Any], training: bool) -> object:
    (out,) = compiled(*leaves)
    if not training:
        return out
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)


def without_graphs(mode: str | None) -> str | None:
    """torch.compile's `mode` without CUDA graphs."""
    # A captured graph owns the memory of its outputs from call to call, which programs that run in turn would break.
    return {"max-autotune": "max-autotune-no-cudagraphs", "reduce-overhead": None}.get(str(mode), mode)


# ---- what is known already


def _path(key: str) -> Path:
    return cache_dir() / "measured" / f"{key}.json"


def _stored(key: str) -> Times | None:
    try:
        data = json.loads(_path(key).read_text())
        seconds = {str(name): float(time) for name, time in data["seconds"].items()}
        if AS_WRITTEN in seconds and min(seconds.values()) > 0:
            return Times(seconds, {str(name): str(why) for name, why in data["why_not"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _store(key: str, case: Case, times: Times) -> None:
    data = {"case": str(case), "seconds": dict(times.seconds), "why_not": dict(times.why_not)}
    try:
        write_whole(_path(key), json.dumps(data, indent=1) + "\n")
    except OSError as problem:
        log.info("measured times are not kept on disk: %s", problem)
