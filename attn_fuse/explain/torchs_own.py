"""Code of torch that torch.compile leaves as written because a graph breaks in it."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary

import torch
from torch.fx import GraphModule

from attn_fuse.report import Location
from attn_fuse.torch_internals import frames_of_break

# With the separator, so that torchvision is not torch.
_TORCH, _OURS = (f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
# Frames between the call of a module and its forward.
_CALLS = ("_wrapped_call_impl", "_call_impl")
# torch's function that reads the values of a mask, and how to avoid it.
_LOOKS_INTO_A_MASK = "_detect_is_causal_mask"
_SAY_IT = (
    "Pass is_causal to it (of a decoder tgt_is_causal, of nn.Transformer src_is_causal and tgt_is_causal): True where "
    "the mask is causal, else False."
)
_MOVE_IT = "Call it without what breaks there."


def torch_code_left(graph: GraphModule) -> Iterator[str]:
    """A sentence on the module of torch that the break at the end of `graph` leaves as written, if there is one.

    After a break, Dynamo compiles the functions that the outermost one calls, but none in torch's files.
    """
    frames = [frame for frame in frames_of_break(graph) if frame.name not in _CALLS]
    own = [number for number, frame in enumerate(frames) if not frame.filename.startswith(_TORCH)]
    called = frames[own[-1] + 1 :] if own else []
    # In torch, only modules hold attention.
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
    # The name of a frame's method, with its class.
    above = "".join(linecache.getlines(frame.filename)[: frame.lineno])
    return ".".join((*re.findall(r"^class (\w+)", above, re.M)[-1:], frame.name))
