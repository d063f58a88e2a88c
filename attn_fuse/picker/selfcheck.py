"""Self-check: whether a kernel that was never measured on this device is right and fast there, for one site.

Another process (`selfcheck_run`) runs the site's own program at its own sizes: first it compares the kernel's result
and gradients with those of `chunked`, then it times the kernel against what would be picked otherwise. The process is a
separate one since a kernel that reads out of bounds breaks its CUDA context, and a kernel that hangs can be stopped no
other way; the training here goes on. The sizes are the site's own since masks that the program keeps as buffers fit no
others.

A verdict is kept, in memory and on disk, under a hash of all that it depends on: the driver, torch, Triton, the text of
the kernels and more. Failures that may not happen again, such as too little memory, are not kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts, is_learned
from attn_fuse.errors import first_line
from attn_fuse.expression import nodes as ex
from attn_fuse.graph.alone import alone, number_of
from attn_fuse.graph.modes import autocast_of
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import Region
from attn_fuse.kernels import switches
from attn_fuse.kernels.cache import cache_dir
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.picker.case import TYPICAL_LENGTH
from attn_fuse.picker.evidence import write_whole
from attn_fuse.picker.pick import CHECK_ENDED, SelfCheck, Verdict
from attn_fuse.picker.timing import free_memory, this_device
from attn_fuse.picker.trial import SCORES_ALIVE, without_graphs
from attn_fuse.report import log
from attn_fuse.torch_internals import cuda_driver

# Raise it when the format of the files or the way of checking changes.
_VERSION = 2
# Max seconds of a process, most of them for compiling.
_DEADLINE = 240.0
# Bytes that a torch process takes on a GPU; copies of the leaves, for the gradients and results of three programs.
_PROCESS, _COPIES = 1 << 30, 8
# Max bytes of contents that are handed over.
_LARGEST = 1 << 28

_known: dict[str, Verdict] = {}


@dataclass(frozen=True)
class Leaf:
    """One leaf of a site, from which the other process makes a tensor or a number.

    number: the value of a leaf that is no tensor; a tensor has a size, stride and dtype instead.
    contents: the elements, on the CPU, where they matter and are at hand.
    proved: what the program relies on about the contents, "" for nothing. learned: whether the leaf is a parameter in
        training.
    """

    number: Any = None
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    contents: torch.Tensor | None = None
    proved: str = ""
    learned: bool = False


@dataclass(frozen=True)
class Job:
    """What the other process is given.

    source: the text of a function `forward(self, *leaves)` that returns a tuple of one tensor.
    names: the globals that `source` uses; a Python module by its name.
    dtype: what the kernel computes with. drops: whether there is dropout.
    value: the number of the leaf that the attention's value, and nothing else, is read from; None without one.
    fallback: the kernel to time against, None for the program as written.
    settings: torch's float32 precision, then `switches.current()`.
    """

    source: str
    names: Mapping[str, Any]
    leaves: tuple[Leaf, ...]
    device: torch.device
    dtype: torch.dtype
    training: bool
    drops: bool
    value: int | None
    mode: Any
    kernel: str
    fallback: str | None
    inner_backend: str
    compile_mode: str | None
    settings: tuple[Any, ...]


def self_check_of(inner_backend: str | Callable[..., Any], compile_mode: str | None) -> Callable[..., SelfCheck]:
    """A function that makes the self-check of a site; see `Site` for its arguments.

    inner_backend, compile_mode: what compiles the programs that are checked.
    """

    def self_check(
        region: Region, attention: Attention, facts: Facts, values: Mapping[Node, Any], proved: Mapping[Node, str]
    ) -> SelfCheck:
        return Site(region, attention, facts, values, proved, inner_backend, compile_mode).verdict

    return self_check


@dataclass(frozen=True)
class Site:
    """One site on which kernels may be checked.

    values: the contents of the leaves that are at hand. proved: what is known of the contents of leaves, as text.
    inner_backend, compile_mode: what compiles the programs.
    """

    region: Region
    attention: Attention
    facts: Facts
    values: Mapping[Node, Any]
    proved: Mapping[Node, str]
    inner_backend: Any
    compile_mode: str | None

    def verdict(self, kernel: Kernel, fallback: Kernel | None) -> Verdict:
        """The verdict on `kernel`, timed against `fallback` (None: the program as written). Never raises."""
        try:
            if not isinstance(self.inner_backend, str):
                return Verdict(
                    None, "was not measured on such a device, and behind a backend of one's own is not tried"
                )
            job = self._job(kernel, fallback)
            key = _key(job)
            known = _known.get(key) or _stored(key)
            if known is None:
                lacking = self._lacking_memory(job)
                known, lasts = (lacking, False) if lacking is not None else _run(job)
                if lasts:
                    _store(key, kernel, fallback, known)
            _known[key] = known
            return known
        except Exception as problem:  # nothing that goes wrong in here may break the model
            log.warning("%s could not be checked", kernel.name, exc_info=True)
            return Verdict(None, f"could not be checked: {type(problem).__name__}: {first_line(problem)}")

    def _lacking_memory(self, job: Job) -> Verdict | None:
        free = free_memory(job.device)
        needed = _PROCESS + _COPIES * sum(
            math.prod(leaf.size) * leaf.dtype.itemsize for leaf in job.leaves if leaf.dtype is not None
        )
        if job.fallback is None:
            typical = {name: TYPICAL_LENGTH for name in ("q_len", "kv_len") if name in self.facts.symbolic}
            lengths = {name: max(length, getattr(self.facts, name)) for name, length in typical.items()}
            needed += replace(self.facts, **lengths).score_bytes * SCORES_ALIVE[job.training]
        if free is None or needed <= free:
            return None
        return Verdict(None, f"to check it takes {needed / 2**30:.1f} GiB or more, of {free / 2**30:.1f} free")

    def _job(self, kernel: Kernel, fallback: Kernel | None) -> Job:
        with autocast_of(self.region.mode):
            program, _ = alone(self.region)
        code = program.graph.python_code("self")
        return Job(
            source=code.src,
            names={name: x.__name__ if isinstance(x, types.ModuleType) else x for name, x in code.globals.items()},
            leaves=tuple(map(self._leaf, self.region.leaves)),
            device=self.facts.device,
            dtype=self.facts.dtype,
            training=self.facts.training or self.facts.bias_needs_grad,
            drops=self.attention.dropout_p is not None,
            value=_alone_in_value(self.attention),
            mode=self.region.mode,
            kernel=kernel.name,
            fallback=None if fallback is None else fallback.name,
            inner_backend=self.inner_backend,
            compile_mode=without_graphs(self.compile_mode),
            settings=(switches.float32_precision(self.facts.device), *switches.current()),
        )

    def _leaf(self, node: Node) -> Leaf:
        like, at_hand = value_of(node), self.values.get(node)
        if not isinstance(like, torch.Tensor):
            return Leaf(self._number(like))
        size, stride = (tuple(map(self._number, ns)) for ns in (like.size(), like.stride()))
        contents = None
        if type(at_hand) is torch.Tensor and (node in self.proved or node not in self.region.operands):
            fits = at_hand.nbytes <= _LARGEST and at_hand.shape == size
            contents = at_hand.detach().cpu() if fits else None
        return Leaf(
            size=size,
            stride=stride,
            dtype=like.dtype,
            requires_grad=like.requires_grad and node not in self.region.detached,
            contents=contents,
            proved=self.proved.get(node, ""),
            learned=is_learned(like),
        )

    def _number(self, value: Any) -> Any:
        """`value` as a number: a symbolic size as on the first call, a symbolic length as TYPICAL_LENGTH or more."""
        if not isinstance(value, torch.SymInt):
            return number_of(value)
        found = value.node.expr.subs(self._lengths)
        return int(found) if found.is_Integer else number_of(value)

    @functools.cached_property
    def _lengths(self) -> dict[Any, int]:
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


# ---- the other process


def _run(job: Job) -> tuple[Verdict, bool]:
    """The verdict, and whether another run would give the same."""
    if not sys.executable:
        return Verdict(None, "could not be checked: there is no Python to start"), False
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="attn_fuse_", ignore_cleanup_errors=True) as folder:
        asked, answer, said = (Path(folder) / name for name in ("job", "verdict", "said"))
        asked.write_bytes(pickle.dumps(job))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "attn_fuse.selfcheck_run", str(asked), str(answer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(_DEADLINE)
            except subprocess.TimeoutExpired:
                return Verdict(None, f"its self-check did not end within {_DEADLINE:g} seconds"), True
            finally:
                _end(process)
        log.info("%s: checked in %.1f s", job.kernel, time.perf_counter() - started)
        if code == 0:
            data = json.loads(answer.read_text())
            return Verdict(data["ratio"], data["reason"]), data["lasts"]
        lines = said.read_text(errors="replace").strip().splitlines()
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return Verdict(None, f"{CHECK_ENDED} {how}{': ' + lines[-1] if lines else ''}"), code < 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill `process` and the processes that it started, such as Inductor's workers."""
    try:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


