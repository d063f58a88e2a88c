"""Inputs of a usual length in place of the short ones that a search for inputs begins with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.running.declared import SHORT, USUAL
from attn_fuse.explain.running.try_inputs import Ran, Trial
from attn_fuse.graph.names import tensors_of


def longer(ran: Ran, trial: Trial) -> Ran:
    """A run on the inputs of `ran` with every axis of SHORT elements repeated to USUAL; `ran` where that does not run.

    A model that takes every fourth step of a sound would attend over one or two keys of a short one. Maps of features,
    of that many rows and columns, stay as they are.
    """
    shapes = [tensor.shape for tensor in tensors_of([*ran.inputs.args, ran.inputs.kwargs])]
    has_maps = any(len(shape) > 3 and shape.count(SHORT) > 1 for shape in shapes)
    # A batch of that size cannot be told from a length.
    if trial.sizes.asked or trial.sizes.batch == SHORT or has_maps or not any(SHORT in shape for shape in shapes):
        return ran
    slow = trial.slow
    again = trial.on(Inputs(_repeated(ran.inputs.args), _repeated(ran.inputs.kwargs)))
    trial.slow = slow
    return again or ran


def _repeated(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.repeat([USUAL // SHORT if size == SHORT else 1 for size in value.shape])
    if isinstance(value, dict):
        return {key: _repeated(item) for key, item in value.items()}
    return type(value)(map(_repeated, value)) if type(value) in (list, tuple) else value
