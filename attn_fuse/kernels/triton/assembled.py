"""A check of machine code for one known error of ptxas.

When ptxas 12.8, which Triton 3.6 uses for sm_90, spills registers, it sometimes uses one uniform register for both
words of the descriptor by which a warp group addresses a tile in shared memory. The product then reads anywhere,
because the high word should be 0. An H100 reported "an illegal memory access". ptxas 12.9 does not have the error.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;\s")
_WRITTEN = re.compile(r"((?:U|R2U|S2U)[A-Z0-9.]*) (?:U?P\w+, )?UR(\d+)\b")
_LOW = re.compile(r"UIADD3 UR(\d+), (UP\d), UR(\d+), -?0x[0-9a-f]+, URZ")
_HIGH = re.compile(r"UIADD3\.X UR\d+, UR(\d+), -?0x[0-9a-f]{7,}, URZ, (UP\d)")


class MisassembledError(RuntimeError):
    """The machine code of a kernel differs from its program."""


def is_misassembled(compiled: Any) -> bool:
    """Whether a compiled kernel has the error, or could have it and cannot be checked.

    Takes a tenth of a second for kernels that spill registers and multiply by warp groups, and no time for others. The
    kernel must be loaded, which tells how much it spills.
    """
    cubin, ptx = compiled.asm.get("cubin"), compiled.asm.get("ptx")
    # A packed cache may lack the PTX, and a device that is not from NVIDIA has neither.
    if cubin is None or (ptx is not None and "wgmma" not in ptx):
        return False
    if getattr(compiled, "n_spills", None) == 0:
        return False
    code = _machine_code(cubin)
    return code is None or bool(misdescribed(code))


def misdescribed(code: str) -> list[str]:
    """The instructions that use one uniform register for both words of a descriptor. code: from cuobjdump -sass."""
    found, low = [], {}  # type: list[str], dict[str, str]
    for _, text in instructions(code):
        high = _HIGH.match(text)
        if high and low.get(high[2]) == high[1]:
            found.append(text)
        written = _WRITTEN.match(text)
        if written:
            changed = {written[2], str(int(written[2]) + 1)} if ".64" in written[1] else {written[2]}
            low = {carry: register for carry, register in low.items() if register not in changed}
        start = _LOW.match(text)
        if start and start[1] != start[3]:
            low[start[2]] = start[3]
    return found


def instructions(code: str) -> list[tuple[int, str]]:
    """The addresses and instructions, without predicates, in the output of cuobjdump -sass."""
    return [(int(found[1], 16), found[2]) for found in map(_LINE.match, code.splitlines()) if found]


def _machine_code(cubin: bytes) -> str | None:
    try:
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (ImportError, AttributeError, OSError, subprocess.SubprocessError):
        return None
