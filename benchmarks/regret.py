"""Regret: what the picker's choice takes over the best that there was, on 60 attentions that it has no measurement of.

Each is measured as written and on every kernel that can run it, in turn; then torch.compile is asked with the picker
left to itself. The goal is 1.03 of the best, beyond noise, on every one. --quick: six of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from attn_fuse.backend import attn_fuse
from attn_fuse.bench import Effort, grid, timed
from attn_fuse.kernels.case import Case
from attn_fuse.kernels.evidence import AS_WRITTEN
from attn_fuse.kernels.specimens import program, runner, tensors
from attn_fuse.report import collecting
from harness import OtherLoad, Timing, store, table

# Lengths and numbers of heads that no evidence has.
LENGTHS = {"cpu": (48, 96, 384, 1536), "cuda": (384, 1536, 3072, 6144)}
HEADS = {"cpu": 6, "cuda": 12}
SITES, QUICK_SITES, GOAL = 60, 6, 1.03


@dataclass(frozen=True)
class Site:
    """One attention: the picker's choice and why, and the times. load: the share of the cores others took meanwhile."""

    case: Case
    picked: str
    because: str
    times: dict[str, Timing]
    load: float

    @property
    def best(self) -> str:
        return min(self.times, key=lambda name: self.times[name].median)

    @property
    def regret(self) -> float:
        return self.times[self.picked].median / self.times[self.best].median

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the quartiles of the choice and of the best lie apart."""
        return self.regret > GOAL and self.times[self.picked].lower > self.times[self.best].upper


def picked(case: Case, device: torch.device) -> tuple[str, str]:
    """What the picker chooses for `case`, and why."""
    torch.compiler.reset()
    values = tensors(case, device)
    with collecting() as graphs:
        runner(torch.compile(program(case), backend=attn_fuse, dynamic=False), case, values)()
    (site,) = graphs[-1].sites
    if site.kernel is None:
        return AS_WRITTEN, "" if site.blocker is None else site.blocker.reason
    return site.kernel, site.attention["picked"]


def site_of(case: Case, device: torch.device, effort: Effort) -> Site:
    name, because = picked(case, device)
    load = OtherLoad()
    times, _ = timed(case, device, effort)
    return Site(case, name, because, times, round(load.share(), 3))


def as_table(sites: Sequence[Site]) -> str:
    lines = []
    for site in sorted(sites, key=lambda site: -site.regret):
        best, flag = f"{site.times[site.best].median * 1e3:.3g} ms", "*" * site.is_beyond_noise
        lines.append([str(site.case), site.picked, site.best, best, f"{site.regret:.2f}", flag])
    return table(["attention", "picked", "best", "its time", "regret", ""], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SITES} sites; nothing is stored")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4.0, help="of measuring, at most, for a site")
    args = parser.parse_args()
    kind, started = args.device.type, time.perf_counter()
    sites: list[Site] = []
    for case in grid(kind, LENGTHS[kind], HEADS[kind])[: QUICK_SITES if args.quick else SITES]:
        sites.append(site_of(case, args.device, Effort(args.rounds, args.seconds)))
        times = ", ".join(f"{name} {timing.median * 1e3:.3g} ms" for name, timing in sites[-1].times.items())
        print(f"{time.perf_counter() - started:5.0f} s  {case}: {times}; picked {sites[-1].picked}", flush=True)
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
             "times": {name: asdict(timing) for name, timing in site.times.items()}}
            for site in sites
        ]  # fmt: skip
        print(f"stored in {store('regret', args.device, {'summary': summary, 'sites': rows})}")


if __name__ == "__main__":
    main()
