"""What benchmarks/gpu.py has its workers do: each function is one call in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

import nanogpt
from attn_fuse.bench.measure import bytes_as_written, prepared
from attn_fuse.picker.case import Case
from attn_fuse.picker.timing import free_memory, machine
from attn_fuse.report import bytes_in_words
from nanogpt import Sizes

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
            said = f"{bytes_in_words(needed)}, and {bytes_in_words(free)} are free beside others"
            raise MemoryError(f"as written it takes {said}")
        time.sleep(0.5)


def picked(case: Case, device: torch.device) -> tuple[str, str]:
    """What the picker chooses for `case`, and why."""
    from attn_fuse.backend import analyze_only
    from attn_fuse.picker import evidence
    from regret import picked as of_program

    def chosen(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        analyze_only(graph, inputs)
        return graph

    evidence.tables.cache_clear()
    return of_program(case, device, chosen)


# ---- the training step of a GPT

# About as many bytes as its largest program holds at once: scores of 12 layers, and logits with their gradients.
STEP_BYTES = 16 << 30


def sizes(tiny: bool) -> Sizes:
    """Of `python -m attn_fuse.bench nanogpt`: GPT-2 small in batches of 12, as nanoGPT has it."""
    return Sizes(1, 2, 32, 32, 2, 65, "float32") if tiny else Sizes(batch=12)


def first_step(name: str, device: torch.device, tiny: bool) -> float:
    """Have a program of that table compiled, which the caches on disk keep; the loss."""
    _wait_for_memory(device, 0 if tiny else STEP_BYTES)
    loss = nanogpt.first_step(name, sizes(tiny), device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return loss


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
