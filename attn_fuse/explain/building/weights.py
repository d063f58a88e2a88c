"""Models whose constructor loads weights: where the file is not there, or on the network, they stay random."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

AUTO = "transformers.models.auto.configuration_auto"
# Where libraries fetch weights: module, class, function, and whose it is.
LIBRARIES = (
    ("timm.models._builder", "", "load_pretrained", "timm"),
    ("transformers.modeling_utils", "PreTrainedModel", "from_pretrained", "transformers"),
    ("transformers.configuration_utils", "PretrainedConfig", "from_pretrained", "transformers"),
    (AUTO, "AutoConfig", "from_pretrained", "auto"),
    ("transformers.models.auto.auto_factory", "_BaseAutoModelClass", "from_pretrained", "auto"),
)


# What a note begins with that says which weights are not there.
RANDOM = "random weights in place of"
# How many calls above the one that loads the model is sought that the weights are for.
MOST_FRAMES = 12


class _Absent(dict[str, Any]):
    # What loading gives: empty or the weights that the model has, and the same below every other key, as checkpoints
    # keep weights below "model".

    def __missing__(self, key: str) -> _Absent:
        return self

    def __delitem__(self, key: str) -> None:
        pass

    def pop(self, key: str, default: Any = None) -> Any:
        return self if default is None else default


@contextlib.contextmanager
def random_weights(say: Callable[[str], object], named: bool = False) -> Iterator[None]:
    """Within the block weights that are not on this machine are not loaded; `say` is told of each source once.

    named: what is loaded then has the names and the random weights of the model around the call; else it is empty.
    """
    told: set[str] = set()
    load, download, into = torch.load, torch.hub.download_url_to_file, nn.Module.load_state_dict

    def absent(source: object) -> _Absent:
        name = str(source).rpartition("/")[2]
        if name not in told:
            told.add(name)
            say(f"{RANDOM} {name}")
        return _Absent(_weights_around() if named else {})

    def loads(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and not os.path.exists(file):
            return absent(os.fspath(file))
        return load(file, *args, **kwargs)

    def fills(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if told and isinstance(state_dict, dict) and (named or not state_dict):
            # As if all had been there: the caller may ask what was not.
            return type(into(self, {}, strict=False))([], [])
        return into(self, state_dict, *args, **kwargs)

    def of_timm(fill: Callable[..., Any]) -> Callable[..., Any]:
        def fills_or_not(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                return fill(model, *args, **kwargs)
            except OSError:  # neither here nor to be reached
                return absent(f"timm's of {type(model).__name__}")

        return fills_or_not

    def of_transformers(pretrained: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: Any, name: object, *args: Any, **kwargs: Any) -> Any:
            try:
                return pretrained.__func__(cls, name, *args, **kwargs)  # type: ignore[attr-defined]
            except OSError:
                config = getattr(cls, "config_class", None)
                if not isinstance(config, type) and issubclass(cls, nn.Module):
                    raise
                absent(f"{name}, the defaults of {cls.__name__}")
                made = cls(config()) if isinstance(config, type) else cls()
                return (made, {}) if kwargs.get("return_unused_kwargs") else made

        return classmethod(from_pretrained)  # type: ignore[return-value]

    def of_auto(pretrained: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: Any, name: object, *args: Any, **kwargs: Any) -> Any:
            try:
                return pretrained.__func__(cls, name, *args, **kwargs)  # type: ignore[attr-defined]
            except OSError:
                config = _config_named(str(name))
                if config is None:
                    raise
                absent(f"{name}, the defaults of {type(config).__name__}")
                return cls.from_config(config) if hasattr(cls, "from_config") else config

        return classmethod(from_pretrained)  # type: ignore[return-value]

    wraps = {"timm": of_timm, "transformers": of_transformers, "auto": of_auto}
    patched: list[tuple[Any, str, Any]] = []
    for module, holder, attribute, wrap in LIBRARIES:
        owner = sys.modules.get(module)
        owner = getattr(owner, holder, None) if holder else owner
        if owner is not None and hasattr(owner, attribute):
            patched.append((owner, attribute, vars(owner)[attribute]))
            setattr(owner, attribute, wraps[wrap](vars(owner)[attribute]))
    torch.load = loads  # type: ignore[assignment]
    # What it would have downloaded is then a file that is not there.
    torch.hub.download_url_to_file = lambda *args, **kwargs: None
    nn.Module.load_state_dict = fills  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.load, torch.hub.download_url_to_file = load, download
        nn.Module.load_state_dict = into  # type: ignore[method-assign]
        for owner, attribute, value in patched:
            setattr(owner, attribute, value)


def _weights_around() -> dict[str, Any]:
    # The weights of the model that the nearest of the calling functions has at hand.
    frame = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        for value in frame.f_locals.values():
            # A module that is being built may not have its parts yet.
            with contextlib.suppress(Exception):
                if isinstance(value, nn.Module) and (weights := value.state_dict()):
                    return {name: tensor.clone() for name, tensor in weights.items()}
        if frame.f_back is None:
            break
        frame = frame.f_back
    return {}


def _config_named(name: str) -> Any:
    # The default config of the kind of model whose name a checkpoint has, as bert-base-uncased is of a BERT; None where
    # it has none.
    kinds = getattr(sys.modules.get(AUTO), "CONFIG_MAPPING_NAMES", {})
    known = [kind for kind in kinds if kind.replace("_", "-") in name.lower().replace("_", "-")]
    cls = getattr(sys.modules.get("transformers"), kinds[max(known, key=len)], None) if known else None
    return cls() if cls is not None else None
