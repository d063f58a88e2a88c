"""Inputs whose first axis is the sequence, for a model that otherwise attends over the batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.running.try_inputs import Ran, Trial
from attn_fuse.graph.names import tensors_of
from attn_fuse.torch_internals import TorchDispatchMode

# Of a picture and a volume the first axis is the batch.
_RANKS = (2, 3)


def sequence_first(ran: Ran, trial: Trial) -> Ran:
    """A run on the inputs of `ran` with the first two axes of each tensor exchanged, where that makes an attention over
    the batch one over the sequence, as in `nn.Transformer` without `batch_first`; else `ran`.
    """
    first = next(iter(tensors_of([*ran.inputs.args, ran.inputs.kwargs])), None)
    batch = trial.sizes.batch
    if first is None or first.dim() not in _RANKS or first.shape[0] != batch or first.shape[1] == batch:
        return ran
    slow = trial.slow
    _, keys = _watched(trial, ran.inputs)
    if batch in keys:
        again, keys = _watched(trial, Inputs(_exchanged(ran.inputs.args), _exchanged(ran.inputs.kwargs)))
        ran = again if again is not None and batch not in keys else ran
    trial.slow = slow
    return ran


def _exchanged(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.transpose(0, 1).contiguous() if value.dim() in _RANKS else value
    if isinstance(value, dict):
        return {key: _exchanged(item) for key, item in value.items()}
    return type(value)(map(_exchanged, value)) if type(value) in (list, tuple) else value


def _watched(trial: Trial, inputs: Inputs) -> tuple[Ran | None, set[int]]:
    # A run, and the numbers of keys that it attends over.
    with _Keys() as seen:
        return trial.on(inputs), seen.counts


class _Keys(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_softmax", "_safe_softmax") and args[0].dim() > 2:
            self.counts.add(args[0].shape[args[1]])
        elif name.startswith("_scaled_dot_product"):
            self.counts.add(args[1].shape[-2])
        elif name == "_transformer_encoder_layer_fwd":
            self.counts.add(args[0].shape[1])
        return func(*args, **(kwargs or {}))
