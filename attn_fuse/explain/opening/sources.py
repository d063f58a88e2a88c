"""Runs a repository's files statement by statement, leaves out those that raise or train, and replaces "cuda"."""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.roots import is_users
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.steps import TimeUp, limited

Say = Callable[[str], object]

_CUDA = re.compile(r"cuda(:\d+)?")
_DEFINES = (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)
# How often a statement runs again after something was supplied.
_MOST_SUPPLIES = 40


class Sources(importlib.abc.MetaPathFinder):
    """Loads the files below `roots`, each statement within `limit` seconds.

    supplies: provides what an error says is missing, if it can; the statement then runs again.
    say: receives a note on what was left out. moved: whether a file asked for a GPU that is not there.
    depth: how many files run. is_lenient: whether a failed import is left out of the file that makes it; otherwise it
    is left to the files that import that one, which may catch it.
    """

    def __init__(
        self, roots: Sequence[Path], limit: float, supplies: Callable[[BaseException], bool], say: Say
    ) -> None:
        self.roots, self.limit, self.supplies, self.say = tuple(roots), limit, supplies, say
        self.moved = self.is_lenient = False
        self.depth = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a file below the roots; None for other modules."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        if spec.origin is None or not is_users(spec.origin, self.roots):
            return None
        spec.loader = _Loader(fullname, spec.origin, self)
        return spec

    def run(self, module: types.ModuleType, path: Path) -> BaseException | None:
        """Run the file at `path` in `module` without the statements that raise, and return the first error.

        After a statement that is no definition has failed, only definitions run.
        Raises ExplainError where the file is not Python of this version, and an ImportError for the importing file.
        """
        tree = parsed(path)
        if not torch.cuda.is_available():
            self.moved |= on_the_cpu(tree)
        futures = [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
        first: BaseException | None = None
        skipped: list[str] = []
        has_failed = False
        self.depth += 1
        try:
            for statement in tree.body:
                if statement in futures or (has_failed and not _defines(statement)):
                    continue
                trains = _trains(statement)
                code = compile(ast.Module([*futures, statement], []), str(path), "exec", dont_inherit=True)
                raised = TimeUp() if trains else self._raised_by(code, module)
                if raised is None:
                    continue
                first = first or raised
                skipped.append(f"line {statement.lineno} ({'it trains' if trains else self.in_words(raised)})")
                has_failed = has_failed or not isinstance(statement, _DEFINES)
        finally:
            self.depth -= 1
        if skipped:
            self.say(f"skipped in {path.name}: {', '.join(skipped[:3])}" + (", ..." if len(skipped) > 3 else ""))
        return first

    def _raised_by(self, code: types.CodeType, module: types.ModuleType) -> BaseException | None:
        self.is_lenient &= self.depth > 1
        raised: BaseException | None = None
        for _ in range(_MOST_SUPPLIES):
            try:
                with limited(self.limit):
                    exec(code, vars(module))
                return None
            except (Exception, SystemExit, TimeUp) as error:
                raised = error
            if isinstance(raised, ImportError) and self.depth > 1 and not self.is_lenient:
                raise raised
            if not self.supplies(raised):
                if self.is_lenient or not isinstance(raised, ImportError):
                    break
                self.is_lenient = True
        return raised

    def in_words(self, error: BaseException) -> str:
        """An error of the file's own code, in one line."""
        if isinstance(error, SystemExit):
            return "it exits"
        return f"it runs more than {self.limit:g} s" if isinstance(error, TimeUp) else in_one_line(error)


class _Loader(importlib.machinery.SourceFileLoader):
    # Not Sources itself: packages read their data by methods of SourceFileLoader.

    def __init__(self, fullname: str, path: str, sources: Sources) -> None:
        super().__init__(fullname, path)
        self.sources = sources

    def exec_module(self, module: types.ModuleType) -> None:
        self.sources.run(module, Path(self.path))


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. Raises ExplainError where it is not Python of this version."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ExplainError(f"{path} cannot be imported: {in_one_line(error)}") from error


def on_the_cpu(tree: ast.AST) -> bool:
    """Rewrite `.cuda()` and devices "cuda" in `tree` to the CPU; whether anything changed.

    Questions about the device, such as `x.device.type == "cuda"`, stay.
    """
    rewriting = _OnTheCpu()
    rewriting.visit(tree)
    return rewriting.changed


class _OnTheCpu(ast.NodeTransformer):
    changed = False

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str) or not _CUDA.fullmatch(node.value):
            return node
        self.changed = True
        return ast.copy_location(ast.Constant("cpu"), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            self.changed = True
            node.func.attr, node.args, node.keywords = "cpu", [], []
        return node


@contextlib.contextmanager
def without_own_compile(roots: Sequence[Path], say: Say) -> Iterator[None]:
    """Within the block, files below `roots` that call `torch.compile` get their model back uncompiled.

    The graphs stay the same, since Dynamo inlines the compiled parts of a model that is compiled as a whole. But for
    parts with default arguments it makes guards that raise an error (torch 2.13).
    """
    compiles: Callable[..., Any] = torch.compile

    def skipped(model: Any = None, **options: Any) -> Any:
        if not is_users(sys._getframe(1).f_code.co_filename, roots):
            return compiles(model, **options)
        say("its own calls of torch.compile are skipped, since the whole model is compiled")
        return (lambda one: one) if model is None else model

    with patch.object(torch, "compile", skipped):
        yield


def _trains(statement: ast.stmt) -> bool:
    # Whether it is a loop with a backward pass, which scripts run for hours.
    return isinstance(statement, (ast.For, ast.While)) and any(
        isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(statement)
    )


def _defines(statement: ast.stmt) -> bool:
    is_assigned = isinstance(statement, (ast.Assign, ast.AnnAssign))
    return isinstance(statement, _DEFINES) or (
        is_assigned and not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    )