# ---- what is known already


def _key(job: Job) -> str:
    """A hash of all that the verdict depends on."""

    def kind(leaf: Leaf) -> Any:
        return leaf.number, leaf.size, leaf.stride, str(leaf.dtype), leaf.requires_grad, leaf.learned, leaf.proved

    what = (
        _VERSION, str(this_device(job.device)), cuda_driver(), torch.__version__, _triton(), _text_of_kernels(),
        job.source, [*map(kind, job.leaves)], job.training, job.mode, job.kernel, job.fallback, job.inner_backend,
        job.compile_mode, job.settings,
    )  # fmt: skip
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


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
    return cache_dir() / "measured" / f"checked_{key}.json"


def _stored(key: str) -> Verdict | None:
    try:
        data = json.loads(_path(key).read_text())
        ratio = data["ratio"]
        if ratio is None or (isinstance(ratio, float) and ratio > 0):
            return Verdict(ratio, str(data["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _store(key: str, kernel: Kernel, fallback: Kernel | None, verdict: Verdict) -> None:
    against = "as_written" if fallback is None else fallback.name
    data = {"kernel": kernel.name, "against": against, "ratio": verdict.ratio, "reason": verdict.reason}
    try:
        write_whole(_path(key), json.dumps(data, indent=1) + "\n")
    except OSError as problem:
        log.info("what a self-check found is not kept on disk: %s", problem)
