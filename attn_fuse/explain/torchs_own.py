"""Torch's own code that Dynamo leaves as written, since a graph breaks in it."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary

import torch
from torch.fx import GraphModule

from attn_fuse.report import Location
from attn_fuse.torch_internals import frames_of_break

# With the separator: torchvision's files are none of torch's.
_TORCH, _OURS = (f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
# What stands between the call of a module and its forward.
_CALLS = ("_wrapped_call_impl", "_call_impl")
# The function of torch that looks into a mask, and what tells torch what it would see.
_LOOKS_INTO_A_MASK = "_detect_is_causal_mask"
_SAY_IT = (
    "Pass is_causal to it (of a decoder tgt_is_causal, of nn.Transformer src_is_causal and tgt_is_causal): True where "
    "the mask is causal, else False."
)
_MOVE_IT = "Call it without what breaks there."


def torch_code_left(graph: GraphModule) -> Iterator[str]:
    """A sentence on the module of torch that the break at the end of `graph` leaves as written, if there is one.

    Dynamo goes on after a break in the outermost function, and compiles what that calls by itself: user code, but none
    of torch's files.
    """
    frames = [frame for frame in frames_of_break(graph) if frame.name not in _CALLS]
    own = [number for number, frame in enumerate(frames) if not frame.filename.startswith(_TORCH)]
    called = frames[own[-1] + 1 :] if own else []
    # Of torch's functions modules alone hold attention.
    if not called or called[0].name != "forward":
        return
    by, at = frames[own[-1]], called[-1]
    caller = "" if by.filename.startswith(_OURS) else f", which {Location(by.filename, by.lineno or 0, '', '')} calls,"
    yield (
        f"torch.compile leaves torch's {_qualified(called[0])}{caller} as written, with any attention in it: the graph "
        f"breaks at {Path(at.filename).relative_to(Path(_TORCH).parent)}:{at.lineno}, and torch's own code is not "
        f"compiled by itself. {_SAY_IT if at.name == _LOOKS_INTO_A_MASK else _MOVE_IT}"
    )


def _qualified(frame: FrameSummary) -> str:
    # The name of a frame's function, with its class.
    line = frame.lineno or 0
    try:
        tree = ast.parse(Path(frame.filename).read_text())
    except (OSError, SyntaxError, ValueError):
        return frame.name
    classes = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return ".".join((*classes, frame.name))
