"""Write docs/api.md, the public names with their signatures and docstrings: python tools/api.py"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attn_fuse
from attn_fuse.explain import explain
from attn_fuse.explain.explanation import Explanation
from attn_fuse.report import Blocker, Failure, Location

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """# API

What `import attn_fuse` gives, with its docstrings; `make docs` writes this page. The backend has no name to import:
`torch.compile(model, backend="attn_fuse", options={...})` finds it, and its options are the fields of `Options`.
`attn_fuse.__version__` is the version, "unknown" in a checkout that is not installed.
"""
# What the public functions return.
RETURNED = (Explanation, Location, Blocker, Failure)


def page() -> str:
    """The text of docs/api.md."""
    public = [getattr(attn_fuse, name) for name in attn_fuse.__all__ if name not in ("__version__", "explain")]
    functions = [explain, *(value for value in public if not inspect.isclass(value))]
    errors = [value for value in public if inspect.isclass(value) and issubclass(value, Exception)]
    values = [value for value in public if inspect.isclass(value) and value not in errors]
    groups = {"Functions": functions, "Values": [*values, *RETURNED], "Errors": errors}
    return "\n".join([HEAD, *(_group(title, group) for title, group in groups.items())])


def _group(title: str, values: Iterable[Any]) -> str:
    entries = [f"### {value.__name__}\n\n```python\n{_stub(value)}\n```\n" for value in sorted(values, key=_name)]
    return "\n".join([f"## {title}\n", *entries])


def _name(value: Any) -> str:
    return str(value.__name__)


def _stub(value: Callable[..., Any]) -> str:
    """The definition of `value` without what it does: signature, docstring, fields, public methods."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    assert isinstance(definition, (ast.FunctionDef, ast.ClassDef))
    definition.decorator_list = []
    _bare(definition)
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100", "-"],
        input=ast.unparse(definition), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return formatted.stdout.strip()


def _bare(definition: ast.FunctionDef | ast.ClassDef) -> None:
    is_class = isinstance(definition, ast.ClassDef)
    kept: list[ast.stmt] = []
    for n, part in enumerate(definition.body):
        is_docstring = n == 0 and isinstance(part, ast.Expr)
        is_field = is_class and isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_")
        if isinstance(part, ast.FunctionDef) and is_class and not part.name.startswith("_"):
            _bare(part)
            is_field = True
        if is_docstring or is_field:
            kept.append(part)
    definition.body = kept


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
