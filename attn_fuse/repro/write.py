"""Write: the script of one failure, for ``options={"repro": DIR}``.

The script holds the region as a module, stand-ins for what the region reads, and the options. `rerun` is what it calls.
Query, key, value, weights and ordinary floats get random numbers of the same mean and spread; masks, positions and
other integers, constants and a few single numbers are kept, since what is computed depends on them.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from attn_fuse.graph.alone import alone, number_of
from attn_fuse.graph.location import locate
from attn_fuse.graph.modes import autocast_of
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import Region
from attn_fuse.graph.replay import replay
from attn_fuse.kernels import switches
from attn_fuse.options import Options, chosen_kernels
from attn_fuse.picker.evidence import write_whole
from attn_fuse.picker.timing import this_device
from attn_fuse.report import Failure, log, version

# Max elements of a tensor that is written into the script; a file beside it holds what is larger.
_INLINE = 32
# Max bytes of integers and masks whose contents are kept.
_LARGEST = 1 << 24
# Numbers beyond this hide keys: a mask, and no bias.
_HIDES = 1e3
_OPTIONS = ("inner_backend", "kernels", "pick", "try_unmeasured", "mode", "inductor")
_IMPORTS = {"inf": "from math import inf", "nan": "from math import nan", "device": "from torch import device"}
_SCRIPT = '''"""{what}

{where}

attn_fuse wrote this script for options={{"repro": DIR}}. It runs the attention as written and under attn_fuse, and
exits with 1 where the results differ or attn_fuse fails.
Kept from the program: {kept}. All other numbers are random.

Written by {versions}.
"""

import sys
from pathlib import Path

import torch
{imports}
from attn_fuse.backend import attn_fuse
from attn_fuse.repro.rerun import like, main

OPTIONS = {options!r}
{load}

class Site(torch.nn.Module):
    def __init__(self):
        super().__init__()
{constructor}
{forward}

def inputs():
    return [
{inputs}    ]


if __name__ == "__main__":
{settings}    sys.exit(main({arguments}))
'''
# The scripts that this process has written.
_written: set[Path] = set()


class NotWritten(Exception):
    """No script can hold the region."""


def writer(
    options: Options, graph: GraphModule, inputs: Sequence[Any]
) -> Callable[[Region, Mapping[Node, Any], frozenset[Node], Failure], str]:
    """A function that writes the script of a failure on a region of `graph`, and gives its path.

    inputs: those of the graph. The function's further arguments are the values of leaves at hand, and the leaves that
    the program holds itself. It raises NotWritten, and OSError.
    """
    assert options.repro is not None
    folder = Path(options.repro)

    def write(region: Region, values: Mapping[Node, Any], held: frozenset[Node], failure: Failure) -> str:
        with autocast_of(region.mode):
            program, _ = alone(region)
        kept = _kept(options, failure.kernel)
        # Layers that fail alike share a script; the numbers in which a result is wrong differ from one to the next.
        said = re.sub(r"[\d.]+(e[+-]\d+)?", "", failure.what)
        key = repr((program.code, [*map(_kind, region.leaves)], region.mode, said, kept))
        where = locate(region.softmax)
        name = re.sub(r"\W+", "_", f"{Path(where.file).stem}_{where.line}").strip("_")
        path = folder / f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:8]}.py"
        if path in _written and path.exists():
            return str(path)
        values = {**values, **_observed(region, values, graph, inputs)}
        leaves = [_leaf(n, leaf, region, values, leaf in held) for n, leaf in enumerate(region.leaves)]
        text = _script(region, program, leaves, failure, kept)
        folder.mkdir(parents=True, exist_ok=True)
        if saved := {leaf.name: leaf.saved for leaf in leaves if leaf.saved is not None}:
            torch.save(saved, path.with_suffix(".pt"))
        write_whole(path, text)
        _written.add(path)
        return str(path)

    return write


def _kind(leaf: Node) -> Any:
    value = value_of(leaf)
    if not isinstance(value, Tensor):
        return str(value)
    return str(value.size()), str(value.stride()), value.dtype, value.device, value.requires_grad


def _script(
    region: Region, program: GraphModule, leaves: Sequence[_Leaf], failure: Failure, kept: Mapping[str, Any]
) -> str:
    code, imports = _program(program, leaves)
    device = next((value.device for leaf in region.leaves if isinstance(value := value_of(leaf), Tensor)), None)
    arguments = ["Site(), inputs(), attn_fuse, OPTIONS", f"grad={region.mode.grad}"]
    arguments += ["dynamic=True"] if any(leaf.symbolic for leaf in leaves) else []
    if casts := {cast.device: cast.dtype for cast in region.mode.autocast if cast.enabled}:
        arguments.append(f"autocast={casts}")
    saved = any(leaf.saved is not None for leaf in leaves)
    return _SCRIPT.format(
        what=_quoted(failure.what),
        where=_quoted(str(locate(region.softmax))),
        kept=", ".join(leaf.name for leaf in leaves if leaf.kept) or "nothing",
        versions=_quoted(_versions(device)),
        imports=_lines(imports),
        options=kept,
        load='SAVED = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)\n' if saved else "",
        constructor=_lines((f"self.{leaf.holder}({leaf.name!r}, {leaf.text})" for leaf in leaves if leaf.holder), 8),
        forward=_lines(code.strip().splitlines(), 4),
        inputs=_lines((f"{leaf.text},  # {leaf.name}" for leaf in leaves if not leaf.holder), 8),
        settings=_lines(_settings(device), 4),
        arguments=", ".join(arguments),
    )


def _lines(lines: Iterable[str], indent: int = 0) -> str:
    return "".join(f"{' ' * indent}{line}".rstrip() + "\n" for line in lines)


def _program(program: GraphModule, leaves: Sequence[_Leaf]) -> tuple[str, list[str]]:
    """The module's forward, and the imports that it needs."""
    for leaf, node in zip(leaves, program.graph.find_nodes(op="placeholder"), strict=True):
        if leaf.holder:
            program.register_buffer(leaf.name, None)
            with program.graph.inserting_before(node):
                attribute = program.graph.create_node("get_attr", leaf.name)
            node.replace_all_uses_with(attribute)
            program.graph.erase_node(node)
    code = program.graph.python_code("self")
    used = f"{code.src} {[leaf.text for leaf in leaves]}"
    imports = [
        _import(name, value) for name, value in code.globals.items() if re.search(rf"\b{re.escape(name)}\b", used)
    ]
    return re.sub(r"(?m);  (?:\w+ = )+None$", "", code.src), sorted({*imports} - {"import torch"})


