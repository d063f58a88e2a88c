"""The process of a self-check: ``python -m attn_fuse.selfcheck_run JOB VERDICT``, started by `selfcheck`.

Reads a pickled `Job` and writes {"ratio", "reason", "lasts"} as JSON. A kernel passes if every row of its result and of
each gradient differs from that of `chunked` by no more than rounding explains. Each kernel drops other weights: there
the mean and the variance over many draws have to agree, and the gradient of the value has to be that of the same
weights as the result.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.backend import attn_fuse
from attn_fuse.errors import NotFusedError, first_line, named
from attn_fuse.graph.modes import autocast_of
from attn_fuse.picker.pick import CHECK_FAILED
from attn_fuse.picker.selfcheck import Job, Leaf
from attn_fuse.picker.timing import interleaved, synchronize
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

Results = tuple[Tensor, ...]


def main(arguments: Sequence[str]) -> int:
    """Check the job in one file and write the verdict to another; returns the exit code. arguments: both paths."""
    job, answer = arguments
    ratio, reason, lasts = verdict(pickle.loads(Path(job).read_bytes()))
    Path(answer).write_text(json.dumps({"ratio": ratio, "reason": reason, "lasts": lasts}))
    return 0


def verdict(job: Job) -> tuple[float | None, str, bool]:
    """The kernel's time over the fallback's, or None; why it is None; and whether another run would give the same."""
    precision, *_, deterministic, warns_only = job.settings
    getattr(torch.backends, "cuda" if job.device.type == "cuda" else "mkldnn").matmul.fp32_precision = precision
    torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)
    if job.device.index is not None:
        torch.cuda.set_device(job.device)
    torch.manual_seed(0)
    leaves = [made(leaf, job.device) for leaf in job.leaves]
    with torch.set_grad_enabled(job.training), autocast_of(job.mode):
        out = _runner(job, "chunked", leaves)()[0]
        upstream = torch.randn_like(out)
        runs = {name: _runner(job, name, leaves, upstream) for name in dict.fromkeys((job.kernel, "chunked"))}
        try:
            wrong = _of_draws(runs, job, leaves, upstream) if job.drops else _unlike(runs, job)
        except torch.OutOfMemoryError as problem:
            return None, f"its self-check ran out of memory: {first_line(problem)}", False
        except NotFusedError as problem:
            said = reports()[-1].sites[0].why_not if reports() and reports()[-1].sites else {}
            return None, "; ".join(said.get(job.kernel, (str(problem),))), True
        except Exception as problem:
            return None, f"{CHECK_FAILED}: {named(problem)}", True
        if wrong:
            return None, f"{CHECK_FAILED}: {wrong}", True
        against = job.fallback or "as_written"
        if job.fallback not in runs:
            runs[against] = _runner(job, job.fallback, leaves, upstream)
            runs[against]()
        both = {name: runs[name] for name in (job.kernel, against)}
        times = interleaved(both, job.device, _ROUNDS, _SECONDS * len(both), _SHORTEST)
    return times[job.kernel].median / times[against].median, "", True


# ---- the site


class _Site(nn.Module):
    """The job's program as a module: it holds leaves that are proved or learned, and is called with the others."""

    def __init__(self, job: Job, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.given = [n for n, leaf in enumerate(job.leaves) if not (leaf.proved or leaf.learned)]
        self.count = len(leaves)
        for n, leaf in enumerate(job.leaves):
            if leaf.learned:
                self.register_parameter(f"leaf_{n}", leaves[n])
            elif leaf.proved:
                self.register_buffer(f"leaf_{n}", leaves[n])
        names = {name: importlib.import_module(x) if isinstance(x, str) else x for name, x in job.names.items()}
        exec(compile(job.source, "<site>", "exec"), names)  # the text of a graph that this user's process compiled
        self.program: Any = names["forward"]

    def forward(self, *given: Any) -> Any:
        values = dict(zip(self.given, given, strict=True))
        leaves = [values[n] if n in values else getattr(self, f"leaf_{n}") for n in range(self.count)]
        return self.program(self, *leaves)[0]


def made(leaf: Leaf, device: torch.device) -> Any:
    """A tensor or number for `leaf`: its contents, or others that an operand, a mask or a position may have."""
    if leaf.dtype is None:
        return leaf.number
    if leaf.contents is not None:
        tensor = torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device=device)
        with torch.no_grad():
            tensor = leaf.contents.to(device) if 0 in leaf.stride else tensor.copy_(leaf.contents)
    else:
        tensor = torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device=device)
        whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        if leaf.dtype.is_floating_point:
            whole.normal_()
        elif leaf.dtype == torch.bool:
            whole.bernoulli_(0.8)
            if tensor.dim():
                tensor[..., 0] = True
        else:
            whole.zero_()
            if tensor.dim() and 0 not in leaf.stride:
                tensor[..., : -(-tensor.shape[-1] * 3 // 4)] = 1  # words before padding; one of two documents
    if leaf.learned:
        return nn.Parameter(tensor, requires_grad=leaf.requires_grad)
    return tensor.requires_grad_(leaf.requires_grad)


def _runner(job: Job, kernel: str | None, leaves: list[Any], upstream: Tensor | None = None) -> Callable[[], Results]:
    """A call of the site on `kernel` (None: as written): the result, and with `upstream` in training the gradients."""
    options = {"inner_backend": job.inner_backend, "kernels": [kernel] if kernel else [], "strict": kernel is not None}
    backend = functools.partial(attn_fuse, options=options, mode=job.compile_mode)
    site = _Site(job, leaves)
    compiled = torch.compile(site, backend=backend, dynamic=False)
    given = [leaves[n] for n in site.given]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad] if job.training else []

    def run() -> Results:
        out = compiled(*given)
        if upstream is None or not wanted:
            return (out.detach(),)
        found = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
        return (out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)))

    return run


