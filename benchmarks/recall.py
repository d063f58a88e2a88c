"""How much hand-written attention is recognised: every spelling in tests/models, beside Inductor's own patterns.

python benchmarks/recall.py --group masks

Each program is compiled in inference (eval, no gradients) and in training, once with every site fused that some kernel
can run, once with the kernel picker's own choice, and once by Inductor alone. What is counted is attentions: those on a
fused kernel, those that a program puts there itself by calling F.scaled_dot_product_attention included, for both.

Inductor runs all of its graph passes and then the graph, without generating code for it: its patterns are applied, and
counted, before that. What it fuses is held against the program run eagerly.
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.report import SiteReport, collecting, headline
from harness import store, table
from tests.models.collection import SPELLINGS, Spelling

MODES = ("inference", "training")


@dataclass(frozen=True)
class Ours:
    """What attn_fuse made of a program. reasons: of the sites that are not fused. For the rest see `Inductors`."""

    found: int
    fused: int
    reasons: tuple[str, ...] = ()
    wrong: bool = False
    failed: str = ""


@dataclass(frozen=True)
class Inductors:
    """What Inductor made of it. wrong: where it fused, it computes something else. failed: why it does not compile."""

    fused: int
    wrong: bool = False
    failed: str = ""


@dataclass(frozen=True)
class Row:
    """One spelling in one mode."""

    spelling: Spelling
    mode: str
    fused: Ours
    picked: Ours
    inductor: Inductors | None


def measured(spelling: Spelling, mode: str, with_inductor: bool) -> Row:
    return Row(
        spelling,
        mode,
        ours(spelling, mode, "fused"),
        ours(spelling, mode, "fastest"),
        inductors(spelling, mode) if with_inductor else None,
    )


def ours(spelling: Spelling, mode: str, pick: str) -> Ours:
    program, args = made(spelling, mode)
    options = {"inner_backend": "eager", "pick": pick}
    with collecting() as graphs:
        try:
            got = run(torch.compile(program, backend=backend, dynamic=spelling.dynamic, options=options), args, mode)
        except Exception as problem:
            return Ours(0, 0, failed=first_line(problem))
    sites = [site for graph in graphs for site in graph.sites]
    reasons = tuple(headline(site) for site in sites if not is_fused(site))
    fused = len(sites) - len(reasons)
    return Ours(len(sites), fused, reasons, fused > 0 and differs(got, spelling, mode))


def inductors(spelling: Spelling, mode: str) -> Inductors:
    program, args = made(spelling, mode)
    graphs: list[GraphModule] = []

    def without_code(graph: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[[list[Any]], Any]:
        graphs.append(graph)

        def call(values: list[Any]) -> Any:
            return graph.forward(*values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def only_passes(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(graph, list(inputs), inner_compile=without_code)

    counters.clear()
    uncached = functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(force_disable_caches=True)
    with uncached[0], uncached[1]:
        try:
            got = run(torch.compile(program, backend=only_passes, dynamic=spelling.dynamic), args, mode)
        except Exception as problem:
            return Inductors(0, failed=first_line(problem))
    # A pattern that fits is traced, and counted, once more where there is a backward.
    counted = counters["inductor"]["fuse_attention"] // (2 if mode == "training" else 1)
    fused = max(counted, sum(attention_calls(graph) for graph in graphs))
    return Inductors(fused, counted > 0 and differs(got, spelling, mode))


def made(spelling: Spelling, mode: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The program and its arguments, the same at every call, and nothing compiled before."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    program = spelling.program()
    args = spelling.inputs(spelling.dtype)
    training = mode == "training"
    if isinstance(program, nn.Module):
        program.train(training)
    return program, pytree.tree_map(lambda a: a.requires_grad_(training) if is_real(a) else a, args)


def run(program: Callable[..., Any], args: Sequence[Any], mode: str) -> Any:
    with torch.set_grad_enabled(mode == "training"):
        return program(*args)


def is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def is_fused(site: SiteReport) -> bool:
    return site.status in ("fused", "already fused")


def attention_calls(graph: GraphModule) -> int:
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return sum("scaled_dot_product" in name and "backward" not in name for name in names)


def differs(got: Any, spelling: Spelling, mode: str) -> bool:
    """Far from what the program gives as written, in some place where that is a number."""
    if spelling.dropout and mode == "training":
        return False
    wanted = run(*made(spelling, mode), mode)
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True)
    for a, b in ((a, b) for a, b in pairs if isinstance(b, Tensor)):
        known = b.isfinite()
        if not torch.allclose(a[known].double(), b[known].double(), rtol=0.02, atol=0.02):
            return True
    return False


def first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"


# ---- what is printed


def is_reached(row: Row, by: str) -> bool:
    """Whether all attentions of the program are on fused kernels, and compute the same."""
    made_of: Ours | Inductors | None = getattr(row, by)
    return made_of is not None and not made_of.wrong and made_of.fused >= row.spelling.sites


def summary(rows: Sequence[Row], with_inductor: bool) -> str:
    """Spellings wholly fused, by group and mode."""
    columns = ["fused", "picked", *(["inductor"] if with_inductor else [])]
    head = ["", *(f"{mode}: {what}" for mode in MODES for what in ("of", *columns))]
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.spelling.group].append(row)
    return table(head, [[name, *cells(part, columns)] for name, part in [*groups.items(), ("all", rows)]])


def cells(rows: Sequence[Row], columns: Sequence[str]) -> Iterator[str]:
    for mode in MODES:
        part = [row for row in rows if row.mode == mode]
        yield str(len(part))
        for column in columns:
            yield str(sum(is_reached(row, column) for row in part))


def listing(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each program that is not wholly fused, with the reasons."""
    for row in rows:
        if not is_reached(row, "fused"):
            reasons = "; ".join(dict.fromkeys(row.fused.reasons)) or f"{row.fused.found} of {row.spelling.sites} found"
            said = row.fused.failed or ("WRONG" if row.fused.wrong else reasons)
            yield f"  {row.spelling.group}: {row.spelling.name}, {row.mode}: {said}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only spellings with this in their name")
    parser.add_argument("--group", choices=sorted({s.group for s in SPELLINGS}), help="only spellings of this group")
    parser.add_argument("--no-inductor", action="store_true", help="leave out what Inductor does by itself")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore")
    chosen = [s for s in SPELLINGS if args.only in s.name and args.group in (None, s.group)]
    rows = []
    for spelling in (s for s in chosen if s.exception is None):
        for mode in MODES if spelling.training else MODES[:1]:
            rows.append(measured(spelling, mode, not args.no_inductor))
            print(f"\r{len(rows)} programs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(summary(rows, not args.no_inductor))
    print("\nNot fused:", *listing(rows), sep="\n")
    if not args.no_inductor:
        wrong = [row for row in rows if row.inductor and (row.inductor.wrong or row.inductor.failed)]
        print("\nInductor alone computes something else, or does not compile:")
        for row in wrong:
            print(f"  {row.spelling.group}: {row.spelling.name}, {row.mode}: {row.inductor.failed or 'wrong'}")
    print("\nNot counted, since they are no single softmax attention:")
    for spelling in chosen:
        if spelling.exception is not None:
            print(f"  {spelling.group}: {spelling.name}: {spelling.exception}")
    if len(chosen) == len(SPELLINGS) and not args.no_inductor:
        print(f"\n{store('recall', torch.device('cpu'), {'spellings': [as_plain(row) for row in rows]})}")


def as_plain(row: Row) -> dict[str, Any]:
    facts = {"group": row.spelling.group, "name": row.spelling.name, "sites": row.spelling.sites, "mode": row.mode}
    made_of = {"fused": row.fused, "picked": row.picked, "inductor": row.inductor}
    return facts | {name: asdict(value) for name, value in made_of.items() if value is not None}


if __name__ == "__main__":
    main()
