"""Write: the script of one failure, for ``options={"repro": DIR}``.

The script holds the region as a module, its inputs and the options, and calls `rerun`. Query, key, value, weights and
ordinary floats become random numbers of the same mean and spread. Masks, positions and other integers, constants and
single numbers are kept, because the result depends on them.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import platform
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import PythonCode

from attn_fuse.graph.location import locate
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import Region, number_of
from attn_fuse.graph.replay import observed
from attn_fuse.kernels import switches
from attn_fuse.options import Options, chosen_kernels
from attn_fuse.picker.evidence import write_whole
from attn_fuse.picker.leaves import Leaf, leaf_of, program_of
from attn_fuse.picker.timing import this_device
from attn_fuse.report import Failure, version

# Max elements of a tensor in the script; a file beside it holds larger ones.
_INLINE = 32
# Max bytes of an integer tensor or mask whose contents are kept.
_LARGEST = 1 << 24
# A floating-point tensor with larger numbers is a mask, not a bias.
_HIDES = 1e3
_OPTIONS = ("inner_backend", "kernels", "pick", "try_unmeasured", "mode", "inductor")
_IMPORTED = {"device", "inf", "nan", "torch"}
_SCRIPT = '''"""{what}

{where}

attn_fuse wrote this script for options={{"repro": DIR}}. It runs the attention as written and under attn_fuse, and
exits with 1 where the results differ or attn_fuse fails.
Kept from the program: {kept}. All other numbers are random.

