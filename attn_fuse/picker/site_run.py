"""SiteRun: one site timed on kernels, and a kernel checked on it, in a process of its own.

The times are what ``options={"pick": "measured"}`` goes by. The check is for a kernel that was never measured on this
device: whether it is right there, and faster than what would be picked otherwise. The process is a separate one since a
kernel that reads out of bounds breaks its CUDA context, and a kernel that hangs can be stopped no other way; the
training here goes on.

What was found is kept, in memory and on disk, under a hash of all that it depends on, so that identical layers and
later runs do not measure again: the program, the driver, torch, Triton, the text of the kernels and more. Failures that
may not happen again, such as too little memory, are not kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts, is_learned
from attn_fuse.errors import named
from attn_fuse.expression import nodes as ex
from attn_fuse.graph.alone import number_of
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import Region
from attn_fuse.kernels import switches
from attn_fuse.kernels.cache import cache_dir
from attn_fuse.picker.case import TYPICAL_LENGTH
from attn_fuse.picker.evidence import AS_WRITTEN, write_whole
from attn_fuse.picker.job import Job, timed, timed_apart
from attn_fuse.picker.leaves import Leaf, leaf_of, program_of
from attn_fuse.picker.pick import Times
from attn_fuse.picker.timing import free_memory, this_device
from attn_fuse.picker.workers import Worker, spared
from attn_fuse.report import collecting, log
from attn_fuse.torch_internals import apart_from_dynamo, cuda_driver, is_known_everywhere

# Raise it when the format of the files or the way of measuring changes.
_VERSION = 3
# Max seconds of a call for each kernel in it, most of them for compiling.
_DEADLINE = 240.0
# Bytes that a torch process takes on a GPU; copies of the leaves, for the gradients and results of three programs.
_PROCESS, _COPIES = 1 << 30, 8
# Tensors of the size of the scores that the program as written keeps, by whether it trains: a training step keeps the
# scores, the weights, their gradients and what dropout kept.
_SCORES_ALIVE = {False: 3, True: 6}
# Max bytes of contents that are handed over.
_LARGEST = 1 << 28
_OWN_BACKEND = "was not measured on such a device, and behind a backend of one's own is not tried"

_known: dict[str, Times] = {}


@dataclass(frozen=True)
class SiteRun:
    """One site to measure.

    values: the contents of the leaves that are at hand. proved: what is known of the contents of leaves, as text.
    backend: attn_fuse's. inner_backend, compile_mode: its options, what compiles the site's program.
    """

    region: Region
    attention: Attention
    facts: Facts
    values: Mapping[Node, Any]
    proved: Mapping[Node, str]
    backend: Callable[..., Any]
    inner_backend: str | Callable[..., Any]
    compile_mode: str | None

    def times(self, kernels: Sequence[str]) -> Times:
        """The times of the site as written and on `kernels`, or why there are none (`Times.failed`). Never raises."""
        return self._known([AS_WRITTEN, *kernels])

    def check(self, kernel: str, against: str) -> Times:
        """The times of `kernel`, if its self-check passes, and of `against`, which it would replace. Never raises."""
        if not _is_known_elsewhere(self.inner_backend):
            return Times({}, {kernel: _OWN_BACKEND})
        return self._known([kernel, against], kernel, against)

    def _known(self, names: list[str], checked: str = "", against: str = AS_WRITTEN) -> Times:
        """The times of the site on each of `names`, from before or measured now; the arguments are those of `Job`."""
        try:
            job = self.job(checked, against)
            key = _key(names, job)
            found = _known.get(key) or _stored(key, job)
            if found is None:
                lacking = self._lacking_memory(job)
                found = Times({}, {}, lacking) if lacking else _run(names, job)
                if not found.failed and _is_known_elsewhere(self.inner_backend):
                    _store(key, found)
            _known[key] = found
            return found
        except Exception as problem:  # nothing that goes wrong in here may break the model
            log.warning("an attention could not be measured", exc_info=True)
            return Times({}, {}, f"could not be checked: {named(problem)}" if checked else named(problem))

    def _lacking_memory(self, job: Job) -> str:
        free = free_memory(job.device)
        needed = _PROCESS + _COPIES * sum(
            math.prod(leaf.size) * leaf.dtype.itemsize for leaf in job.leaves if leaf.dtype is not None
        )
        if job.against == AS_WRITTEN:
            lengths = {} if not job.checked else self.facts.symbolic & {"q_len", "kv_len"}
            typical = {name: max(TYPICAL_LENGTH, getattr(self.facts, name)) for name in lengths}
            needed += replace(self.facts, **typical).score_bytes * _SCORES_ALIVE[job.training]
        if free is None or needed <= free:
            return ""
        what = "to check it" if job.checked else "as written it"
        return f"{what} takes {needed / 2**30:.1f} GiB or more, of {free / 2**30:.1f} free"

    def job(self, checked: str = "", against: str = AS_WRITTEN) -> Job:
        """What a worker is given; a kernel is checked at lengths of TYPICAL_LENGTH or more where they may change."""
        lengths = self._typical if checked else {}
        leaves = tuple(self._leaf(node, lengths) for node in self.region.leaves)
        code = program_of(self.region, leaves)
        return Job(
            source=code.src,
            names={name: x.__name__ if isinstance(x, types.ModuleType) else x for name, x in code.globals.items()},
            leaves=leaves,
            device=self.facts.device,
            dtype=self.facts.dtype,
            training=self.facts.training or self.facts.bias_needs_grad,
            drops=self.attention.dropout_p is not None,
            value=_alone_in_value(self.attention),
            mode=self.region.mode,
            backend=self.backend,
            inner_backend=self.inner_backend,
            compile_mode=_without_graphs(self.compile_mode),
            switches=switches.current(),
            precision=switches.float32_precision(self.facts.device),
            checked=checked,
            against=against,
        )

    def _leaf(self, node: Node, lengths: Mapping[Any, int]) -> Leaf:
        def number(value: Any) -> Any:
            found = value.node.expr.subs(lengths) if lengths and isinstance(value, torch.SymInt) else None
            return int(found) if found is not None and found.is_Integer else number_of(value)

        proved, learned, at_hand = self.proved.get(node, ""), is_learned(value_of(node)), self.values.get(node)
        leaf = leaf_of(node, self.region, number, bool(proved) or learned, learned)
        contents = None
        if type(at_hand) is torch.Tensor and (proved or node not in self.region.operands):
            fits = at_hand.nbytes <= _LARGEST and at_hand.shape == leaf.size
            contents = at_hand.detach().cpu() if fits else None
        return replace(leaf, proved=proved, contents=contents)

    @property
    def _typical(self) -> dict[Any, int]:
        """By the symbol of a length that may change: what it counts as."""
        axes, facts = self.attention.axes, self.facts
        sizes = ((axes.query, facts.q_len), (axes.key, facts.kv_len))
        found = {self.attention.length(symbols): max(first, TYPICAL_LENGTH) for symbols, first in sizes}
        return {size: length for size, length in found.items() if size.is_Symbol}


def _alone_in_value(attention: Attention) -> int | None:
    """The number of the one leaf that the attention's value, and nothing else, is read from; None without one."""

    def read(*expressions: ex.Expr) -> set[int]:
        return {x.leaf for e in expressions for x in ex.walk(e) if isinstance(x, (ex.Load, ex.Gather, ex.Scalar))}

    found = read(attention.value)
    others = read(attention.query, attention.key, attention.scale, attention.score, *attention.biases)
    return min(found) if len(found) == 1 and not found & others else None