def _import(name: str, value: Any) -> str:
    """The line that imports `value` as `name`. Raises NotWritten where no module has it."""
    if name in _IMPORTS:
        return _IMPORTS[name]
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


@dataclass(frozen=True)
class _Leaf:
    """One leaf of the region in the script.

    text: the expression that makes it. holder: the module's method that registers it; "" for an argument.
    kept: whether it has the program's own numbers. saved: those that are in the file beside the script.
    symbolic: whether its sizes, or its number, may change from call to call.
    """

    name: str
    text: str
    holder: str = ""
    kept: bool = False
    saved: Tensor | None = None
    symbolic: bool = False


def _leaf(number: int, leaf: Node, region: Region, values: Mapping[Node, Any], held: bool) -> _Leaf:
    like = value_of(leaf)
    name = f"{'held' if held and isinstance(like, Tensor) else 'leaf'}_{number}"
    if not isinstance(like, Tensor):
        plain = number_of(values.get(leaf, like))
        if not isinstance(plain, (int, float, bool, complex, str, type(None))):
            raise NotWritten(f"{leaf.name} is a {type(plain).__name__}")
        return _Leaf(name, repr(plain), kept=True, symbolic=isinstance(like, (torch.SymInt, torch.SymFloat)))
    value = values.get(leaf)
    value = value.detach() if isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter) else None
    size, stride = ([number_of(n) for n in ns] for ns in (like.size(), like.stride()))
    if None in (*size, *stride):
        raise NotWritten(f"{leaf.name} has a size that is known only when the program runs")
    learned, where = isinstance(like, torch.nn.Parameter), repr(str(like.device))
    holder = "register_parameter" if learned and held else "register_buffer" if held else ""
    text, saved = f"like({size}, {stride}, {like.dtype}, {where}{_range(value)})", None
    kept = value is not None and _matters(value, leaf in region.operands, held and not learned)
    if value is not None and kept:
        if value.numel() <= _INLINE and value.is_contiguous() and not value.is_complex():
            text = f"torch.tensor({value.tolist()!r}, dtype={like.dtype}, device={where})"
        else:
            # Without the rest of a larger memory that it is a view of.
            saved = (value if value.untyped_storage().nbytes() <= value.nbytes else value.clone()).cpu()
            text = f"SAVED[{name!r}].to({where})"
    if holder == "register_parameter":
        text = f"torch.nn.Parameter({text}, requires_grad={like.requires_grad})"
    elif region.mode.grad and like.requires_grad and leaf not in region.detached:
        text += ".requires_grad_()"
    symbolic = any(isinstance(n, torch.SymInt) for n in (*like.size(), *like.stride()))
    return _Leaf(name, text, holder, kept, saved, symbolic)


