"""Fill Triton's cache for benchmarks/gpu.py on a machine without a GPU: `make gpu-cache`.

    PYTHONPATH=. python benchmarks/gpu_cache.py [--out build/gpu-cache.tar.xz] [--minutes 30]

The operators are called as gpu.py will call them, through a driver that runs nothing, the calls that tell most first,
and what Triton compiles is packed: cubins, their descriptions and the launchers. It hits where gpu.py runs under the
same Triton, so under a Python of the same version, and unpacks it to the same place; gpu.py says whether it does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated  # isort: skip  # before all that imports attn_fuse

import torch

import gpu_attention
import gpu_cases
import gpu_sections
import gpu_sweep
import gpu_tasks
from attn_fuse.bench.ways import EAGER, Way
from gpu import CACHES, triton_key
from gpu_attention import Bench
from harness import ROOT
from nanogpt import Program, gpt, programs_of
from pool import Pool
from tests.triton import device

Task = tuple[Any, ...]
# So that the archive is quick to carry to another machine.
MAX_BYTES = 48 << 20
_DEADLINE = 300.0
_KEPT = (".cubin", ".json", ".so")
_CPU = torch.device("cpu")


def attention(library: Path, function: Callable[..., Any], name: str, *shape: Any) -> dict[str, int]:
    """One of our operators, forward and backward, as `speed` calls it."""
    return _counted(library, lambda: [*function([name], Bench(_CPU, dry=True, emulated=True), *shape)])


def checked(library: Path, name: str, c: Any) -> dict[str, int]:
    """One of our operators on a row of the shared grid, as `correctness` calls it."""
    return _counted(library, lambda: gpu_tasks.checked(name, c, _CPU))


def case(library: Path, name: str, case: Any) -> dict[str, int]:
    """A case of the evidence, on one kernel, as `evidence` runs it."""
    from attn_fuse.backend import attn_fuse
    from attn_fuse.bench.workloads import program, runner, tensors
    from attn_fuse.errors import NotFusedError

    def run() -> None:
        torch.compiler.reset()
        options = {"kernels": [name], "strict": True, "inner_backend": "aot_eager"}
        compiled = torch.compile(program(case), backend=attn_fuse, dynamic=False, options=options)
        with contextlib.suppress(NotFusedError):  # what it declines here it declines there
            runner(compiled, case, tensors(case, _CPU))()

    return _counted(library, run)


def model(library: Path, dropout: float) -> dict[str, int]:
    """GPT-2 small's attention on triton_flash, as `models` trains it: one layer, since all are alike."""

    from attn_fuse.backend import attn_fuse

    def run() -> None:
        sizes = gpu_tasks.sizes(tiny=False)
        options = {"kernels": ["triton_flash"], "strict": True, "inner_backend": "aot_eager"}
        module = gpt(sizes, Program(Way(EAGER), sizes.vocabulary, dropout)).to(torch.bfloat16)
        module.compile(backend=attn_fuse, options=options)
        tokens = torch.zeros(sizes.batch, sizes.length, dtype=torch.long)
        module(tokens, tokens)[1].backward()

    return _counted(library, run)


def swept(library: Path, trial: gpu_sweep.Trial) -> dict[str, int]:
    """A kernel in all its configs, as `sweep` times it; those that do not fit the device are left out there, too."""
    bench = Bench(_CPU, dry=True, emulated=True)
    return _counted(library, lambda: [*gpu_sweep.swept(trial.names, bench, trial, _DEADLINE)])


def _counted(library: Path, call: Callable[[], Any]) -> dict[str, int]:
    emulated.begin(library)
    emulated.counts.clear()
    call()
    return dict(emulated.counts)


def tasks(library: Path, only: list[str]) -> Iterator[Task]:
    """The calls, those that tell most first."""
    if "speed" in only:
        for shape in gpu_sections.shapes(tiny=False):
            yield attention, library, gpu_attention.plain, "triton_flash", *shape
        for size in gpu_sections.CACHES_READ:
            yield attention, library, gpu_attention.decoding, "triton_flash", *size
        for feature in gpu_attention.BEYOND_PLAIN:
            yield attention, library, gpu_attention.features, "triton_flash", feature
    if "sweep" in only:
        yield from ((swept, library, trial) for trial in gpu_sweep.trials())
    if "evidence" in only:
        for _, one in gpu_cases.cases():
            yield case, library, "triton_flash", one
    if "models" in only:
        programs = programs_of(torch.device("cuda"), gpu_tasks.sizes(tiny=False))
        yield from ((model, library, dropout) for dropout in dict.fromkeys(p.dropout for p in programs))
    if "correct" in only:
        from tests.grid.case import LONGER, Case
        from tests.grid.operators import FLASH

        yield from ((checked, library, FLASH.name, Case.of(row)) for row in FLASH.rows(other=LONGER))


def pack(folder: Path, out: Path) -> int:
    """What is kept of Triton's cache in `folder`, into the archive `out`; the number of kernels."""
    import triton

    made_with = {"triton_key": triton_key(), "triton": triton.__version__, "python": sys.version.split()[0]}
    (folder / "made_with.json").write_text(json.dumps(made_with) + "\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix in _KEPT]
    with lzma.open(out, "wb", preset=6) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for path in paths:
            archive.add(path, arcname=str(path.relative_to(folder.parent)))
    return sum(path.suffix == ".cubin" for path in paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-cache.tar.xz")
    parser.add_argument("--caches", type=Path, default=CACHES, help=f"as gpu.py is told; {CACHES}")
    parser.add_argument("--minutes", type=float, default=40.0, help="of compiling, at most")
    parser.add_argument("--only", nargs="+", default=["speed", "sweep", "evidence", "models", "correct"])
    parser.add_argument("--most", type=int, help="no more calls than that")
    args = parser.parse_args()
    folder = args.caches.absolute() / "triton"
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    started = time.perf_counter()
    library = device.build(args.caches.absolute() / "driver")
    calls = [*tasks(library, args.only)][: args.most]
    compiled = found = 0
    with Pool(gpu_tasks.cores(), gpu_tasks.environment()) as pool:
        for number, answer in pool.answers(calls, _DEADLINE, started + 60 * args.minutes):
            if answer.problem:
                function, _, *rest = calls[number]
                print(f"  {function.__name__} {rest}: {answer.problem}"[:400], flush=True)
                continue
            compiled += answer.value.get("compiled", 0)
            found += answer.value.get("found", 0)
    seconds = time.perf_counter() - started
    count = pack(folder, args.out)
    size = args.out.stat().st_size
    print(f"{compiled} kernels compiled, {found} found in the cache, by {len(calls)} calls in {seconds:.0f} s")
    print(f"{count} kernels, {size / 2**20:.1f} MiB: {args.out}")
    if size > MAX_BYTES:
        raise SystemExit(f"gpu_cache.py: over {MAX_BYTES >> 20} MiB; leave something out by --only")


if __name__ == "__main__":
    import gpu_cache  # a worker imports the functions from there

    gpu_cache.main()
