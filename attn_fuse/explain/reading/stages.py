"""A model without a forward, whose methods run one after the other: encode, decode, project."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

# The order in which such methods run, and the names of what they hand on.
ORDER = ("embed", "encode", "encoder", "decode", "decoder", "project", "generate_logits", "classify", "head")
OF_TRAINING = re.compile(r"loss|train|backward", re.I)
NO_STAGE = re.compile(
    rf"^_|{OF_TRAINING.pattern}|init|reset|load|save|config|optimi|^set_|^get_|^from_|^to_|step|log", re.I
)
HANDED_ON = re.compile(r"^x$|enc.*out|memory|context|hidden|latent|^z$|^h$|features", re.I)


def stages_of(cls: type) -> tuple[str, ...]:
    """The methods of `cls` that run one after the other in place of a forward, in order; none where it has one.

    One that is called `forward_...` stands for all; so does one that no other calls and that asks for the fewest
    arguments, as `finetune(tokens)`, in a class that has neither.
    """
    own = {
        n: v for base in reversed(cls.__mro__) if base.__module__ != nn.Module.__module__ for n, v in vars(base).items()
    }
    if "forward" in own:
        return ()
    methods = [name for name, value in own.items() if isinstance(value, types.FunctionType)]
    if named := [name for name in methods if name.startswith("forward")]:
        # Of several the one that infers: a loss needs targets.
        return (min(named, key=lambda name: bool(OF_TRAINING.search(name))),)
    found = tuple(name for name in ORDER if name in methods)
    return found if "encode" in found or "decode" in found else _outermost({name: own[name] for name in methods})


def _outermost(methods: Mapping[str, types.FunctionType]) -> tuple[str, ...]:
    # Of those that reach what the constructor made.
    made = set(methods["__init__"].__code__.co_names) if "__init__" in methods else set[str]()
    reached = {name: set(method.__code__.co_names) - {name} for name, method in methods.items()}
    called = set[str]().union(*reached.values())
    for _ in methods:
        reached = {name: found.union(*(reached.get(one, set()) for one in found)) for name, found in reached.items()}
    needs = {
        name: [p for p in inspect.signature(method).parameters.values() if p.default is p.empty][1:]
        for name, method in methods.items()
        if not NO_STAGE.search(name) and name not in called and made & reached[name]
    }
    several = sorted((name for name in needs if needs[name]), key=lambda name: len(needs[name]))
    return tuple(several[:1])


class Staged(nn.Module):
    """A model that has no forward, with one that runs its stages: see `staged`.

    plan: of each stage its name, the argument that takes what the stage before gave, and the others.
    """

    def __init__(self, model: nn.Module, plan: Sequence[tuple[str, str | None, tuple[str, ...]]]) -> None:
        super().__init__()
        self.model, self.plan = model, tuple(plan)
        self.names = tuple(dict.fromkeys(name for _, _, own in plan for name in own))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the last stage gives. The arguments are those of all stages, each once."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        out: Any = None
        for stage, handed, own in self.plan:
            values = {name: given[name] for name in own}
            if handed is not None:
                values[handed] = out
            out = getattr(self.model, stage)(**values)
        return out


def staged(model: nn.Module) -> nn.Module:
    """`model`, or where it has stages and no forward, a module of its class's name whose forward runs them.

    What one stage gives, the next takes in the argument that is named for it, as `encoder_output` or `x` is, or in the
    first that no stage before it has.
    """
    plan: list[tuple[str, str | None, tuple[str, ...]]] = []
    taken: dict[str, inspect.Parameter] = {}
    for number, stage in enumerate(stages_of(type(model))):
        parameters = inspect.signature(getattr(model, stage)).parameters.values()
        needs = {p.name: p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters if p.default is p.empty}
        handed = _handed_on(list(needs), taken) if number and needs else None
        needs.pop(handed or "", None)
        plan.append((stage, handed, tuple(needs)))
        taken |= needs
    if not plan:
        return model
    function = types.FunctionType(Staged.forward.__code__, Staged.forward.__globals__, "forward")
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([own, *taken.values()])
    cls = type(type(model).__name__, (Staged,), {"forward": function})
    function.__signature__ = signature  # type: ignore[attr-defined]
    made: nn.Module = cls(model, plan)
    return made


def _handed_on(names: list[str], taken: Mapping[str, object]) -> str:
    new = [name for name in names if name not in taken]
    return next((name for name in new if HANDED_ON.search(name)), (new or names)[0])
