"""Arguments of a constructor and entries of its configs, changed as an error asks that it raised on some."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attn_fuse.explain.building.sizes import value_for
from attn_fuse.explain.repairing.asked import Asked

# How many names of a line that failed are taken together.
MOST_NEAR = 4
# How long a sequence may become.
LONGEST = 64
# How deep configs are within one another.
DEEPEST = 3
# What may be a count of something, where None is none.
COUNT = 8
# Of what no name says anything.
GUESSES = (8, 1.0)
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Arguments:
    """What a constructor is called with in place of what is made up for it.

    given: arguments by name. entries: those of its configs. guess: which guess an argument gets of which no name says
    anything; None for none.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, Any] = field(default_factory=dict)
    guess: int | None = None

    @property
    def changed(self) -> dict[str, Any]:
        """All that is changed, by name."""
        return {**self.given, **self.entries}

    def with_entries(self, configs: Sequence[object]) -> None:
        """Write the entries into those of `configs` that have them."""
        for config in configs:
            for name, value in self.entries.items():
                if isinstance(config, dict) and (name in config or hasattr(config, name)):
                    config[name] = value
                elif not isinstance(config, dict) and hasattr(config, name):
                    _write(config, name, getattr(config, name), value)


def other_arguments(tried: Arguments, asked: Asked, holders: Sequence[object]) -> Iterator[Arguments]:
    """The arguments with another value of one, or of several alike, such that what an error asks for would fit.

    holders: what the constructor was called with: its configs, then its arguments and defaults. Names that the failing
    code reads come first.
    """
    arguments = holders[-1] if holders else {}
    given = dict(arguments) if isinstance(arguments, dict) else {}
    values = values_in(holders)
    values = dict(sorted(values.items(), key=lambda item: item[0] not in asked.near | asked.words))

    def changed(new: Mapping[str, Any]) -> Arguments:
        own = {name: value for name, value in new.items() if name in given}
        held = {name: value for name, value in new.items() if name not in given}
        return replace(tried, given={**tried.given, **own}, entries={**tried.entries, **held})

    seen = {str(tried)}
    # What a constructor looks up in its keywords.
    if asked.key is not None and asked.key.isidentifier() and asked.key not in values:
        by_name = value_for(asked.key, None, values)
        options = (by_name,) if by_name is not None else GUESSES
        yield from (replace(tried, given={**tried.given, asked.key: value}) for value in options)
    for new in _changes(values, asked):
        made = changed(new)
        if str(made) not in seen:
            seen.add(str(made))
            yield made


def _write(config: object, name: str, before: object, value: object, depth: int = 0) -> None:
    # Into a config, and into those within it that have taken the entry over.
    object.__setattr__(config, name, value)
    for inner in [*vars(config).values()] if hasattr(config, "__dict__") and depth < DEEPEST else ():
        if hasattr(inner, "__dict__") and not callable(inner) and _is_same(vars(inner).get(name), before):
            _write(inner, name, before, value, depth + 1)


def values_in(holders: Sequence[object]) -> dict[str, Any]:
    """The entries of configs, and the arguments and defaults of a constructor, which come last among `holders`."""
    *configs, arguments = holders or ({},)
    entries = {name: value for config in configs for name, value in _entries(config).items()}
    return {**entries, **(arguments if isinstance(arguments, dict) else {})}


def _entries(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return {str(name): value for name, value in config.items()}
    return vars(config) if hasattr(config, "__dict__") and not isinstance(config, type) else _NOTHING


def _changes(values: Mapping[str, Any], asked: Asked) -> Iterator[dict[str, Any]]:
    numbers = {name: value for name, value in values.items() if type(value) is int}
    for name, has, options in asked.choices:
        alike = [one for one, value in values.items() if one == name or _may_be(one, value, has)]
        yield from ({one: option} for one in alike for option in options if not _is_same(values[one], option))
    if asked.several:
        single = {name: value for name, value in values.items() if type(value) in (int, float)}
        near = [name for name in single if name in (asked.taken_apart or asked.near)][:MOST_NEAR]
        for count in range(1, len(near) + 1):
            yield from ({name: (single[name],) * 2 for name in names} for names in itertools.combinations(near, count))
        yield from ({name: (value,) * 2} for name, value in single.items() if name not in near)
        return
    if asked.lists:
        tuples = {name: [*value] for name, value in values.items() if type(value) is tuple}
        yield from ({name: value} for name, value in tuples.items())
        yield tuples
    if asked.larger:
        yield from ({n: size * more} for more in (2, 4) for n, size in numbers.items() if n in asked.near and size > 0)
    # Of a config the code names the entry.
    speaks_of = asked.absent | asked.words | (asked.near if asked.none else frozenset())
    absent = [name for name, value in values.items() if value is None and name in speaks_of]
    made = {name: value_for(name) for name in absent}
    yield from ({name: value} for name, value in made.items() if value is not None)
    yield from ({name: COUNT} for name, value in made.items() if value is None and name in asked.near and asked.none)
    sizes = [pair for pair in asked.sizes if pair[1] > 0]
    for has, wants in sizes:
        yield from (
            {name: longer} for name in values for longer in _of_other_length(name, values[name], has, wants, asked)
        )
    for has, wants in sizes:
        yield from ({name: wants} for name, size in numbers.items() if size == has)
        # What is wanted may come of the argument, and what there is be fixed.
        yield from ({name: has} for name, size in numbers.items() if size == wants and has)
        if has:
            scaled = {name: size * wants // has for name, size in numbers.items() if size * wants % has == 0}
            yield from ({name: size} for name, size in scaled.items() if size not in (0, numbers[name], wants))


def _of_other_length(name: str, value: Any, has: int, wants: int, asked: Asked) -> Iterator[Any]:
    # A sequence that the failing code names, as long as it takes; an index may go beyond its end.
    if type(value) in (tuple, list) and value and name in asked.near:
        beyond = has if len(value) == wants and name in asked.taken_apart else 0
        for count in dict.fromkeys((beyond, len(value) + wants - has)):
            if 0 < count <= LONGEST:
                yield type(value)([*value, *(value[-1],) * count][:count])


def _may_be(name: str, value: Any, has: Any) -> bool:
    # Whether an argument may be what has another name further within: a text is, a number only where it was guessed.
    return _is_same(value, has) and (isinstance(value, str) or value_for(name) is None)


def _is_same(one: object, other: object) -> bool:
    return type(one) is type(other) and isinstance(one, (str, int)) and one == other
