"""What benchmarks/gpu.py has its workers do: each function is one call in a process of its own."""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

import gpu_attention
from attn_fuse.bench.measure import bytes_as_written, in_gib, prepared
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.timing import free_memory, interleaved, machine, synchronize
from attn_fuse.picker.workers import note
from attn_fuse.picker.workloads import program, runner, tensors
from gpu_attention import Bench, Row

# A few wrong rows are of what they are of; from this share on, a kernel is not timed.
MAX_WRONG = 0.1


def about(device: torch.device) -> dict[str, Any]:
    """The machine, and what of our cases runs on it: asked in a worker, so that the caller stays off the device."""
    from tests.grid.operators import operators

    found = machine(device)
    if device.type == "cuda":
        found["free_memory"] = free_memory(device)
    return {"machine": found, "operators": [*operators(device)]}


def grid_rows(name: str, device: torch.device, tiny: bool) -> list[Any]:
    """The rows of the shared grid that an operator of ours is to take."""
    from tests.grid.case import LONGER, Case
    from tests.grid.operators import operators

    rows = operators(device)[name].rows(other=None if tiny else LONGER)
    return [Case.of(row) for row in (rows[:4] if tiny else rows)]


def checked(name: str, c: Any, device: torch.device) -> str:
    """What is wrong with an operator of ours on a row of the grid, against float64; empty where nothing is."""
    from tests.grid.operators import check, operators

    torch.set_num_threads(1)
    return check(operators(device)[name], c, device)


def ceilings(bench: Bench) -> list[Row]:
    return [*gpu_attention.ceilings(bench)]


def plain(names: Sequence[str], bench: Bench, length: int, head_dim: int, causal: bool) -> list[Row]:
    return _all(gpu_attention.plain(names, bench, length, head_dim, causal))


def features(names: Sequence[str], bench: Bench, feature: str) -> list[Row]:
    return _all(gpu_attention.features(names, bench, feature))


def decoding(names: Sequence[str], bench: Bench, batch: int, length: int) -> list[Row]:
    return _all(gpu_attention.decoding(names, bench, batch, length))


def _all(rows: Any) -> list[Row]:
    torch.manual_seed(0)
    found = [*rows]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return found


def grid_names(device: torch.device) -> list[str]:
    """The grids of the kernels through the backend, those last whose every row takes seconds to compile."""
    from tests.grid.backend import COMPILED

    return sorted(_grids(device), key=lambda name: name.rpartition("-")[0] in COMPILED)


def backend_rows(name: str, device: torch.device, tiny: bool) -> list[Any]:
    """The rows of a grid: each value alone, then what is not declined in every pair."""
    from tests.grid.case import Case

    grid = _grids(device)[name]
    rows = list({Case.of(row): row for row in (*grid.alone(), *grid.rows())}.values())
    return rows[:4] if tiny else rows


def answered(name: str, row: Any, device: torch.device) -> tuple[str, str]:
    """What is wrong with a kernel on a row, through the backend; and why it does not take that row."""
    torch.set_num_threads(1)
    answer = _grids(device)[name].answer(row)
    return answer.wrong, "; ".join(answer.reasons)


def _grids(device: torch.device) -> Mapping[str, Any]:
    from attn_fuse.kernels import KERNELS
    from tests.grid.backend import grids
    from tests.grid.case import LONGER

    return {str(grid): grid for grid in grids(KERNELS, device, None if device.type == "cpu" else LONGER)}


# ---- published models

# Each as the kernels' order has it, and on our own where these take it.
ORDERS: dict[str, tuple[str, ...]] = {"fused": (), "triton": ("triton_flash",)}


def published_cases() -> list[str]:
    """The tiny models of transformers, in an order in which each part has some of all kinds."""
    names = [*_published()]
    random.Random(0).shuffle(names)
    return names


def published(name: str, mode: str, order: str, device: torch.device) -> dict[str, Any]:
    """A published model against eager, on the kernels of an order: the fields of `zoo.measure.Row`."""
    from zoo.measure import Setting, measured

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # so that what a convolution rounds does not decide
    kernels = ORDERS[order] if device.type == "cuda" else ()
    return asdict(measured("transformers", name, Setting(_published()[name], mode, device, kernels)))


def _published() -> Mapping[str, Any]:
    from zoo.cases import MODULES

    (package,) = importlib.import_module(f"zoo.cases.{MODULES['transformers']}").PACKAGES
    cases: Mapping[str, Any] = package.cases
    return cases


# ---- evidence


def compiled(kernels: Sequence[str], case: Case, device: torch.device) -> dict[str, str]:
    """Have a case compiled as written and on each kernel, which the caches on disk keep; why a kernel has none."""
    _wait_for_memory(device, bytes_as_written(case))
    found = prepared(case, device, kernels)[1]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return found


def _wait_for_memory(device: torch.device, needed: int, patience: float = 30.0) -> None:
    """Until half of the free memory is enough: others, too, begin to compile now, and give theirs back when done."""
    end = time.perf_counter() + patience
    while (free := free_memory(device)) is not None and needed > free / 2:
        if time.perf_counter() > end:
            raise MemoryError(f"as written it takes {in_gib(needed)}, and {in_gib(free)} are free beside others")
        time.sleep(0.5)


