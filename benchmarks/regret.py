"""Regret: what the picker's choice takes over the best that there was, on 60 attentions that it has no measurement of.

torch.compile is asked with the picker left to itself. Then each is measured as written and on every kernel that can run
it, in turn, and compiled and measured anew once all the others were, --passes times; times are medians over the passes.
The goal is 1.03 of the best on every one. A regret is beyond noise if in each pass the quartiles of the choice and of
the best lie apart. --quick: six of them, once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attn_fuse.backend import attn_fuse
from attn_fuse.bench.calibrate import grid
from attn_fuse.bench.measure import Effort, timed
from attn_fuse.bench.workloads import program, runner, tensors
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.report import collecting
from harness import OtherLoad, Timing, store, table

# Lengths and numbers of heads that no evidence has.
LENGTHS = {"cpu": (48, 96, 384, 1536), "cuda": (384, 1536, 3072, 6144)}
HEADS = {"cpu": 6, "cuda": 12}
SITES, QUICK_SITES, GOAL = 60, 6, 1.03


@dataclass(frozen=True)
class Site:
    """One attention: the picker's choice and why, and the times in each pass. load: what others took of the cores."""

    case: Case
    picked: str
    because: str
    passes: tuple[dict[str, Timing], ...]
    load: float

    @property
    def times(self) -> dict[str, float]:
        """Seconds of a call, the median of the passes."""
        always = [name for name in self.passes[0] if all(name in times for times in self.passes)]
        return {name: statistics.median(times[name].median for times in self.passes) for name in always}

    @property
    def best(self) -> str:
        return min(self.times, key=self.times.__getitem__)

    @property
    def regret(self) -> float:
        return self.times[self.picked] / self.times[self.best]

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the choice takes more than the goal, and more than the best in every pass."""
        return self.regret > GOAL and all(times[self.picked].lower > times[self.best].upper for times in self.passes)


def picked(case: Case, device: torch.device, backend: Callable[..., Any] = attn_fuse) -> tuple[str, str]:
    """What the picker chooses for `case`, and why. backend: attn_fuse, or one that analyses alone."""
    torch.compiler.reset()
    values = tensors(case, device)
    with collecting() as graphs:
        runner(torch.compile(program(case), backend=backend, dynamic=False), case, values)()
    (site,) = graphs[-1].sites
    if site.kernel is None:
        return AS_WRITTEN, "" if site.blocker is None else site.blocker.reason
    return site.kernel, site.attention["picked"]


def measured(case: Case, device: torch.device, effort: Effort) -> tuple[dict[str, Timing], float]:
    """The times of `case` as written and on every kernel that can run it, and what others took of the cores."""
    load = OtherLoad()
    return timed(case, device, effort), load.share()


def as_table(sites: Sequence[Site]) -> str:
    lines = []
    for site in sorted(sites, key=lambda site: -site.regret):
        best, flag = f"{site.times[site.best] * 1e3:.3g} ms", "*" * site.is_beyond_noise
        lines.append([str(site.case), site.picked, site.best, best, f"{site.regret:.2f}", flag])
    return table(["attention", "picked", "best", "its time", "regret", ""], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SITES} sites; nothing is stored")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring, at most, for a site in a pass")
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    kind, started = args.device.type, time.perf_counter()
    cases = grid(kind, LENGTHS[kind], HEADS[kind])[: QUICK_SITES if args.quick else SITES]
    chosen = [picked(case, args.device) for case in cases]
    passes: list[list[tuple[dict[str, Timing], float]]] = [[] for _ in cases]
    for number in range(1 if args.quick else args.passes):
        for case, (name, _), found in zip(cases, chosen, passes, strict=True):
            found.append(measured(case, args.device, Effort(args.rounds, args.seconds)))
            times = ", ".join(f"{name} {timing.median * 1e3:.3g} ms" for name, timing in found[-1][0].items())
            print(f"{time.perf_counter() - started:5.0f} s  {number + 1}  {case}: {times}; picked {name}", flush=True)
    sites = [
        Site(case, *choice, tuple(times for times, _ in found), round(max(load for _, load in found), 3))
        for case, choice, found in zip(cases, chosen, passes, strict=True)
    ]
    print("\n" + as_table(sites))
    regrets = sorted(site.regret for site in sites)
    over = sum(site.is_beyond_noise for site in sites)
    summary = {"median": regrets[len(regrets) // 2], "worst": regrets[-1], "over_goal_beyond_noise": over, "goal": GOAL}
    print(
        f"\nmedian {summary['median']:.3f}, worst {regrets[-1]:.3f}; {over} of {len(sites)} above {GOAL} beyond noise"
    )
    if not args.quick:
        rows = [
            {**site.case.as_json(), "picked": site.picked, "because": site.because, "best": site.best,
             "regret": round(site.regret, 4), "beyond_noise": site.is_beyond_noise, "load": site.load,
             "times": site.times,
             "passes": [{name: asdict(timing) for name, timing in times.items()} for times in site.passes]}
            for site in sites
        ]  # fmt: skip
        print(f"stored in {store('regret', args.device, {'summary': summary, 'sites': rows})}")


if __name__ == "__main__":
    main()
