"""The flash kernels in other tile sizes, warps and stages than they ship with, each kernel alone.

Each trial is one kernel on one attention, in its shipped config and in those that may beat it: fewer warps, so that
several programs share a multiprocessor; more keys in a tile, or fewer; another number of stages. Where the instructions
and the waits of a loop already say which is faster, nothing is tried. Winners go into
attn_fuse/kernels/triton/flash/configs.py by hand.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.triton.flash.bulk import Bulk
from attn_fuse.kernels.triton.flash.configs import Config
from attn_fuse.picker.timing import synchronize
from attn_fuse.picker.workers import note
from gpu_attention import FEATURES, LIMIT, Bench, Row, distance, in_worker

SHIPPED, AGAIN = "shipped", "shipped, again"
# Bytes of its registers that a config may put away: around a loop they cost little, and larger tiles may be worth it.
MAX_PUT_AWAY = 128


# What is done to the scores, by a name; the configs differ by whether a tensor is read for each of them ("bias"), and
# whether the gradient needs them again ("softcap").
SCORES = {"full": "full", "causal": "causal", "bias": "learned bias", "softcap": "softcap"}


@dataclass(frozen=True)
class Trial:
    """A kernel, as configs.py names it, on an attention; configs: those that are tried beside the shipped one."""

    kernel: str
    scores: str
    batch: int
    heads: int
    length: int
    head_dim: int
    configs: tuple[Config | Bulk, ...]

    @property
    def names(self) -> list[str]:
        """What is timed: the shipped config, and the others as configs.py writes them."""
        return [SHIPPED, *map(written, self.configs)]

    def __str__(self) -> str:
        return f"{self.kernel}, {self.scores}, D {self.head_dim}, T {self.length}"


def written(config: Config | Bulk) -> str:
    """As configs.py or bulk.py has it."""
    if isinstance(config, Bulk):
        return f"Bulk({config.block_n}, {config.num_stages})"
    values = [config.block_m, config.block_n, config.num_warps, config.num_stages]
    return f"Config({', '.join(map(str, values + [config.statistics] * (config.statistics != 1)))})"


def trials(tiny: bool = False) -> list[Trial]:
    """The most telling first. tiny: one of each kernel, at sizes that mean nothing."""
    if not tiny:
        return [_trial(*row) for row in _TRIALS]
    first = {row[0]: _trial(*row) for row in reversed(_TRIALS)}
    return [replace(trial, batch=2, heads=1, length=32, configs=_interpreted(trial)[:1]) for trial in first.values()]


def _interpreted(trial: Trial) -> tuple[Config | Bulk, ...]:
    """The configs that run without a Hopper GPU, which bulk copies need."""
    return tuple(config for config in trial.configs if isinstance(config, Config))


def _trial(kernel: str, scores: str, head_dim: int, length: int, *configs: tuple[int, ...]) -> Trial:
    # A bias has an element for each score, of which there are to be few enough for a machine that only compiles.
    tokens, width = (8192, 1024) if scores == "bias" else (16384, 2048)
    batch, heads = max(1, tokens // length), width // max(64, head_dim)
    tried = tuple(Bulk(*values) if len(values) == 2 else Config(*values) for values in configs)
    return Trial(kernel, scores, batch, heads, length, head_dim, tried)


_TRIALS: tuple[tuple[Any, ...], ...] = (
    ("key_value", "causal", 128, 4096, (64, 128, 8, 3, 4)),
    ("query", "causal", 128, 4096, (128, 2), (64, 2), (64, 64, 4, 2)),
    ("forward", "causal", 128, 4096, (64, 3), (128, 128, 8, 3)),
    ("forward", "causal", 256, 4096, (128, 64, 8, 2)),
    ("key_value", "causal", 64, 4096, (128, 128, 8, 3, 2)),
    ("query", "causal", 64, 4096, (64, 3), (128, 3), (128, 64, 4, 3)),
    ("forward", "causal", 64, 4096, (128, 3), (128, 64, 4, 3)),
    ("forward", "softcap", 128, 4096, (128, 128, 8, 3)),
    ("forward", "full", 64, 4096, (128, 3), (128, 64, 4, 3)),
    ("forward", "causal", 128, 512, (128, 128, 8, 3), (64, 64, 4, 3)),
    ("key_value", "causal", 128, 512, (64, 64, 4, 3, 2)),
    ("query", "causal", 128, 512, (128, 2), (64, 64, 4, 2)),
    ("forward", "causal", 64, 512, (128, 3), (128, 64, 4, 3)),
    ("forward", "full", 128, 4096, (128, 128, 8, 3)),
    ("forward", "bias", 64, 2048, (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3)),
    ("forward", "bias", 128, 2048, (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 3)),
    ("query", "bias", 64, 2048, (128, 64, 8, 3), (64, 64, 4, 3)),
    ("query", "bias", 128, 2048, (128, 64, 8, 2), (64, 64, 4, 2)),
    ("key_value", "bias", 64, 2048, (64, 128, 8, 3, 4), (32, 128, 8, 3), (64, 64, 4, 3, 2)),
    ("key_value", "bias", 128, 2048, (64, 128, 8, 3, 4), (32, 128, 8, 3)),
    ("input", "bias", 64, 2048, (128, 64, 8, 3), (64, 64, 8, 3), (64, 64, 4, 3)),
    ("query", "causal", 256, 4096, (128, 32, 8, 2)),
    ("key", "causal", 256, 4096, (32, 128, 8, 2)),
    ("value", "causal", 256, 4096, (64, 128, 8, 2), (32, 128, 8, 2)),
    ("key_value", "softcap", 64, 4096, (64, 64, 4, 3, 2), (64, 128, 8, 3)),
    ("key_value", "softcap", 128, 4096, (64, 128, 8, 3, 4)),
    ("forward", "causal", 32, 4096, (128, 128, 4, 3), (128, 64, 4, 3), (64, 128, 4, 3)),
    ("query", "causal", 32, 4096, (128, 64, 4, 3), (64, 64, 4, 3)),
    ("key_value", "causal", 32, 4096, (64, 128, 4, 3), (128, 64, 4, 3)),
    ("forward", "bias", 32, 256, (128, 64, 4, 3), (64, 64, 4, 3)),
    ("forward", "bias", 256, 2048, (128, 32, 8, 2), (64, 32, 4, 3)),
)


@dataclass(frozen=True)
class Launch:
    """A kernel with all that it was launched with; each call launches it again."""

    kernel: Any
    programs: tuple[int, int, int]
    arguments: tuple[Any, ...]
    options: dict[str, int]

    @functools.cached_property
    def compiled(self) -> Any:
        """None where Triton interprets."""
        return self.kernel.warmup(*self.arguments, grid=self.programs, **self.options)

    def __call__(self) -> None:
        if self.compiled is None:
            self.kernel[self.programs](*self.arguments, **self.options)
        else:
            self.compiled[self.programs](*self.arguments)

    @property
    def put_away(self) -> int:
        """Bytes of registers that each thread puts away."""
        return 4 * int(getattr(self.compiled, "n_spills", None) or 0)


@contextlib.contextmanager
def launches() -> Iterator[dict[str, Launch]]:
    """The launches of the flash kernels, by the names of their configs, as they are made."""
    from attn_fuse.kernels.triton import launch as of_triton
    from attn_fuse.kernels.triton.flash import backward, bulk, forward

    found: dict[str, Launch] = {}
    once = of_triton.Launch.__call__
    kernels: dict[str, tuple[Any, ...]] = {
        "forward": (forward.forward,), "query": (backward.backward_query,), "input": (backward.backward_input,),
    }  # fmt: skip
    if bulk.is_there():
        from attn_fuse.kernels.triton.flash import hopper, hopper_backward

        kernels["forward"] += (hopper.bulk_forward,)
        kernels["query"] += (hopper_backward.bulk_query,)
    # By identity: where Triton interprets, what Gluon has compiled cannot be hashed.
    names = {id(kernel): name for name, several in kernels.items() for kernel in several}

    def recorded(launch: of_triton.Launch, stream: int, misaligned: tuple[bool, ...], *arguments: Any) -> None:
        once(launch, stream, misaligned, *arguments)
        name = names.get(id(launch.kernel))
        if launch.kernel is backward.backward_key_value:
            of_key, of_value = arguments[4:6]
            name = "value" if of_key is None else "key" if of_value is None else "key_value"
        if name is not None:
            grid, given = (launch.programs, 1, 1), arguments + launch.constants
            found[name] = Launch(launch.kernel, grid, given, launch.options)

    with mock.patch.object(of_triton.Launch, "__call__", recorded):
        yield found


@contextlib.contextmanager
def interpreting(wanted: bool) -> Iterator[None]:
    """Where processes that start have Triton interpret its kernels on the CPU, if that is `wanted`."""
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if wanted else {}):
        yield


class Attention:
    """The attention of a trial, which runs in any config of its kernel."""

    def __init__(self, trial: Trial, bench: Bench) -> None:
        self.trial, self.bench = trial, bench
        shape = (trial.batch, trial.heads, trial.length, trial.head_dim)
        self.feature = FEATURES[SCORES[trial.scores]](bench, *shape[:3])
        self.program = self.feature.program(trial.head_dim**-0.5).dumps()
        self.operands = tuple(bench.random(*shape) for _ in range(3))
        self.gradient = bench.random(*shape)

    def made(self, config: Config | Bulk | None = None) -> tuple[Config | Bulk, Launch, list[Tensor]]:
        """Run it: the config that the trial's kernel ran in, its launch, and what that wrote.

        config: to run in; None is the shipped one. Another runs where the device does not hold it.
        """
        from attn_fuse.kernels.triton.flash import facts as flash_facts
        from attn_fuse.kernels.triton.flash import launch as flash

        inputs, kernel = list(self.feature.tensors), self.trial.kernel
        numbers = [self.trial.length] * 2
        # What calls like this one share has the config, and the kernels compiled in it.
        flash_facts._known.clear()
        given = Operands(*self.operands, inputs, numbers, None, 0.0, self.program)
        facts = flash_facts.call_facts(given)
        if isinstance(config, Bulk):
            facts.bulk[kernel] = config
        elif config is not None:
            facts.bulk.pop(kernel, None)
            facts.configs[kernel] = config
        with torch.no_grad(), launches() as found:
            outputs = flash.attend(given)
            if kernel == "forward":
                return facts.bulk.get(kernel, facts.configs[kernel]), found[kernel], [outputs[0]]
            wanted = [kernel == "input" and x.is_floating_point() for x in inputs]
            dquery, dkey, dvalue, dinputs = flash.attend_backward(given, (None, None), outputs, self.gradient, wanted)
        wrote = {
            "query": [dquery], "key_value": [dkey, dvalue], "key": [dkey], "value": [dvalue],
            "input": [x for x, want in zip(dinputs, wanted, strict=True) if want],
        }  # fmt: skip
        return facts.bulk.get(kernel, facts.configs[kernel]), found[kernel], wrote[kernel]


@in_worker
def swept(names: Sequence[str], bench: Bench, trial: Trial, seconds: float) -> Iterator[Row]:
    """A row with the times of a trial's kernel in the configs of these names; `seconds` in which to begin each."""
    end = time.perf_counter() + seconds
    configs = {written(config): config for config in trial.configs}
    shipped: Config | Bulk | None = None
    timed: dict[str, Callable[[], None]] = {}
    failed: dict[str, str] = {}
    reference: list[Tensor] = []
    attention = Attention(trial, bench)
    for name in names:
        note(name)
        if time.perf_counter() >= end:
            failed[name] = "no time was left"
            continue
        try:
            with contextlib.nullcontext() if bench.dry else _nan_where_not_written():
                used, launch, results = attention.made(configs.get(name))
            synchronize(bench.device)
        except Exception as error:
            synchronize(bench.device)  # raises where the device is broken
            failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
            continue
        if name == SHIPPED:
            shipped = used
        why = "" if name == SHIPPED else _why_not(configs[name], shipped, used, launch)
        if why := why or ("" if bench.dry else _wrong(results, reference or results)):
            failed[name] = why
            continue
        timed[name] = launch
        reference = reference or results
    note("")
    row = {
        "kernel": trial.kernel, "scores": trial.scores, "head_dim": trial.head_dim, "length": trial.length,
        "batch": trial.batch, "heads": trial.heads, "shipped": written(shipped) if shipped else "",
    }  # fmt: skip
    if bench.dry:
        yield row | {"failed": failed}
        return
    if SHIPPED in timed:
        timed[AGAIN] = timed[SHIPPED]
    times = bench.times(timed)
    yield row | {"us": times, "failed": failed} | compared(times)