Written by {versions}.
"""

import sys
from math import inf, nan
from pathlib import Path

import torch
from torch import device
{imports}
from attn_fuse.backend import attn_fuse
from attn_fuse.graph.modes import Autocast, Mode
from attn_fuse.kernels.switches import Switches
from attn_fuse.picker.leaves import Leaf
from attn_fuse.repro.rerun import main

OPTIONS = {options!r}
MODE = {mode!r}
{load}LEAVES = [
{leaves}]


class Site(torch.nn.Module):
{forward}

if __name__ == "__main__":
    torch.set_default_dtype({dtype})
    sys.exit(main(Site(), LEAVES, attn_fuse, OPTIONS, MODE, {switches}, {precision!r}, dynamic={dynamic}))
'''
# The scripts that this process has written.
_written: set[Path] = set()


class NotWritten(Exception):
    """A script cannot hold the region."""


def writer(
    options: Options, graph: GraphModule, inputs: Sequence[Any]
) -> Callable[[Region, Mapping[Node, Any], frozenset[Node], Failure], str]:
    """A function that writes the script of a failure on a region of `graph`, and returns its path.

    inputs: those of the graph. The function takes the region, the known values of its leaves, the leaves that the
    program holds itself, and the failure. It raises NotWritten and OSError.
    """
    assert options.repro is not None
    folder = Path(options.repro)

    def write(region: Region, values: Mapping[Node, Any], held: frozenset[Node], failure: Failure) -> str:
        bare = [_bare(leaf, region, leaf in held) for leaf in region.leaves]
        code, kept = program_of(region, bare), _kept(options, failure.kernel)
        # Layers that fail alike share a script, even with other wrong numbers.
        said = re.sub(r"[\d.]+(e[+-]\d+)?", "", failure.what)
        key = repr((code.src, bare, region.mode, said, kept))
        where = locate(region.softmax)
        name = re.sub(r"\W+", "_", f"{Path(where.file).stem}_{where.line}").strip("_")
        path = folder / f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:8]}.py"
        if path in _written and path.exists():
            return str(path)
        values = {**values, **observed(region, values, graph, inputs)}
        leaves = {
            f"leaf_{n}": _filled(leaf, values.get(node), node in region.operands)
            for n, (node, leaf) in enumerate(zip(region.leaves, bare, strict=True))
        }
        folder.mkdir(parents=True, exist_ok=True)
        if saved := {name: leaf.contents for name, leaf in leaves.items() if _is_saved(leaf.contents)}:
            torch.save(saved, path.with_suffix(".pt"))
        write_whole(path, _script(region, code, leaves, failure, kept))
        _written.add(path)
        return str(path)

    return write


def _script(
    region: Region, code: PythonCode, leaves: Mapping[str, Leaf], failure: Failure, kept: Mapping[str, Any]
) -> str:
    texts = [f"{_text(name, leaf)},  # {name}" for name, leaf in leaves.items()]
    used = f"{code.src} {texts}"
    imports = {_import(n, x) for n, x in code.globals.items() if n not in _IMPORTED and re.search(rf"\b{n}\b", used)}
    place = next((leaf.device for leaf in leaves.values() if leaf.dtype is not None), torch.device("cpu"))
    sizes = [n for leaf in map(value_of, region.leaves) for n in (leaf, *getattr(leaf, "shape", ()))]
    versions = f"attn_fuse {version()}, torch {torch.__version__}, Python {platform.python_version()}"
    return _SCRIPT.format(
        what=_quoted(failure.what),
        where=_quoted(str(locate(region.softmax))),
        kept=", ".join(name for name, x in leaves.items() if x.dtype is None or x.contents is not None) or "nothing",
        versions=_quoted(f"{versions}, on {this_device(place)}"),
        imports=_lines(sorted(imports)),
        options=kept,
        mode=region.mode,
        load='SAVED = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)\n' if "SAVED[" in used else "",
        leaves=_lines(texts, 4),
        forward=_lines(re.sub(r"(?m);  (?:\w+ = )+None$", "", code.src).strip().splitlines(), 4),
        dtype=torch.get_default_dtype(),
        switches=switches.current(),
        precision=switches.float32_precision(place),
        dynamic=any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in sizes),
    )


def _lines(lines: Iterable[str], indent: int = 0) -> str:
    return textwrap.indent("".join(f"{line}\n" for line in lines), " " * indent)


def _import(name: str, value: Any) -> str:
    """The line that imports `value` as `name`. Raises NotWritten if no module has it."""
    if isinstance(value, types.ModuleType):
        return f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}"
    if value is type(None):
        return "from types import NoneType"
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    found: Any = __import__(module, fromlist=["*"]) if module not in (None, "__main__") else None
    if found is None or getattr(found, path, None) is not value:
        raise NotWritten(f"the region calls {path or name}, which a script cannot import")
    return f"from {module} import {path} as {name}"


# ---- what the region reads


def _bare(node: Node, region: Region, held: bool) -> Leaf:
    """The leaf without the contents of tensors. Raises NotWritten if a script cannot hold it."""
    leaf = leaf_of(node, region, held)
    if not isinstance(leaf.number, (int, float, bool, complex, str, type(None))):
        raise NotWritten(f"{node.name} is a {type(leaf.number).__name__}")
    if None in (*leaf.size, *leaf.stride):
        raise NotWritten(f"{node.name} has a size that is known only when the program runs")
    return leaf


def _filled(leaf: Leaf, value: Any, operand: bool) -> Leaf:
    """`leaf` with the elements of `value` if they matter, else with their spread."""
    if leaf.dtype is None:
        return leaf if value is None else replace(leaf, number=number_of(value))
    if type(value) not in (Tensor, torch.nn.Parameter):
        return leaf
    value = value.detach()
    if not _matters(value, operand, leaf.held and not leaf.learned):
        return replace(leaf, spread=_spread(value))
    # Clone a view, to leave out the rest of its memory.
    return replace(leaf, contents=(value if value.untyped_storage().nbytes() <= value.nbytes else value.clone()).cpu())


def _text(name: str, leaf: Leaf) -> str:
    """The code that makes `leaf`."""
    fields = [field for field in dataclasses.fields(leaf) if field.repr]
    words = [f"{f.name}={value!r}" for f in fields if (value := getattr(leaf, f.name)) != f.default]
    if _is_saved(leaf.contents):
        words.append(f"contents=SAVED[{name!r}]")
    elif leaf.contents is not None:
        words.append(f"contents=torch.tensor({leaf.contents.tolist()!r}, dtype={leaf.dtype})")
    return f"Leaf({', '.join(words)})"


def _is_saved(contents: Tensor | None) -> bool:
    """Whether the elements go into the file beside the script."""
    return contents is not None and (
        contents.numel() > _INLINE or not contents.is_contiguous() or contents.is_complex()
    )


def _matters(value: Tensor, operand: bool, constant: bool) -> bool:
    """Whether the result depends on the very numbers in `value`, not on their magnitude alone."""
    if constant or value.numel() == 1:
        return True
    if value.nbytes > _LARGEST or value.is_complex():
        return False
    return not value.is_floating_point() or (not operand and bool((~(value.abs() < _HIDES)).any()))


def _spread(value: Tensor) -> tuple[float, ...]:
    """The `Leaf.spread` of random numbers like those in `value`."""
    if value.numel() == 0 or value.is_complex():
        return ()
    if value.dtype == torch.bool:
        return (round(value.double().mean().item(), 4),)
    if not value.is_floating_point():
        return int(value.min()), int(value.max())
    known = value.double()
    known = known[known.isfinite()]
    return (float(f"{known.mean():.4g}"), float(f"{known.std(correction=0):.4g}")) if known.numel() else (0.0, 1.0)


# ---- the rest


def _kept(options: Options, kernel: str | None) -> dict[str, Any]:
    """The options that decide how a site is read and which kernel runs it. kernel: the kernel that failed, if any."""
    chosen = options.kernels if chosen_kernels() is None else chosen_kernels()
    kernels = chosen if kernel is None else (kernel,)
    known = options if isinstance(options.inner_backend, str) else replace(options, inner_backend="eager")
    inductor = {name: value for name, value in options.inductor.items() if _is_literal(value)}
    found = {name: getattr(known, name) for name in _OPTIONS}
    found |= {"kernels": kernels and list(kernels), "inductor": inductor}
    return {name: value for name, value in found.items() if value != getattr(Options(), name)}


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _quoted(text: str) -> str:
    """`text`, escaped for a triple-quoted string."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
