"""Location: where in the user's program a node of Dynamo's graph comes from."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.fx import Node

from attn_fuse.report import Location

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
# A traceback marks the expression with ^ and ~ from its column on; it has no marks where the expression is the line.
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)'
    r"(?:\n {4}(?P<code>(?!  File)[^\n]*)(?:\n {4}(?P<marks>[ ~]*\^[ ^~]*)(?=\n|$))?)?"
)


def locate(node: Node) -> Location:
    """The innermost line of user code that made `node`, and the module whose forward holds the line.

    Without user code, such as in a torch module compiled by itself, the forward of the innermost module.
    """
    found = in_stack(node.stack_trace or "", str(node), _module_path(node))
    return found if found.line else _in_forward(node) or found


def in_stack(stack: str, otherwise: str, module: str = "") -> Location:
    """The innermost line in the traceback `stack`, outside torch if possible. otherwise: stands in for missing code."""
    frames = [*_frames(stack)]
    own = user_frames(stack) or frames
    if not own:
        return Location("<unknown>", 0, otherwise, module)
    frame = own[-1]
    return Location(frame["file"], int(frame["line"]), (frame["code"] or otherwise).strip(), module)


def user_frames(stack: str) -> list[re.Match[str]]:
    """The levels of the traceback `stack` outside torch, outermost first: file, line, function, code and marks."""
    return [frame for frame in _frames(stack) if not frame["file"].startswith(_TORCH)]


def _frames(stack: str) -> Iterator[re.Match[str]]:
    # attn_fuse.explain calls the model from its own frame.
    return (frame for frame in _FRAME.finditer(stack) if not frame["file"].startswith(_OURS))


def _in_forward(node: Node) -> Location | None:
    for _, kind in reversed((node.meta.get("nn_module_stack") or {}).values()):
        # torch.export records only the name of a class.
        forward = getattr(kind, "forward", None)
        if forward is None:
            continue
        with contextlib.suppress(TypeError, OSError):  # a class without a source
            _, first = inspect.getsourcelines(forward)
            return Location(inspect.getfile(kind), first, f"{kind.__name__}.forward", _module_path(node))
    return None


def _module_path(node: Node) -> str:
    """The dotted path of the innermost module, outside `torch.nn` if possible; "" without a module."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    own = [(path, kind) for path, kind in stack if not _is_torchs(kind)] or stack
    if not own:
        return ""
    path = re.sub(r"^[LG](?=\[)", "", str(own[-1][0]))
    path = re.sub(r"\._modules(?=\[)|\.__dict__\['_modules'\]", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    path = ".".join(name for name in path.split(".") if name)
    # A decorator often passes the model on as args[0].
    return re.sub(r"^(self|args\.0)(\.|$)", "", path)


def _is_torchs(kind: object) -> bool:
    name = kind if isinstance(kind, str) else getattr(kind, "__module__", "")
    return str(name).startswith("torch.nn")
