"""``python -m attn_fuse.bench calibrate``: measure this device; the picker goes by it from then on.

``--show`` prints the times that the picker uses here, ``--forget`` deletes the user's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from attn_fuse.bench.calibrate import calibrate, forget, show
from attn_fuse.bench.cases import grid
from attn_fuse.bench.flags import Parser, device_of
from attn_fuse.bench.measure import QUICK, Effort, observed
from attn_fuse.errors import BenchError

_MINUTES, _QUICK_MINUTES = 9.0, 1.0


def main(arguments: Sequence[str]) -> int:
    """Run the command; gives the exit code. Raises BenchError, in one line."""
    args = _parsed(arguments)
    if args.forget:
        forget()
        return 0
    device = device_of(args.device)
    if args.show:
        show(device)
        return 0
    cases = grid(device.type, args.lengths or (), args.heads or 0)
    minutes = args.minutes or (_QUICK_MINUTES if args.quick else _MINUTES)
    calibrate(device, cases, minutes, QUICK if args.quick else Effort(), observed)
    return 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m attn_fuse.bench calibrate", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="print what the picker has to go by here")
    what.add_argument("--forget", action="store_true", help="delete what was measured here")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one is the default")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"at most, but for the first case; {_MINUTES:g}, and {_QUICK_MINUTES:g} with --quick",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds of each case, and a minute of them")
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths of the sequences, for other than the usual")
    parser.add_argument("--heads", type=int, help="number of heads, for another than the usual")
    args = parser.parse_args(arguments)
    for name in ("minutes", "heads", "lengths"):
        value = getattr(args, name)
        if value is not None and not min(value if isinstance(value, list) else [value]) > 0:
            raise BenchError(f"--{name} is above 0, not {' '.join(map(str, value)) if name == 'lengths' else value}")
    return args
