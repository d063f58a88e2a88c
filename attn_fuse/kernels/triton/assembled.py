"""Assembled: whether ptxas made of a kernel what its program says, as far as one known mistake goes.

ptxas 12.8, Triton 3.6's for sm_90, takes one uniform register for both words of a descriptor, the address of a tile in
shared memory by which a group of warps multiplies, in some kernels that put registers away. The high word of such an
address is 0: the product reads anywhere, seen on an H100 as "an illegal memory access". ptxas 12.9 does not.
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
    """The machine code of a kernel is not what its program says."""


def is_misassembled(compiled: Any) -> bool:
    """Whether the machine code of a kernel that Triton compiled has the mistake, or might and cannot be looked at.

    It takes a tenth of a second, for kernels that put registers away and multiply by groups of warps; no time for
    others. The kernel is loaded, which says what it puts away.
    """
    cubin, ptx = compiled.asm.get("cubin"), compiled.asm.get("ptx")
    # A cache may have been packed without the PTX; a device that is not NVIDIA's has neither.
    if cubin is None or (ptx is not None and "wgmma" not in ptx):
        return False
    if getattr(compiled, "n_spills", None) == 0:
        return False
    code = _machine_code(cubin)
    return code is None or bool(misdescribed(code))


def misdescribed(code: str) -> list[str]:
    """The instructions that take one uniform register for both words of a descriptor. code: of cuobjdump -sass."""
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
    """Each instruction in what cuobjdump -sass prints, with its address, without its predicate."""
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