# ---- results held against each other


def _unlike(runs: dict[str, Callable[[], Results]], job: Job) -> str:
    """How the kernel's results differ from those of `chunked`, in words; "" where rounding explains it."""
    found, expected = runs[job.kernel](), runs["chunked"]()
    synchronize(job.device)
    of, rounding = ("result", *(f"gradient {n}" for n in range(len(expected) - 1))), _rounding(job)
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


def _rounding(job: Job) -> float:
    dtypes = [job.dtype, *(leaf.dtype for leaf in job.leaves if leaf.requires_grad)]
    coarsest = max(_ROUNDING[dtype] for dtype in dtypes if dtype in _ROUNDING)
    return coarsest if job.settings[0] == "ieee" else max(coarsest, _TF32)


def _norms(x: Tensor) -> Tensor:
    """The root mean square of each row."""
    return x.float().square().mean(-1).sqrt() if x.dim() else x.float().abs()


def _of_draws(runs: dict[str, Callable[[], Results]], job: Job, leaves: Sequence[Any], upstream: Tensor) -> str:
    """How the kernel's draws differ from those of `chunked`, in words; "" where chance explains it."""
    moments = {name: _moments(run) for name, run in runs.items()}
    (means, variances), (expected, spread) = moments[job.kernel], moments["chunked"]
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
                return f"over {_DRAWS} draws the {what} of its {name} is unlike chunked's, by a factor of {ratio:.3g}"
    if job.value is None or not job.training or not leaves[job.value].requires_grad:
        return ""
    wanted = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    place, value, total = 1 + wanted.index(job.value), leaves[job.value].detach().float(), 0.0
    for _ in range(_DRAWS):
        results = runs[job.kernel]()
        forward = upstream.float() * results[0].float()
        total += ((forward.sum() - (results[place].float() * value).sum()) / forward.norm()).square().item()
    off = (total / _DRAWS) ** 0.5
    return f"the gradient of its value is of other weights than the result, by {off:.3g}" if off > _UNLIKE else ""


def _moments(run: Callable[[], Results]) -> tuple[list[Tensor], list[Tensor]]:
    """The mean and variance of each result over many draws."""
    sums: list[Tensor] = []
    squares: list[Tensor] = []
    for draw in range(_DRAWS):
        results = [x.float() for x in run()]
        sums = [s + x for s, x in zip(sums, results, strict=True)] if draw else results
        squares = [s + x * x for s, x in zip(squares, results, strict=True)] if draw else [x * x for x in results]
    means = [s / _DRAWS for s in sums]
    return means, [
        (s / _DRAWS - m * m).clamp_min(0) * _DRAWS / (_DRAWS - 1) for s, m in zip(squares, means, strict=True)
    ]


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    # After a CUDA error Python aborts while it shuts down; the verdict is written by now.
    os._exit(exit_code)
