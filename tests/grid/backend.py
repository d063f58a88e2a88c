"""Every kernel through the backend: rows of the grid as programs that people write, compiled for one kernel alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_fuse.kernels.kernel import Kernel
from attn_fuse.report import collecting
from tests.grid import cover
from tests.grid.case import AXES, DTYPES, Case, attention, operands
from tests.grid.cover import Row
from tests.grid.declined import TAKES, Takes, Values
from tests.grid.operators import kept_weights
from tests.grid.oracle import complaint, results
from tests.harness import compiled

# Not compiled, these run as something else: each row takes seconds.
COMPILED = frozenset({"flex"})


@dataclass(frozen=True)
class Answer:
    """What became of a row on a kernel. reasons: why the kernel does not take it; wrong: what it computed wrongly."""

    reasons: tuple[str, ...]
    wrong: str = ""


@dataclass(frozen=True)
class Grid:
    """The rows for one kernel, with gradients or without: each value alone, then what it takes in every combination.

    other: values of axes in place of those of the grid.
    """

    kernel: Kernel
    device: torch.device
    training: bool
    other: cover.Axes | None = None

    def __str__(self) -> str:
        return f"{self.kernel.name}-{'training' if self.training else 'inference'}"

    @property
    def takes(self) -> Takes:
        return TAKES[self.device.type].get(self.kernel.name, {}).get(self.training, Takes({}))

    @property
    def axes(self) -> dict[str, Sequence[str]]:
        gradients = tuple(g for g in AXES["gradient"] if (g != "none") == self.training)
        dtypes = tuple(name for name, dtype in DTYPES.items() if dtype in self.kernel.dtypes)
        return {**AXES, **(self.other or {}), "gradient": gradients, "dtype": dtypes}

    @property
    def base(self) -> Row:
        """What a value stands alone on: the plainest that is not declined."""
        return {axis: values[0] for axis, values in self._left().items()}

    def alone(self) -> list[Row]:
        return cover.alone(self.axes, self.base)

    def rows(self, strength: int = 2) -> list[Row]:
        """Those that hold nothing which is declined alone."""
        axes = self._left()
        return [*cover.distinct([*cover.alone(axes, self.base), *cover.covering(axes, strength)])]

    def _left(self) -> dict[str, list[str]]:
        declined = self.takes.declined
        return {axis: [v for v in values if v not in declined.get(axis, ())] for axis, values in self.axes.items()}

    @property
    def declined(self) -> Values:
        """What is written down of this grid's values."""
        written = {axis: [v for v in self.axes[axis] if v in values] for axis, values in self.takes.declined.items()}
        return {axis: values for axis, values in written.items() if values}

    def answer(self, row: Row) -> Answer:
        return answer(self.kernel, self.device, Case.of(row))

    def declines(self) -> Values:
        """The values that the kernel does not take alone, by axis, in the order of the axis."""
        found: dict[str, list[str]] = {}
        for row in self.alone():
            if self.answer(row).reasons:
                ((axis, value),) = row.items() - self.base.items()
                found.setdefault(axis, []).append(value)
        return found


def grids(kernels: tuple[Kernel, ...], device: torch.device, other: cover.Axes | None = None) -> list[Grid]:
    """Of each kernel that runs on the device; of one about which nothing is written down, both."""
    return [
        Grid(kernel, device, training, other)
        for kernel in kernels
        if device.type in kernel.devices
        for training in TAKES[device.type].get(kernel.name, (True, False))
    ]


@functools.cache
def answer(kernel: Kernel, device: torch.device, c: Case) -> Answer:
    """What `kernel` does with the attention of a row."""
    o = operands(c, device)
    torch._dynamo.reset()
    inner = "inductor" if kernel.name in COMPILED else "eager"
    # Triton's interpreter computes bfloat16 wrongly: the check would leave as written what only runs wrong there.
    checked = not (kernel.name.startswith("triton") and device.type == "cpu" and c.dtype == torch.bfloat16)
    fused = compiled(attention(c), inner, dynamic=False, check=checked, kernels=[kernel.name])

    def run(*tensors: Tensor) -> Tensor:
        torch.manual_seed(1)
        return fused(*tensors)

    with torch.set_grad_enabled(c.training), collecting() as graphs:
        got = results(run, o, c.training)
    sites = [site for graph in graphs for site in graph.sites]
    if len(sites) != 1:
        return Answer((f"{len(sites)} attentions were found",))
    if not sites[0].fused:
        blocker = sites[0].blocker
        return Answer(sites[0].why_not.get(kernel.name) or (blocker.reason if blocker else sites[0].status,))
    assert sites[0].kernel == kernel.name
    return Answer((), complaint(got, c, o, kept_weights(run, c, o) if c.dropout_p else None, kernel.keeps_nan))
