"""SiteRun: one site timed on kernels, and a kernel checked on it, in a process of its own.

``options={"pick": "measured"}`` goes by the times. The check is for a kernel that was never measured on this device:
whether it is right there, and faster than the choice without it. The process is a separate one because a kernel that
reads out of bounds breaks its CUDA context, and nothing else stops a kernel that hangs; the training here goes on.

The attention's own program comes as text, at the site's own sizes, since masks that the program keeps as buffers fit no
others. The backend compiles it once for each kernel, on stand-ins for what it reads. A self-check is the backend's
option `check`: it holds results and gradients against the program as written, in float64 and without dropout.

Outcomes are kept, in memory and on disk, under a hash of everything they depend on: the program, the driver, torch,
Triton, the text of the kernels and more. Identical layers and later runs do not measure again. Failures that may not
happen again, such as too little memory, are not kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts, is_learned
from attn_fuse.errors import NotFusedError, named
from attn_fuse.graph.modes import Mode, autocast_of
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import Region, number_of
from attn_fuse.kernels import switches, triton
from attn_fuse.kernels.cache import cache_dir
from attn_fuse.picker.case import SCORES_ALIVE, at_typical_lengths, symbols_of
from attn_fuse.picker.evidence import AS_WRITTEN, write_whole
from attn_fuse.picker.leaves import Leaf, leaf_of, made, program_of, with_leaves
from attn_fuse.picker.pick import CHECK_FAILED, RUN_FAILED, Times
from attn_fuse.picker.timing import free_memory, interleaved, synchronize, this_device
from attn_fuse.picker.workers import STARTING, Worker, note, spared
from attn_fuse.report import log
from attn_fuse.torch_internals import cuda_driver, is_known_everywhere

# Raise it when the format of the files or the way of measuring changes.
_VERSION = 6
# Max seconds of a call for each kernel in it, most of them for compiling.
_DEADLINE = 240.0
# Bytes that a torch process takes on a GPU; copies of the leaves, for the gradients and results of two programs.
_PROCESS, _COPIES = 1 << 30, 8
# Max bytes of contents that are handed over.
_LARGEST = 1 << 28
# torch.compile's modes without CUDA graphs. A captured graph owns the memory of its outputs from call to call, and
# programs that run in turn would overwrite it.
_WITHOUT_GRAPHS = {"max-autotune": "max-autotune-no-cudagraphs", "reduce-overhead": None}
_ROUNDS, _SECONDS, _SHORTEST = 11, 1.0, 1e-3

_known: dict[str, Times] = {}


@dataclass(frozen=True)
class SiteRun:
    """One site to measure.

    values: known contents of leaves. proved: proofs about contents of leaves, as text.
    backend: attn_fuse's. options: its inner_backend and mode.
    """

    region: Region
    attention: Attention
    facts: Facts
    values: Mapping[Node, Any]
    proved: Mapping[Node, str]
    backend: Callable[..., Any]
    options: Mapping[str, Any]

    def times(self, kernels: Sequence[str], checked: str = "", against: str = AS_WRITTEN) -> Times:
        """The times of the site on `against` and on each of `kernels`, from before or measured now. Never raises.

        checked: a kernel that has to pass its self-check; "" for none.
        """
        try:
            inner = self.options["inner_backend"]
            if not isinstance(inner, str) or not is_known_everywhere(inner):
                return Times({}, {}, "no other process has the inner backend")
            job = self._job(checked, against)
            key = _key(kernels, job)
            found = _known.get(key) or _stored(key)
            if found is None:
                lacking = self._lacking_memory(job)
                found = Times({}, {}, lacking) if lacking else _run(kernels, job)
                if not found.failed and "OutOfMemoryError" not in str(found.why_not):
                    _store(key, found)
            _known[key] = found
            return found
        except Exception as problem:  # nothing that goes wrong in here may break the model
            log.warning("an attention could not be measured", exc_info=True)
            return Times({}, {}, named(problem))

    def check(self, kernel: str, against: str) -> Times:
        """The times of `kernel`, if its self-check passes, and of `against`, which it would replace. Never raises."""
        return self.times([kernel], kernel, against)

    def _job(self, checked: str, against: str) -> Job:
        """The input of a worker. A kernel is checked at typical lengths."""
        symbols = symbols_of(self.attention, at_typical_lengths(self.facts)) if checked else {}
        leaves = tuple(self._leaf(node, symbols) for node in self.region.leaves)
        code, mode = program_of(self.region, leaves), self.options["mode"]
        return Job(
            source=code.src,
            names={name: x.__name__ if isinstance(x, types.ModuleType) else x for name, x in code.globals.items()},
            leaves=leaves,
            device=self.facts.device,
            mode=self.region.mode,
            backend=self.backend,
            options={**self.options, "mode": _WITHOUT_GRAPHS.get(mode, mode)},
            switches=switches.current(),
            precision=switches.float32_precision(self.facts.device),
            threads=torch.get_num_threads(),
            checked=checked,
            against=against,
        )

    def _leaf(self, node: Node, symbols: Mapping[Any, int]) -> Leaf:
        def number(value: Any) -> Any:
            found = value.node.expr.subs(symbols) if isinstance(value, torch.SymInt) else None
            return int(found) if found is not None and found.is_Integer else number_of(value)

        proved, at_hand = self.proved.get(node, ""), self.values.get(node)
        leaf = leaf_of(node, self.region, bool(proved) or is_learned(value_of(node)), number)
        contents = None
        if type(at_hand) is torch.Tensor and (proved or node not in self.region.operands):
            fits = at_hand.nbytes <= _LARGEST and at_hand.shape == leaf.size
            contents = at_hand.detach().cpu() if fits else None
        return replace(leaf, proved=proved, contents=contents)

    def _lacking_memory(self, job: Job) -> str:
        free = free_memory(job.device)
        needed = _PROCESS + _COPIES * sum(math.prod(x.size) * x.dtype.itemsize for x in job.leaves if x.dtype)
        if job.checked or job.against == AS_WRITTEN:
            facts = at_typical_lengths(self.facts) if job.checked else self.facts
            needed += facts.score_bytes * SCORES_ALIVE[job.training]
        if free is None or needed <= free:
            return ""
        return f"it takes {needed / 2**30:.1f} GiB or more, of {free / 2**30:.1f} free"


def _run(kernels: Sequence[str], job: Job) -> Times:
    """The times of `job`, by a worker; one that a kernel broke is replaced and runs the others."""
    started, seconds = time.perf_counter(), _DEADLINE * (1 if job.checked else 1 + len(kernels))
    with Worker(quiet=True) as worker:
        answer, broke = spared(worker, seconds, started + STARTING + 2 * seconds, timed, kernels, job)
    log.info("measured in %.1f s: %s: %s", time.perf_counter() - started, kernels, answer)
    found: Times = answer.value or Times({}, {}, "" if len(broke) == len(kernels) else answer.problem)
    return replace(found, why_not={**found.why_not, **{x: f"{job.failed}{problem}" for x, problem in broke.items()}})


# ---- in the worker


@dataclass(frozen=True)
class Job:
    """The input of a worker: one attention, apart from its program. Equal jobs have the same `repr` in every process.

    source: the text that `program_of` gives. names: its globals; a Python module by its name.
    backend: attn_fuse's. options: its inner_backend and mode.
    precision: of torch's float32 products. threads: torch's, on a CPU.
    checked: the kernel to check, "" for none. against: a kernel or "as_written", which runs beside the others.
    """

    source: str
    names: Mapping[str, Any] = field(repr=False)
    leaves: tuple[Leaf, ...]
    device: torch.device
    mode: Mode
    backend: Callable[..., Any] = field(repr=False)
    options: Mapping[str, Any]
    switches: switches.Switches
    precision: str
    threads: int
    checked: str = ""
    against: str = AS_WRITTEN

    @property
    def training(self) -> bool:
        """Whether the attention computes gradients."""
        return any(leaf.requires_grad for leaf in self.leaves)

    @property
    def failed(self) -> str:
        """How the reason against a kernel that fails begins."""
        return f"{CHECK_FAILED if self.checked else RUN_FAILED}: "


def timed(kernels: Sequence[str], job: Job) -> Times:
    """The times of the job on `job.against` and on each of `kernels`, and why some have none.

    It is called in a worker, since it changes torch's settings and random state.
    """
    torch.set_num_threads(job.threads)
    switches.switch(job.switches, job.precision, job.device)
    if job.device.index is not None:
        torch.cuda.set_device(job.device)
    torch.manual_seed(0)
    values = [made(leaf) for leaf in job.leaves]
    with torch.set_grad_enabled(job.training), autocast_of(job.mode):
        runs, why_not = runs_on(
            job.against, kernels, lambda name: _compiled(job, values, name), job.device, failed=job.failed
        )
        if len(runs) == 1:
            return Times({}, why_not)
        note(job.checked)
        times = interleaved(runs, job.device, _ROUNDS, _SECONDS * len(runs), _SHORTEST)
    return Times({name: timing.median for name, timing in times.items()}, why_not)


def _compiled(job: Job, values: Sequence[Any], name: str) -> Callable[[], Any]:
    """A call of the attention on `values`, compiled on the kernel `name`, or as written."""
    # The text is executed anew for each, since Dynamo compiles one piece of code a few times only.
    names = {name: importlib.import_module(x) if isinstance(x, str) else x for name, x in job.names.items()}
    exec(compile(job.source, "<site>", "exec"), names)  # the text of a graph that this user's process compiled
    written: nn.Module = type("Site", (nn.Module,), {"forward": names["forward"]})()
    module, given = with_leaves(written, job.leaves, values)
    options: Any = {**job.options, **forced(name), "check": name == job.checked}
    compiled = torch.compile(module, backend=job.backend, dynamic=False, options=options)
    if not job.training:
        return lambda: compiled(*given)
    wanted = [value for value, leaf in zip(values, job.leaves, strict=True) if leaf.requires_grad]
    upstream = torch.randn_like(compiled(*given)[0])
    return lambda: torch.autograd.grad(compiled(*given)[0], wanted, upstream, materialize_grads=True)


def runs_on(
    base: str,
    kernels: Sequence[str],
    on: Callable[[str], Callable[[], Any]],
    device: torch.device,
    failed: str = "",
    wrong: Callable[[Any, Any], str] = lambda found, expected: "",
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """A call on `base` and on each of `kernels`, run once, and why a kernel has none; each is noted before it runs.

    on: makes the call for a name. failed: how the reason against a kernel that fails begins.
    wrong: what is wrong with the first result of a kernel, given that of `base`; "" for nothing.
    Raises what `base` raises, and the errors of a broken device.
    """
    note("")
    runs, why_not = {base: on(base)}, {}
    expected = runs[base]()
    synchronize(device)
    for name in kernels:
        note(name)
        try:
            run = on(name)
            found = run()
            synchronize(device)
            problem = wrong(found, expected)
        except Exception as error:
            synchronize(device)  # raises if the kernel broke the device, on which nothing else can run
            if isinstance(error, torch.AcceleratorError):
                raise
            problem = named(error)
            if isinstance(error, NotFusedError):
                _, checked, problem = str(error).partition("refused: the check ")
                if not checked:
                    why_not[name] = str(error).rpartition(f"{name}: ")[2]
                    continue
                problem = problem.removeprefix("failed: ")
        if problem:
            why_not[name] = f"{failed}{problem}"
        else:
            runs[name] = run
    note("")
    return runs, why_not


def forced(name: str) -> dict[str, Any]:
    """The options that put an attention on the kernel of this name alone, or leave it "as_written"."""
    return {"kernels": []} if name == AS_WRITTEN else {"kernels": [name], "strict": True}


# ---- what is known already


def _key(kernels: Sequence[str], job: Job) -> str:
    """A hash of all that the times depend on."""
    versions = torch.__version__, triton.version(), cuda_driver(), _VERSION, _text_of_kernels()
    return hashlib.sha256(repr((versions, str(this_device(job.device)), *kernels, job)).encode()).hexdigest()[:32]


@functools.cache
def _text_of_kernels() -> str:
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "kernels").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _path(key: str) -> Path:
    return cache_dir() / "measured" / f"{key}.json"


def _stored(key: str) -> Times | None:
    try:
        return Times(**json.loads(_path(key).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _store(key: str, found: Times) -> None:
    try:
        write_whole(_path(key), json.dumps(asdict(found), indent=1) + "\n")
    except OSError as problem:
        log.info("measured times are not kept on disk: %s", problem)
