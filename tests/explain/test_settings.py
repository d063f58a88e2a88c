"""The values that a repository's files give to names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from attn_fuse.explain.settings import settings_for
from tests.explain.repository import Write

NAMES = {"width", "depth"}
OF_BOTH = {"width": 12, "depth": 3}
# Of each repository its files, and what they give for NAMES.
SETTINGS: dict[str, tuple[dict[str, str], Mapping[str, Any] | None]] = {
    "YAML": ({"a.yaml": "width: 12\ndepth: 3\n"}, OF_BOTH),
    "YAML at any depth": ({"a.yml": "net:\n  width: 12\n  head:\n  - depth: 3\n"}, OF_BOTH),
    "JSON": ({"a.json": '{"width": 12, "depth": 3}'}, OF_BOTH),
    "TOML": ({"a.toml": "[net]\nwidth = 12\ndepth = 3\n"}, OF_BOTH),
    "values with descriptions": ({"a.json": '{"width": {"value": 12, "desc": "x"}, "depth": {"value": 3}}'}, OF_BOTH),
    "a command line": (
        {"run.py": "p.add_argument('-w', '--width', default=12)\np.add_argument('--depth', type=int, default=3)\n"},
        OF_BOTH,
    ),
    "a command line by its destinations": (
        {"run.py": "p.add_argument('--w', dest='width', default=12)\np.add_argument('--d', dest='depth', default=3)\n"},
        OF_BOTH,
    ),
    "options that are switched": (
        {"run.py": "p.add_argument('--width', action='store_true')\np.add_argument('--depth', action='store_false')\n"},
        {"width": False, "depth": True},
    ),
    "assignments": ({"a.py": "width = 12\ndepth: int = 3\n"}, OF_BOTH),
    "a dict": ({"a.py": "SIZES = {'small': {'width': 12, 'depth': 3}}\n"}, OF_BOTH),
    "a call of dict": ({"a.py": "SIZES = dict(width=12, depth=3)\n"}, OF_BOTH),
    "a class": ({"a.py": "class Small:\n    width = 12\n    depth: int = 3\n"}, OF_BOTH),
    "a function that gives a config": (
        {"a.py": "def get_config():\n    c = make()\n    c.width = 12\n    c.depth = 3\n"},
        OF_BOTH,
    ),
    "half of the names": ({"a.yaml": "width: 12\nother: 3\n"}, {"width": 12}),
    "not fewer": ({"a.yaml": "other: 12\n"}, None),
    "none": ({}, None),
    "not what is computed": ({"a.py": "width = run()\ndepth = 2 * 2\n"}, None),
    "not hidden files": ({".cache/a.yaml": "width: 12\ndepth: 3\n"}, None),
    "not an environment's": ({"venv/site-packages/a.json": '{"width": 12, "depth": 3}'}, None),
    "a number that YAML takes for a text": ({"a.yaml": "width: 12\ndepth: 1e-3\n"}, {"width": 12, "depth": 0.001}),
    "a text stays one": ({"a.json": '{"width": 12, "depth": "three"}'}, {"width": 12, "depth": "three"}),
    "a text of a number stays one": ({"a.json": '{"width": 12, "depth": "3"}'}, {"width": 12, "depth": "3"}),
    "a text that Python takes for a number": (
        {"a.json": '{"width": 12, "depth": "inf"}'},
        {"width": 12, "depth": "inf"},
    ),
    "a file that is broken beside one that is not": (
        {"a.yaml": "a: [1\n- b", "b.yaml": "width: 12\ndepth: 3\n"},
        OF_BOTH,
    ),
}


@pytest.mark.parametrize(("files", "values"), SETTINGS.values(), ids=SETTINGS)
def test_settings(write: Write, files: Mapping[str, str], values: Mapping[str, Any] | None) -> None:
    write("", "README.md")
    for name, text in files.items():
        write(text, name)
    found = settings_for(NAMES, write("", "nets/model.py"))
    assert (found and {name: found.values[name] for name in NAMES if name in found.values}) == values


def test_the_nearest_of_those_that_know_as_much(write: Write) -> None:
    write("", "README.md")
    for folder, width in (("other", 1), ("nets/conf", 2), ("nets", 3)):
        write(f"width: {width}\ndepth: 1\n", f"{folder}/{width}.yaml")
    found = settings_for(NAMES, write("", "nets/model.py"))
    assert found is not None and found.source in ("2.yaml", "3.yaml")


def test_one_that_knows_more_comes_before_one_that_is_near(write: Write) -> None:
    write("", "README.md")
    write("width: 1\n", "nets/near.yaml")
    write("width: 2\ndepth: 3\n", "far/whole.yaml")
    found = settings_for(NAMES, write("", "nets/model.py"))
    assert found is not None and found.source == "whole.yaml"