@contextlib.contextmanager
def _nan_where_not_written() -> Iterator[None]:
    """Where torch fills what it allocates with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _why_not(config: Config | Bulk, shipped: Config | Bulk | None, used: Config | Bulk, launch: Launch) -> str:
    """Why a config that ran is not timed."""
    if config == shipped:
        return "is the shipped one"
    if used != config:
        return f"does not fit, or is misassembled: it would run as {written(used)}"
    if launch.put_away > MAX_PUT_AWAY:
        return f"puts {launch.put_away} bytes of registers away"
    return ""


def _wrong(results: Sequence[Tensor], reference: Sequence[Tensor]) -> str:
    """What is wrong with what a config computes, beside the shipped one; an element not written is NaN."""
    if not all(bool(x.isfinite().all()) for x in results):
        return "wrong: not finite"
    off = max(map(distance, results, reference))
    return f"wrong: off by {off:.3g}" if off > LIMIT else ""


def compared(times: dict[str, float]) -> Row:
    """The fastest config and its time over the shipped one's; noise: by how much the shipped one's own two differ."""
    if SHIPPED not in times:
        return {}
    fastest = min((name for name in times if name != AGAIN), key=lambda name: times[name])
    both = sorted((times[SHIPPED], times[AGAIN]))
    return {
        "fastest": fastest,
        "over shipped": round(times[fastest] / times[SHIPPED], 3),
        "noise": round(both[1] / both[0] - 1, 3),
    }


def in_words(row: Row) -> str:
    """What a row says of the shipped config."""
    if "fastest" not in row:
        return "not known"
    if row["fastest"] == SHIPPED:
        return f"{row['shipped']} stays"
    within = ", within the noise" if 1 - row["over shipped"] <= row["noise"] else ""
    return f"{row['fastest']} takes {row['over shipped']:.2f} of {row['shipped']}{within}"