def picked(case: Case, device: torch.device) -> tuple[str, str]:
    """What the picker chooses for `case`, and why."""
    from attn_fuse.backend import analyze_only
    from attn_fuse.picker import evidence
    from attn_fuse.report import collecting

    def chosen(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        analyze_only(graph, inputs)
        return graph

    evidence.tables.cache_clear()
    torch.compiler.reset()
    values = tensors(case, device)
    with collecting() as graphs:
        runner(torch.compile(program(case), backend=chosen, dynamic=False), case, values)()
    (site,) = graphs[-1].sites
    if site.kernel is None:
        return AS_WRITTEN, "" if site.blocker is None else site.blocker.reason
    return site.kernel, site.attention["picked"]


# ---- models

BATCH = 12
VARIANTS = ("inductor", "sdpa", "attn_fuse", "triton_flash")
MODELS = {
    "GPT-2 small": ({"vocab_size": 50257}, VARIANTS),
    "GPT-2 small, its vocabulary padded to 50304": ({"vocab_size": 50304}, VARIANTS[:3]),
    "GPT-2 small, dropout 0.1": ({"vocab_size": 50304, "dropout": 0.1}, VARIANTS[:3]),
}
# Gradients in bfloat16 may differ by so much, of their norm; losses near 11 by two of its steps.
MAX_OFF, MAX_LOSS_OFF = 0.1, 0.13
_TINY = {"block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 32}


def steps(variants: Sequence[str], bench: Bench, model: str) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """A training step of each variant, once run, and its report; one that fails is left out, with the reason.

    As written under Inductor, edited by hand to SDPA under Inductor, and as written under attn_fuse: as it picks, and
    on triton_flash alone.
    """
    import nanogpt as script
    from attn_fuse.report import headline, reports

    changes, _ = MODELS[model]
    config = script.GPTConfig(**changes, **(_TINY if bench.tiny else {}))
    inner = "aot_eager" if bench.tiny else "inductor"
    own = "chunked" if bench.device.type == "cpu" else "triton_flash"
    torch.manual_seed(0)
    weights = script.GPT(config).state_dict()
    backends: dict[str, dict[str, Any]] = {
        "inductor": {"backend": inner},
        "sdpa": {"backend": inner},
        "attn_fuse": {"backend": "attn_fuse", "options": {"inner_backend": inner}},
        "triton_flash": {
            "backend": "attn_fuse",
            "options": {"inner_backend": inner, "kernels": [own], "strict": True},
        },
    }
    args = argparse.Namespace(device=bench.device, batch=2 if bench.tiny else BATCH, length=config.block_size)
    gradients: dict[str, torch.Tensor] = {}
    calls, said = {}, {"failed": {}, "loss": {}, "off": {}, "sites": {}, "first_step_s": {}}  # type: dict[str, Any], dict[str, Any]
    for variant in variants:
        note(variant)
        started = time.perf_counter()
        try:
            module = (script.SDPAGPT if variant == "sdpa" else script.GPT)(config)
            module.load_state_dict(weights)
            module.to(bench.device, torch.bfloat16).compile(**_known(backends[variant]))
            step = script.block_runs({variant: module}, args, training=True)[variant]
            before = len(reports())
            said["loss"][variant] = float(step())
            sites = {headline(site) for report in reports()[before:] for site in report.sites}
            said["sites"][variant] = sorted(sites)
            gradients[variant] = _gradients(module)
            calls[variant] = step
        except Exception as error:
            synchronize(bench.device)  # raises where the device is broken
            said["failed"][variant] = f"{type(error).__name__}: {str(error)[:500]}"
        said["first_step_s"][variant] = round(time.perf_counter() - started, 1)
    note("")
    first = next(iter(gradients), "")
    # Under dropout each draws for itself, and only the sizes are alike.
    allowed = MAX_OFF * (5 if config.dropout else 1)
    for variant, gradient in gradients.items():
        of = gradients[first]
        off = float((gradient.norm() - of.norm()).abs() / of.norm() if config.dropout else _distance(gradient, of))
        said["off"][variant] = round(off, 5)
        if not off <= allowed or abs(said["loss"][variant] - said["loss"][first]) > MAX_LOSS_OFF:
            calls.pop(variant)
            said["failed"][variant] = f"wrong: its gradients are off from those of {first} by {off:.3g}"
    return calls, {"what": model, "batch": args.batch, "tokens": config.block_size, **said}


def _gradients(model: torch.nn.Module) -> torch.Tensor:
    """Those of the weights that make query, key and value, which say most of what the attention did."""
    named = [(name, p.grad) for name, p in model.named_parameters() if name.endswith("c_attn.weight")]
    return torch.cat([gradient.flatten().float() for _, gradient in named if gradient is not None])


def _distance(found: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (found - reference).norm() / reference.norm()


def _known(how: dict[str, Any]) -> dict[str, Any]:
    """torch finds the backend by its name where attn_fuse is installed; run from a checkout it is given itself."""
    from attn_fuse.backend import attn_fuse

    return how | {"backend": attn_fuse} if how["backend"] == "attn_fuse" else how


def first_step(variants: Sequence[str], bench: Bench, model: str) -> Row:
    """Have the variants compiled, which the caches on disk keep."""
    said = steps(variants, bench, model)[1]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return said


def training(variants: Sequence[str], bench: Bench, model: str, seconds: float) -> Row:
    """Seconds of a training step of each variant, interleaved, and the max memory."""
    from harness import peak_memory

    calls, said = steps(variants, bench, model)
    times = interleaved(calls, bench.device, 2 if bench.tiny else 15, seconds) if calls else {}
    peaks = {variant: peak_memory(call, bench.device) for variant, call in calls.items()}
    return {**said, "seconds": {variant: timing.median for variant, timing in times.items()}, "peak_bytes": peaks}


def environment() -> dict[str, str]:
    """Of a worker that compiles beside others: one process each is enough."""
    return {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def cores() -> int:
    return len(os.sched_getaffinity(0))
