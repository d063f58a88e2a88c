"""Plots of times and memory, by matplotlib, which the extra `bench` installs."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_fuse.errors import BenchError
from attn_fuse.files import unwritable

SUFFIXES = (".png", ".svg")
# Inches.
_WIDTH, _HEIGHT = 4.6, 3.4
# Lines of more points have no markers.
_FEW = 20


@dataclass(frozen=True)
class Panel:
    """One panel of a figure. values: by name.

    For `bars` a value is (median, lower quartile, upper quartile), the last two NaN for none; for `lines` it is the
    (x, y) points in order.
    """

    title: str
    x_label: str
    y_label: str
    values: Mapping[str, Sequence[Any]]


def check(path: Path) -> None:
    """Raise BenchError where no plot can be written to `path`: without matplotlib, in another format, or a folder."""
    if path.suffix.lower() not in SUFFIXES:
        raise BenchError(f"--plot {path}: it is a .png or .svg")
    if problem := unwritable("--plot", path):
        raise BenchError(problem)
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib, which is not installed: pip install matplotlib, or leave --plot out")


def bars(path: Path, title: str, rows: Sequence[Sequence[Panel]]) -> None:
    """Write a figure of `rows` of panels, one horizontal bar a name, to `path`. Raises BenchError where that fails."""
    most = max(len(panel.values) for row in rows for panel in row)
    with _figure(path, title, rows, max(_HEIGHT, 0.42 * most + 1.2)) as (_, panels):
        for axis, panel in panels:
            medians = [median for median, _, _ in panel.values.values()]
            ranges = [(m - low, high - m) for m, low, high in panel.values.values()]
            drawn = axis.barh(list(panel.values), medians, xerr=list(zip(*ranges, strict=True)) or None, capsize=3)
            axis.bar_label(drawn, fmt="{:.3g}", padding=4, fontsize=8)
            axis.tick_params("y", labelsize=8)
            axis.invert_yaxis()
            axis.margins(x=0.18)


def lines(path: Path, title: str, rows: Sequence[Sequence[Panel]], logarithmic: bool = True) -> None:
    """Write a figure of `rows` of panels, with one legend below, to `path`. Raises BenchError where that fails."""
    with _figure(path, title, rows, _HEIGHT) as (figure, panels):
        names = list(dict.fromkeys(name for row in rows for panel in row for name in panel.values))
        shown: dict[str, Any] = {}
        for axis, panel in panels:
            for name, points in panel.values.items():
                marker = "o" if len(points) < _FEW else ""
                (shown[name],) = axis.plot(
                    *zip(*points, strict=True), marker=marker, alpha=0.8, color=f"C{names.index(name) % 10}"
                )
            if logarithmic:
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.xaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter("{x:g}")
            axis.grid(alpha=0.3)
        figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=min(4, len(shown)))


@contextlib.contextmanager
def _figure(
    path: Path, title: str, rows: Sequence[Sequence[Panel]], height: float
) -> Iterator[tuple[Any, list[tuple[Any, Panel]]]]:
    """A figure, and the axes of each panel; written to `path` at the end of the block."""
    import matplotlib.style
    from matplotlib.figure import Figure  # no pyplot: it would look for a screen

    with matplotlib.style.context("tableau-colorblind10"):
        columns = max(len(row) for row in rows)
        figure = Figure(figsize=(_WIDTH * columns, height * len(rows) + 0.8), dpi=120, layout="constrained")
        axes = figure.subplots(len(rows), columns, squeeze=False)
        panels: list[tuple[Any, Panel]] = []
        for row, of_row in zip(rows, axes, strict=True):
            panels += zip(of_row, row, strict=False)
            for axis in of_row[len(row) :]:
                axis.remove()
        for axis, panel in panels:
            axis.set_title(panel.title, fontsize=10)
            axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
        figure.suptitle(title, fontsize=11)
        yield figure, panels
        try:
            figure.savefig(path)
        except OSError as problem:
            raise BenchError(f"cannot write {path}: {problem.strerror or problem}") from problem


def scaled(seconds: Sequence[float]) -> tuple[float, str]:
    """The factor and the unit in which `seconds` read well: the largest is then 1 or more."""
    longest = max((s for s in seconds if math.isfinite(s)), default=1.0)
    return next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if longest * f >= 1), (1e6, "µs"))