def _matters(value: Tensor, operand: bool, constant: bool) -> bool:
    """Whether what is computed depends on the numbers in `value`, and not on their size alone."""
    if constant or value.numel() == 1:
        return True
    if value.nbytes > _LARGEST or value.is_complex():
        return False
    return not value.is_floating_point() or (not operand and bool((~(value.abs() < _HIDES)).any()))


def _range(value: Tensor | None) -> str:
    """The arguments of `like` that give numbers as those of `value`."""
    if value is None or value.numel() == 0 or value.is_complex():
        return ""
    if value.dtype == torch.bool:
        return f", true={value.double().mean().item():.4g}"
    if not value.is_floating_point():
        return f", low={int(value.min())}, high={int(value.max())}"
    known = value.double()
    known = known[known.isfinite()]
    if not known.numel():
        return ""
    return f", mean={known.mean().item():.4g}, std={known.std(correction=0).item():.4g}"


def _observed(
    region: Region, known: Mapping[Node, Any], graph: GraphModule, inputs: Sequence[Any]
) -> Mapping[Node, Tensor]:
    """The tensors that `graph` computes from `inputs` for the leaves that are not `known`; {} where it cannot run.

    Only what they depend on is run, on copies of the inputs, without gradients and autocast.
    """
    lacking = [leaf for leaf in region.leaves if leaf not in known and isinstance(value_of(leaf), Tensor)]
    tops = {leaf: top for leaf in lacking if (top := region.scope.top(leaf)) is not None and top.graph is graph.graph}
    if not tops:
        return {}
    try:
        part, copies = Graph(), dict[Node, Node]()
        part.graph_copy(graph.graph, copies)
        part.output(tuple(copies[top] for top in tops.values()))
        part.eliminate_dead_code()
        with torch.no_grad():
            found = replay(GraphModule(graph, part), inputs, {}).tensors
    except Exception:  # the script can do without
        log.info("what an attention reads could not be observed", exc_info=True)
        return {}
    return {leaf: value for n, leaf in enumerate(tops) if (value := found.get(f"output {n}")) is not None}


# ---- the rest


def _kept(options: Options, kernel: str | None) -> dict[str, Any]:
    """The options of the script: those that bear on how a site is read and on which kernel it runs.

    kernel: the one that failed, which the script asks for.
    """
    kernels = (kernel,) if kernel is not None else options.kernels if chosen_kernels() is None else chosen_kernels()
    found = {name: getattr(options, name) for name in _OPTIONS}
    found["kernels"] = None if kernels is None else list(kernels)
    found["inductor"] = {name: value for name, value in options.inductor.items() if _is_literal(value)}
    if not isinstance(options.inner_backend, str):
        found["inner_backend"] = "eager"
    usual = Options()
    return {name: value for name, value in found.items() if value != getattr(usual, name)}


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _settings(device: torch.device | None) -> Iterator[str]:
    """Lines that set what torch was set to, where that is not the usual."""
    if (dtype := torch.get_default_dtype()) != torch.float32:
        yield f"torch.set_default_dtype({dtype})"
    if device is not None and (precision := switches.float32_precision(device)) != "ieee":
        backend = "cuda" if device.type == "cuda" else "mkldnn"
        yield f"torch.backends.{backend}.matmul.fp32_precision = {precision!r}"
    now = switches.current()
    names = {"flash": "flash", "efficient": "mem_efficient", "math": "math", "cudnn": "cudnn"}
    yield from (f"torch.backends.cuda.enable_{name}_sdp(False)" for key, name in names.items() if not getattr(now, key))
    if now.deterministic:
        yield f"torch.use_deterministic_algorithms(True, warn_only={now.warns_only})"


def _versions(device: torch.device | None) -> str:
    where = f", on {this_device(device)}" if device is not None else ""
    return f"attn_fuse {version()}, torch {torch.__version__}, Python {platform.python_version()}{where}"


def _quoted(text: str) -> str:
    """`text` within a triple-quoted string."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
