"""Job: one attention to run apart from its program, on several kernels, in a worker.

A worker gets the attention's own program as text, at the site's own sizes, since masks that the program keeps as
buffers fit no others. The backend compiles it there, once for each kernel. A kernel that is to be checked passes if
every row of its result and of each gradient differs from that of `chunked` by no more than rounding explains. Each
kernel drops other weights: there the mean and the variance over many draws have to agree, and the gradient of the value
has to be that of the same weights as the result.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.errors import NotFusedError, first_line, named
from attn_fuse.graph.modes import Mode, autocast_of
from attn_fuse.kernels.switches import Switches, switch
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.leaves import Leaf, made, with_leaves
from attn_fuse.picker.pick import CHECK_FAILED, RUN_FAILED, Times
from attn_fuse.picker.timing import interleaved, synchronize
from attn_fuse.picker.workers import note
from attn_fuse.report import reports

_ROUNDS, _SECONDS, _SHORTEST = 11, 1.0, 1e-3
# Half of the distance between numbers next to 1. In float32 the sums of the scores, and the exponentials of scores,
# lose some seven bits more; in half precision their loss is smaller than the rounding of the operands.
_ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-18}
_TF32 = 2.0**-12
# Max error of a row, in roundings of itself and of the largest row: a gradient may cancel to 0.
_OF_ROW, _OF_LARGEST = 64, 8
_DRAWS = 32
# Bounds on the average, over all elements, of a ratio that is expected to be 1; of 32 draws with p = 0.1, a scale that
# lacks 1 / (1 - p) gives 2.4.
_LIKELY = (0.5, 2.0)
# Max difference of two sums, over the norm of what is summed; weights dropped otherwise than in the forward give 0.3
# for p = 0.1, rounding gives less than 0.01.
_UNLIKE = 0.1
_JUDGE = "chunked"

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Job:
    """What a worker is given. Its text is the same wherever its times are.

    source: the text that `program_of` gives. names: the globals that it uses; a Python module by its name.
    dtype: what kernels compute with. drops: whether there is dropout.
    value: the number of the leaf that the attention's value, and nothing else, is read from; None without one.
    backend: attn_fuse's. inner_backend, compile_mode: its options. precision: of torch's float32 products.
    checked: the kernel to hold against `chunked` first, "" for none. against: the one to time others against, which may
        be "as_written".
    """

    source: str
    names: Mapping[str, Any] = field(repr=False)
    leaves: tuple[Leaf, ...]
    device: torch.device
    dtype: torch.dtype
    training: bool
    drops: bool
    value: int | None
    mode: Mode
    backend: Callable[..., Any] = field(repr=False)
    inner_backend: str | Callable[..., Any]
    compile_mode: str | None
    switches: Switches
    precision: str
    checked: str = ""
    against: str = AS_WRITTEN

    @property
    def failed(self) -> str:
        """What a kernel that fails did, in words."""
        return CHECK_FAILED if self.checked else RUN_FAILED


def timed_apart(names: Sequence[str], job: Job, threads: int) -> Times:
    """`timed`, in a process of its own, under the caller's settings. threads: torch's, on a CPU."""
    torch.set_num_threads(threads)
    switch(job.switches, job.precision, job.device)
    if job.device.index is not None:
        torch.cuda.set_device(job.device)
    torch.manual_seed(0)
    return timed(names, job)


def timed(names: Sequence[str], job: Job) -> Times:
    """The times of the job on each of `names`, and why some have none; all fail where `job.against` does."""
    attention, runs, why_not = _Attention(job), dict[str, Callable[[], Results]](), dict[str, str]()
    with torch.set_grad_enabled(job.training), autocast_of(job.mode):
        for name in names:
            # Without these two there is nothing to go on with in another process.
            note("" if name in (job.checked, job.against) else name)
            try:
                runs[name] = run = attention.on(name)
                if name == job.checked:
                    judge = attention.on(_JUDGE)
                    wrong = attention.of_draws(run, judge) if job.drops else attention.unlike(run, judge)
                    if wrong:
                        return Times({}, {name: f"{job.failed}: {wrong}"})
                run()
                synchronize(job.device)
            except Exception as problem:
                if isinstance(problem, torch.AcceleratorError) and not job.checked:
                    raise  # the device is broken for all that would come after
                if job.checked and isinstance(problem, torch.OutOfMemoryError):
                    return Times({}, {}, f"its self-check ran out of memory: {first_line(problem)}")
                if name == job.against:
                    return Times({}, {}, f"{name.replace('_', ' ')}: {named(problem)}")
                runs.pop(name, None)
                sites = reports()[-1].sites if isinstance(problem, NotFusedError) and reports() else ()
                reasons = sites[0].why_not.get(name, ()) if sites else ()
                why_not[name] = "; ".join(reasons) or f"{job.failed}: {named(problem)}"
                if name == job.checked:
                    return Times({}, why_not)
        note("")
        times = interleaved(runs, job.device, _ROUNDS, _SECONDS * len(runs), _SHORTEST)
    return Times({name: timing.median for name, timing in times.items()}, why_not)


class _Attention:
    """The job's attention on stand-ins for its leaves. upstream: the gradient of the result, made with the first."""

    def __init__(self, job: Job) -> None:
        self.job, self.leaves = job, [made(leaf) for leaf in job.leaves]
        self.wanted = [
            n for n, x in enumerate(self.leaves) if job.training and isinstance(x, Tensor) and x.requires_grad
        ]
        self.upstream: Tensor | None = None
        self.on = functools.cache(self._on)

    def _on(self, name: str) -> Callable[[], Results]:
        """A call of the attention on the kernel `name`: the result, and in training the gradients."""
        job, kernels = self.job, [] if name == AS_WRITTEN else [name]
        options: Any = {"inner_backend": job.inner_backend, "mode": job.compile_mode}
        options |= {"kernels": kernels, "strict": bool(kernels)}
        module, given = with_leaves(self._module(), job.leaves, self.leaves)
        compiled = torch.compile(module, backend=job.backend, dynamic=False, options=options)
        wanted = [self.leaves[n] for n in self.wanted]

        def run() -> Results:
            (out,) = compiled(*given)
            if not wanted:
                return (out,)
            if self.upstream is None:
                self.upstream = torch.randn_like(out)
            return (out, *torch.autograd.grad(out, wanted, self.upstream, allow_unused=True))

        return run

    def _module(self) -> nn.Module:
        # The text is executed anew for each, since Dynamo compiles one piece of code a few times only.
        job = self.job
        names = {name: importlib.import_module(x) if isinstance(x, str) else x for name, x in job.names.items()}
        exec(compile(job.source, "<site>", "exec"), names)  # the text of a graph that this user's process compiled
        module: nn.Module = type("Site", (nn.Module,), {"forward": names["forward"]})()
        return module

    # ---- results held against each other

    def _results(self, run: Callable[[], Results]) -> list[Tensor]:
        """What `run` gives, detached; zeros for a gradient that does not depend on a leaf."""
        out, *gradients = run()
        both = zip(gradients, self.wanted, strict=True)
        return [out.detach(), *(torch.zeros_like(self.leaves[n]) if g is None else g for g, n in both)]

    def unlike(self, run: Callable[[], Results], judge: Callable[[], Results]) -> str:
        """How the results of `run` differ from those of `judge`, in words; "" where rounding explains it."""
        expected, found = self._results(judge), self._results(run)
        synchronize(self.job.device)
        of, rounding = ("result", *(f"gradient {n}" for n in range(len(expected) - 1))), self._rounding()
        for name, a, b in zip(of, found, expected, strict=True):
            seen, off = _norms(b), _norms(a.float() - b.float())
            bound = rounding * (_OF_ROW * seen + _OF_LARGEST * seen.nan_to_num(nan=0.0).max())
            # Where the program gives NaN, for a fully masked row, a kernel may give 0.
            bad = ~(off <= bound) & seen.isfinite()
            if bad.any():
                worst = (off / bound)[bad].nan_to_num(nan=float("inf")).max().item()
                count = f"{int(bad.sum())} of {bad.numel()} rows"
                return f"{count} of its {name} differ from chunked's, by {worst:.3g} of what rounding explains"
        return ""

    def _rounding(self) -> float:
        dtypes = [self.job.dtype, *(leaf.dtype for leaf in self.job.leaves if leaf.requires_grad)]
        coarsest = max(_ROUNDING[dtype] for dtype in dtypes if dtype in _ROUNDING)
        return coarsest if self.job.precision == "ieee" else max(coarsest, _TF32)

    def of_draws(self, run: Callable[[], Results], judge: Callable[[], Results]) -> str:
        """How the draws of `run` differ from those of `judge`, in words; "" where chance explains it."""
        expected, spread = self._moments(judge)
        means, variances = self._moments(run)
        for n, (a, b, v, w) in enumerate(zip(means, expected, variances, spread, strict=True)):
            name = f"gradient {n - 1}" if n else "result"
            varies = w > w.mean() * 1e-3
            if not a.isfinite()[b.isfinite()].all():
                return f"its {name} is not finite"
            if not varies.any():
                continue
            for what, ratio in (
                ("mean", ((a - b).square() * _DRAWS / (2 * w))[varies].mean().item()),
                ("variance", (v[varies].sum() / w[varies].sum()).item()),
            ):
                if not _LIKELY[0] < ratio < _LIKELY[1]:
                    said = f"over {_DRAWS} draws the {what} of its {name} is unlike chunked's"
                    return f"{said}, by a factor of {ratio:.3g}"
        if self.job.value not in self.wanted or self.upstream is None:
            return ""
        place, value, total = 1 + self.wanted.index(self.job.value), self.leaves[self.job.value].detach().float(), 0.0
        for _ in range(_DRAWS):
            results = self._results(run)
            forward = self.upstream.float() * results[0].float()
            total += ((forward.sum() - (results[place].float() * value).sum()) / forward.norm()).square().item()
        off = (total / _DRAWS) ** 0.5
        return f"the gradient of its value is of other weights than the result, by {off:.3g}" if off > _UNLIKE else ""

    def _moments(self, run: Callable[[], Results]) -> tuple[list[Tensor], list[Tensor]]:
        """The mean and variance of each result over many draws."""
        sums, squares = list[Tensor](), list[Tensor]()
        for draw in range(_DRAWS):
            found = [x.float() for x in self._results(run)]
            sums = [s + x for s, x in zip(sums, found, strict=True)] if draw else found
            squares = [s + x * x for s, x in zip(squares, found, strict=True)] if draw else [x * x for x in found]
        means = [s / _DRAWS for s in sums]
        return means, [
            (s / _DRAWS - m * m).clamp_min(0) * _DRAWS / (_DRAWS - 1) for s, m in zip(squares, means, strict=True)
        ]


def _norms(x: Tensor) -> Tensor:
    """The root mean square of each row."""
    return x.float().square().mean(-1).sqrt() if x.dim() else x.float().abs()
