"""Plots of times and memory, by matplotlib, which only the extra `plot` installs."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attn_fuse.errors import BenchError
from attn_fuse.files import unwritable

SUFFIXES = (".png", ".svg")
# Inches; dots per inch of a PNG.
_PANEL, _DPI = (4.6, 3.4), 120
# Okabe and Ito's colours, which colour-blind people tell apart.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#F0E442")
_MARKERS = "osD^vP*X<"


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars, one a name. unit: of the values; ranges: lower and upper quartile of some."""

    title: str
    unit: str
    values: Mapping[str, float]
    ranges: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Lines:
    """A panel of lines, or of dots where there is one point. lines: (x, y) points in order, by name."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def check(path: Path) -> None:
    """Raise BenchError where no plot can be written to `path`: without matplotlib, in another format, or a folder."""
    if path.suffix.lower() not in SUFFIXES:
        raise BenchError(f"--plot {path}: it is a .png or .svg")
    if problem := unwritable("--plot", path):
        raise BenchError(problem)
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib, which is not installed: pip install matplotlib, or leave --plot out")


def bars(path: Path, title: str, rows: Sequence[Sequence[Bars]]) -> None:
    """Write a figure of `rows` of panels to `path`."""
    figure, axes = _figure(rows, max(len(panel.values) for row in rows for panel in row))
    names = list(dict.fromkeys(name for row in rows for panel in row for name in panel.values))
    for axis, panel in _each(axes, rows):
        for number, (name, value) in enumerate(panel.values.items()):
            bounds = panel.ranges.get(name)
            error = None if bounds is None else [[value - bounds[0]], [bounds[1] - value]]
            axis.barh(number, value, xerr=error, color=_colour(names.index(name)), height=0.7, capsize=3)
            axis.annotate(f" {value:.3g}", (value if bounds is None else bounds[1], number), va="center", fontsize=8)
        axis.set_yticks(range(len(panel.values)), list(panel.values), fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel(panel.unit)
        axis.set_title(panel.title, fontsize=10)
        axis.margins(x=0.18)
        axis.set_xlim(left=0)
    _save(figure, path, title)


def lines(path: Path, title: str, rows: Sequence[Sequence[Lines]], logarithmic: bool = True) -> None:
    """Write a figure of `rows` of panels, below them one legend, to `path`."""
    from matplotlib.ticker import LogLocator

    figure, axes = _figure(rows, 0, "row" if logarithmic else "none")
    names = list(dict.fromkeys(name for row in rows for panel in row for name in panel.lines))
    shown: dict[str, Any] = {}
    for axis, panel in _each(axes, rows):
        for name, points in panel.lines.items():
            number = names.index(name)
            # Of lines that coincide, the lower ones are the broader.
            style: dict[str, Any] = {"linewidth": 1.4 + 1.2 * (len(names) - 1 - number)}
            if len(points) == 1:  # a line of one point is invisible
                style |= {"marker": "o", "markersize": 4 + 2 * (len(names) - 1 - number)}
            if logarithmic:
                style = {"linewidth": 1.6, "marker": _MARKERS[number % len(_MARKERS)], "markersize": 5}
            (shown[name],) = axis.plot(*zip(*points, strict=True), color=_colour(number), **style)
        if logarithmic:
            ticks = sorted({x for points in panel.lines.values() for x, _ in points})
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.minorticks_off()
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        axis.set_title(panel.title, fontsize=10)
    columns = min(len(shown), max(2, 2 * len(rows[0])))
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=columns, fontsize=9)
    _save(figure, path, title)


def _figure(rows: Sequence[Sequence[Any]], count: int, shared: Literal["none", "row"] = "none") -> tuple[Any, Any]:
    """A figure and its axes. count: of the bars in a panel. shared: the panels that share an axis of values."""
    # No pyplot: it would look for a screen.
    from matplotlib.figure import Figure

    width, height = _PANEL
    height = max(height, 0.42 * count + 1.2) if count else height
    columns = max(len(row) for row in rows)
    figure = Figure(figsize=(width * columns, height * len(rows) + 0.8), layout="constrained")
    return figure, figure.subplots(len(rows), columns, squeeze=False, sharey=shared)


def _each(axes: Any, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, Any]]:
    """The axes with the panel of each; those without a panel are taken out."""
    found = []
    for number, row in enumerate(rows):
        for column in range(axes.shape[1]):
            if column < len(row):
                found.append((axes[number, column], row[column]))
            else:
                axes[number, column].remove()
    return found


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as problem:
        raise BenchError(f"cannot write {path}: {problem.strerror or problem}") from problem


def scaled(seconds: Sequence[float]) -> tuple[float, str]:
    """The factor and the unit in which `seconds` read well: of the largest, 1 or more."""
    longest = max((s for s in seconds if math.isfinite(s)), default=1.0)
    return next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if longest * f >= 1), (1e6, "µs"))
