"""Location: where in the user's program a node of Dynamo's graph comes from."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

from attn_fuse.report import Location

_TORCH = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n(?P<code>(?!  File)[^\n]*))?')


def locate(node: Node) -> Location:
    """The innermost line of user code that made `node`, and the module whose forward holds the line."""
    return in_stack(node.stack_trace or "", str(node), _module_path(node))


def in_stack(stack: str, otherwise: str, module: str = "") -> Location:
    """The innermost line of user code in `stack`, a traceback's text. otherwise: stands for code that is not there."""
    frames = list(_FRAME.finditer(stack))
    own = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not own:
        return Location("<unknown>", 0, otherwise, module)
    frame = own[-1]
    return Location(frame["file"], int(frame["line"]), (frame["code"] or otherwise).strip(), module)


def _module_path(node: Node) -> str:
    """The dotted path of the innermost module outside `torch.nn`, or else inside it; "" without a module."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    own = [(path, kind) for path, kind in stack if not _is_torchs(kind)] or stack
    if not own:
        return ""
    path = str(own[-1][0])
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path.replace("L['self']", "", 1))
    return path.replace("__", ".").strip(".")


def _is_torchs(kind: object) -> bool:
    name = kind if isinstance(kind, str) else getattr(kind, "__module__", "")
    return str(name).startswith("torch.nn")
