"""Inputs that a model runs on: guessed from its parameters' names, annotations and layers, then tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.inputs import Inputs, in_python, that_can_be_made
from attn_fuse.explain.repairing.repairs import Failed
from attn_fuse.explain.running.declared import USUAL, Sizes
from attn_fuse.explain.running.longer import longer
from attn_fuse.explain.running.sequence_first import sequence_first
from attn_fuse.explain.running.try_inputs import Trial, first_of
from attn_fuse.graph.names import tensors_of

# Inputs of fewer numbers than these are a toy's.
FEW = 64


class NoInputs(ExplainError):
    """No inputs run on a model; `failed` are those that came furthest, by the error that they raised."""

    def __init__(self, message: str, failed: tuple[Failed[Inputs], ...]) -> None:
        super().__init__(message)
        self.failed = failed


def inputs_for(
    model: nn.Module,
    holders: Sequence[object] = (),
    targets: bool = False,
    length: int | None = None,
    batch: int = 1,
    spelled: Iterable[Inputs] = (),
) -> Inputs:
    """Inputs that `model` runs on, of the length and the picture size that it or one of `holders` declares.

    targets: whether to pass integer targets too, where forward has a parameter for them.
    length, batch: the sequence length, and the batch size, instead of what is declared.
    spelled: inputs that the repository spells out, tried before any guess where neither was given; those of few numbers
    come last, since they say little of a model's use, and so do those without the targets that are asked for.
    Raises NoInputs where no guess runs. One that runs for RUN_SECONDS without an error counts where no other runs.
    """
    trial = trial_of(model, holders, targets, length, batch)
    texts = [
        (inputs, trial.targets is not None or sum(t.numel() for t in tensors_of([*inputs.args, inputs.kwargs])) < FEW)
        for inputs in (spelled if length is None and batch == 1 else ())
    ]
    if (ran := first_of(trial.on(inputs) for inputs, is_small in texts if not is_small)) is not None:
        return ran.inputs
    ran = trial.of_any() or first_of(trial.on(inputs) for inputs, is_small in texts if is_small) or trial.of_repairs()
    for attempt in (trial.with_set_up, trial.with_optional):
        ran = ran or ((trial.of_any() or trial.of_repairs()) if attempt() else None)
    if ran is not None:
        return sequence_first(longer(ran, trial), trial).inputs
    if trial.slow is not None:
        return trial.slow
    tried = f"with {trial.failures[0]}" if trial.failures else "it has no embedding, convolution or linear layer"
    raise NoInputs(
        f"no inputs found that {type(model).__name__} runs on ({tried}); "
        f"pass them with --inputs, as in --inputs '{_example(trial)}'",
        tuple(trial.raised.values()),
    )


def trial_of(model: nn.Module, holders: Sequence[object], targets: bool, length: int | None, batch: int) -> Trial:
    """What runs `model` on inputs; the arguments are those of `inputs_for`."""
    return Trial(model, targets, Sizes.of(model, holders, length, batch))


def _example(trial: Trial) -> str:
    # Inputs in Python for the parameters of forward, as their uses and names say: the user has to change shapes only.
    # What an error said of one argument is no width of the others.
    trial.wanted.clear()
    written: dict[str, str] = {}
    like: Tensor | None = None
    for parameter in trial.required:
        by_use = next(that_can_be_made(trial.used(parameter.name, like, USUAL)), None)
        usual = torch.zeros(1, USUAL, dtype=torch.long) if trial.embeddings else torch.zeros(1, USUAL, 512)
        value = by_use if by_use is not None else usual if like is None else like
        like = like if like is not None else next(iter(tensors_of(value)), None)
        written[parameter.name] = in_python(value, trial.vocabulary)
    if not written:
        return "torch.randn(1, 64, 512)"
    return next(iter(written.values())) if len(written) == 1 else f"dict({', '.join(map('='.join, written.items()))})"