def _is_known_elsewhere(backend: str | Callable[..., Any]) -> bool:
    """Whether another process has that inner backend, and it is the same there."""
    return isinstance(backend, str) and is_known_everywhere(backend)


def _without_graphs(mode: str | None) -> str | None:
    """torch.compile's `mode` without CUDA graphs."""
    # A captured graph owns the memory of its outputs from call to call, which programs that run in turn would break.
    return {"max-autotune": "max-autotune-no-cudagraphs", "reduce-overhead": None}.get(str(mode), mode)


def _run(names: list[str], job: Job) -> Times:
    """The times of `job` on `names`, by a worker; one that a kernel broke is replaced and runs the others."""
    started, seconds = time.perf_counter(), _DEADLINE * (1 if job.checked else len(names))
    if not _is_known_elsewhere(job.inner_backend):
        return _run_here(names, job)
    with Worker(imports=["attn_fuse.backend"], quiet=True) as worker:
        how = timed_apart, names, job, torch.get_num_threads()
        answer, broke = spared(worker, seconds, started + 2 * seconds, *how)
    log.info("measured in %.1f s: %s: %s", time.perf_counter() - started, names, answer)
    if job.checked and answer.lost and answer.begun:
        return Times({}, {job.checked: f"{job.failed}: {answer.problem}"})
    if answer.problem:
        return Times({}, {}, f"could not be checked: {answer.problem}" if job.checked else answer.problem)
    found: Times = answer.value
    return replace(found, why_not={**found.why_not, **{x: f"{job.failed}: {problem}" for x, problem in broke.items()}})


def _run_here(names: list[str], job: Job) -> Times:
    with (
        torch.random.fork_rng([job.device] if job.device.type == "cuda" else []),
        apart_from_dynamo(),
        collecting(keep=False),
    ):
        return timed(names, job)


# ---- what is known already


def _key(names: Sequence[str], job: Job) -> str:
    """A hash of all that the times depend on."""
    here = (_VERSION, str(this_device(job.device)), cuda_driver(), torch.__version__, _triton(), _text_of_kernels())
    return hashlib.sha256(repr((*here, *names, job)).encode()).hexdigest()[:32]


@functools.cache
def _triton() -> str:
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


@functools.cache
def _text_of_kernels() -> str:
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "kernels").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _path(key: str) -> Path:
    return cache_dir() / "measured" / f"{key}.json"


def _stored(key: str, job: Job) -> Times | None:
    try:
        data = json.loads(_path(key).read_text())
        seconds = {str(name): float(time) for name, time in data["seconds"].items()}
        why_not = {str(name): str(why) for name, why in data["why_not"].items()}
        whole = {job.against, job.checked or job.against} <= seconds.keys() or job.checked in why_not
        return Times(seconds, why_not) if whole and all(x > 0 for x in seconds.values()) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _store(key: str, found: Times) -> None:
    data = {"seconds": dict(found.seconds), "why_not": dict(found.why_not)}
    try:
        write_whole(_path(key), json.dumps(data, indent=1) + "\n")
    except OSError as problem:
        log.info("measured times are not kept on disk: %s", problem)
