"""What stands for the modules and the values of a missing package: anything while files are imported, then errors."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.torch_layers import of_one_process, same_function, same_layer

# What packages are called on the package index, where that is not what they are imported as.
ON_INDEX = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
    "torch_scatter": "torch-scatter",
    "ml_collections": "ml-collections",
    "x_transformers": "x-transformers",
    "rotary_embedding_torch": "rotary-embedding-torch",
}


class Absent(Protocol):
    """What is known of the packages that are missing: see `stand_ins.Finder`."""

    names: list[str]
    broken: dict[str, str]
    permissive: bool

    @property
    def say(self) -> Callable[[str], object]:
        """Is told what torch's own layers stand in for."""

    @property
    def is_users(self) -> Callable[[str], bool]:
        """Whether a file is the user's."""


class MissingPackage(ExplainError):
    """The model uses a package that is not installed."""


class MissingAttribute(MissingPackage, AttributeError):
    """An attribute that a missing package would bring; an AttributeError, so that `getattr` may have a default."""


class StandInModule(types.ModuleType):
    """A module of a missing package, with every attribute."""

    def __init__(self, name: str, finder: Absent) -> None:
        super().__init__(name)
        self._finder = finder
        self.__path__: list[str] = []
        self.__all__: list[str] = []
        # As new as any check asks for.
        self.__version__ = "999.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}", self._finder)


class StandIn:
    """What stands for a value of a missing package."""

    def __init__(self, name: str, finder: Absent) -> None:
        self._name, self._finder = name, finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}", self._finder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._finder.permissive:
            return self._in_torch(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType, staticmethod, classmethod)):
            return args[0]
        return StandIn(self._name, self._finder)

    def __getitem__(self, key: object) -> Any:
        self._use()
        return StandIn(self._name, self._finder)

    def __or__(self, other: object) -> Any:
        return StandIn(self._name, self._finder)

    __ror__ = __or__

    def _combined(self, *others: object) -> Any:
        self._use()
        return StandIn(self._name, self._finder)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _combined
    __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __mod__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _combined
    )

    def _in_torch(self, *args: Any, **kwargs: Any) -> Any:
        # What torch has in place of a missing layer, function, or question on processes; while a model is built, else
        # a value that the model may hold.
        name = self._name.rpartition(".")[2]
        layer, function, answer = same_layer(name), same_function(name), of_one_process(name)
        if function is not None:
            self._finder.say(_said(self._name, "torch's" if name.endswith("_") else "a tuple of one number"))
            return function(*args, **kwargs)
        if layer is not None:
            with contextlib.suppress(TypeError):
                made = layer(*args, **kwargs)
                self._finder.say(_said(self._name, f"nn.{layer.__name__}"))
                return made
        elif answer is not None:
            self._finder.say(_said(self._name, f"{answer}, for one process"))
            return answer
        if _held and layer is None:
            _held[-1].append(self)
            return StandIn(self._name, self._finder)
        return _refuse(self)

    def __eq__(self, other: object) -> bool:
        # As in `type(x) == ListConfig`: a class that is there is none of a missing package.
        if not isinstance(other, type):
            self._use()
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        name = self._name.rpartition(".")[2]
        # A plain Module may be that of another framework, as flax's.
        layer = same_layer(name) or (_Module if re.fullmatch(r"\w+Module", name) else None)
        if layer is None:
            return (_base(self._name, self),)
        self._finder.say(_said(self._name, "nn.Module" if layer is _Module else f"nn.{layer.__name__}"))
        return (layer,)

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __subclasscheck__(self, value: type) -> bool:
        return False

    def __bool__(self) -> bool:
        self._use()
        return True

    def __iter__(self) -> Iterator[Any]:
        self._use()
        return iter(())

    def __len__(self) -> int:
        self._use()
        return 0

    def __index__(self) -> int:
        self._use()
        return 1

    def __enter__(self) -> Any:
        self._use()
        return self

    def __exit__(self, *problem: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<{self._name}, not installed>"

    def _use(self) -> None:
        if not self._finder.permissive:
            _refuse(self)


# What the constructors that run, one within another, called of missing packages.
_held: list[list[StandIn]] = []


@contextlib.contextmanager
def held_by_models(say: Callable[[str], object]) -> Iterator[None]:
    """Within the block, which builds a model, what a missing package gives may be held, as a tokenizer is that the
    model's forward never uses; `say` is told of it.

    To use it is an error still. Raises MissingPackage in place of an error that is about such a value.
    """
    held: list[StandIn] = []
    _held.append(held)
    try:
        yield
    except MissingPackage:
        raise
    except Exception as error:
        if held and StandIn.__name__ in str(error):
            _refuse(held[0])
        raise
    finally:
        _held.pop()
    for name in dict.fromkeys(one._name for one in held):
        say(f"held and never used, so that it may be missing: {name}")


def refuse(cls: type) -> None:
    """Raise MissingPackage where a class of a missing package stands in place of `cls`."""
    stand_in = getattr(cls, "stands_for", None)
    if isinstance(stand_in, StandIn):
        _refuse(stand_in)


def _said(name: str, in_place: str) -> str:
    package, _, rest = name.partition(".")
    return f"in place of {package}'s {rest.rpartition('.')[2]}: {in_place}"


def _refuse(stand_in: StandIn, attribute: str = "", kind: type[MissingPackage] = MissingPackage) -> NoReturn:
    name = stand_in._name + attribute
    package = name.partition(".")[0]
    on_index = ON_INDEX.get(package, package)
    raised = stand_in._finder.broken.get(package)
    if raised is not None:
        raise kind(
            f"the model uses {name}, and importing {package} raises {raised}; install a {on_index} that fits "
            f"torch {torch.__version__}"
        )
    if package not in stand_in._finder.names and not stand_in._finder.is_users(_file_of(package)):
        raise kind(f"the model uses {name}, which {package} no longer has; install a {on_index} that has it")
    raise kind(f"the model uses {name}, and {package} is not installed; install {on_index}")


def _file_of(package: str) -> str:
    module = sys.modules.get(package)
    return str(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), ""))


class _Module(torch.nn.Module):
    # nn.Module in place of a framework's, as BaseModule or LightningModule, which adds to it what training needs.

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()


def _base(name: str, stand_in: StandIn) -> type:
    # The class that a class of the file inherits in place of the missing one.
    def made(cls: type, *args: object, **kwargs: object) -> object:
        # A dataclass has its own constructor and entries.
        if dataclasses.is_dataclass(cls):
            return object.__new__(cls)
        _refuse(stand_in)

    def absent(self: object, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        _refuse(stand_in, f".{attribute}", MissingAttribute)

    return type(name.rpartition(".")[2], (), {"__new__": made, "__getattr__": absent, "stands_for": stand_in})
