"""What the copy engine sends in a compiled kernel, against the room for it and what its barrier waits for.

A descriptor that the host makes has one box, whatever becomes of the tile in the compiler. A message that brings more
than the buffer has room for overruns shared memory, and a barrier that waits for other bytes than those that arrive
opens too soon or never: both give wrong answers, and Triton 3.6 compiles both without a word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

WIDTHS = {"bf16": 2, "f16": 2, "f32": 4}
_EXPECT = re.compile(r"ttng\.barrier_expect (%\w+), (\d+)")
_COPY = re.compile(
    r"ttng\.async_tma_copy_global_to_local %(?P<of>\w+)\[[^]]*\] %\w+, (?P<barrier>%\w+),"
    r".*-> !ttg\.memdesc<(?P<shape>[\dx]+)x(?P<type>bf16|f16|f32),"
)


def mismatches(ttgir: str, boxes: Mapping[str, Sequence[int]]) -> tuple[int, list[str]]:
    """How many messages there are, and what is wrong with them.

    boxes: by the name of the kernel's argument, the box of the descriptor that the host makes for it.
    """
    count, found = 0, []
    awaited: dict[str, int] = {}

    def settle(barrier: str) -> None:
        left = awaited.pop(barrier, 0)
        if left:
            found.append(f"{barrier} waits for {left} bytes that do not arrive")

    for line in ttgir.splitlines():
        if expected := _EXPECT.search(line):
            settle(expected[1])
            awaited[expected[1]] = int(expected[2])
        elif copy := _COPY.search(line):
            count += 1
            shape, box = [int(n) for n in copy["shape"].split("x")], boxes[copy["of"]]
            width = WIDTHS[copy["type"]]
            room = math.prod(shape) * width
            # A tile wider than its box comes in several messages, side by side.
            sent = math.prod(box) * width * max(shape[-1] // box[-1], 1)
            if sent != room:
                found.append(f"{copy['of']}: {sent} bytes are sent where there is room for {room}")
            if copy["barrier"] not in awaited:
                found.append(f"{copy['of']}: no barrier waits for it")
            else:
                awaited[copy["barrier"]] -= sent
        elif "ttng.async_tma_copy" in line:
            found.append(f"not understood: {line.strip()[:200]}")
    for barrier in list(awaited):
        settle(barrier)
    return count, found
