"""Shared by the examples: run a model as written and under attn_fuse, compare the results and time both."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attn_fuse
from attn_fuse.picker.timing import interleaved, table
from attn_fuse.report import headline


def flags(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser for the sizes of an example and the flags common to all examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"({value})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pick", default="fastest", choices=("fastest", "measured", "fused"))
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing (10)")
    return parser


def compare(model: Callable[..., Tensor], inputs: tuple[Any, ...], args: argparse.Namespace) -> None:
    """Print the outcome of each attention, and the time of `model` as written, under Inductor and under attn_fuse.

    Raises AssertionError if the compiled model computes something else.
    """
    compiled = torch.compile(model, backend="attn_fuse", options={"pick": args.pick})
    plain = torch.compile(model, dynamic=False)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), atol=1e-4, rtol=1e-3)
    tell()
    runs = {"eager": model, "inductor": plain, "attn_fuse": compiled}
    times = interleaved({name: lambda run=run: run(*inputs) for name, run in runs.items()}, torch.device(args.device),
                        seconds=args.seconds)  # fmt: skip
    eager = times["eager"].median
    rows = [[name, str(timing), f"{timing.median / eager:.2f}"] for name, timing in times.items()]
    print(table(["", "time of a call (quartiles)", "of eager"], rows))


def tell() -> None:
    """Print a line for each attention compiled so far."""
    for site in (site for graph in attn_fuse.reports() for site in graph.sites):
        print(f"{site.location}: {headline(site)}")
