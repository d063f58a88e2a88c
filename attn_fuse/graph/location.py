"""Location: where in the user's program a node of Dynamo's graph comes from."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path

import torch
from torch.fx import Node

from attn_fuse.report import Location

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n(?P<code>(?!  File)[^\n]*))?')


def locate(node: Node) -> Location:
    """The innermost line of user code that made `node`, and the module whose forward holds the line.

    Where no user code called it, as in a module of torch compiled by itself: the forward of the innermost module.
    """
    found = in_stack(node.stack_trace or "", str(node), _module_path(node))
    return found if found.line else _in_forward(node) or found


def in_stack(stack: str, otherwise: str, module: str = "") -> Location:
    """The innermost line in `stack`, a traceback's text, outside torch if one is. otherwise: in place of no code."""
    # attn_fuse.explain calls the model from a frame of its own.
    frames = [f for f in _FRAME.finditer(stack) if not f["file"].startswith(_OURS)]
    own = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not own:
        return Location("<unknown>", 0, otherwise, module)
    frame = own[-1]
    return Location(frame["file"], int(frame["line"]), (frame["code"] or otherwise).strip(), module)


def _in_forward(node: Node) -> Location | None:
    for _, kind in reversed((node.meta.get("nn_module_stack") or {}).values()):
        # torch.export records the name of a class alone.
        forward = getattr(kind, "forward", None)
        if forward is None:
            continue
        with contextlib.suppress(TypeError, OSError):  # a class without a source
            _, first = inspect.getsourcelines(forward)
            return Location(inspect.getfile(kind), first, f"{kind.__name__}.forward", _module_path(node))
    return None


def _module_path(node: Node) -> str:
    """The dotted path of the innermost module outside `torch.nn`, or else inside it; "" without a module."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    own = [(path, kind) for path, kind in stack if not _is_torchs(kind)] or stack
    if not own:
        return ""
    path = re.sub(r"^[LG](?=\[)", "", str(own[-1][0]))
    path = re.sub(r"\._modules(?=\[)|\.__dict__\['_modules'\]", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    names = [name for name in path.split(".") if name]
    return ".".join(names[1:] if names[:1] == ["self"] else names)


def _is_torchs(kind: object) -> bool:
    name = kind if isinstance(kind, str) else getattr(kind, "__module__", "")
    return str(name).startswith("torch.nn")
