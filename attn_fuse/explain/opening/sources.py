"""Runs a repository's files statement by statement: what raises, or trains, is left out, and "cuda" means the CPU."""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.roots import is_users, repository_of
from attn_fuse.explain.opening.stand_ins import is_caught
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.steps import TimeUp, limited

Say = Callable[[str], object]

# How the note on statements that were left out begins.
LEFT_OUT = "left out of"
_CUDA = re.compile(r"cuda(:\d+)?")
_DEFINES = (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)
# How often one statement is tried again after something was supplied.
_MOST_SUPPLIES = 8


class Sources(importlib.abc.MetaPathFinder):
    """Loads the files below `roots`, each statement within `limit` seconds.

    supplies: gives what an error lacks, and tells whether it could; the statement then runs again. say: is told what
    was left out and made up.
    """

    def __init__(
        self, roots: Sequence[Path], limit: float, supplies: Callable[[BaseException], bool], say: Say
    ) -> None:
        self.roots, self.limit, self.supplies, self.say = tuple(roots), limit, supplies, say
        self.moved = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a file below the roots, or None for all others."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        if spec.origin is None or not is_users(spec.origin, self.roots):
            return None
        spec.loader = _Loader(fullname, spec.origin, self)
        return spec

    def run(self, module: types.ModuleType, path: Path) -> BaseException | None:
        """Run the statements of the file at `path` in `module` without those that raise; gives what the first raised.

        Raises ExplainError where the file is not Python of this version.
        """
        tree = parsed(path)
        if not torch.cuda.is_available():
            self.moved |= on_the_cpu(tree)
        flags = 0
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for alias in node.names:
                    flags |= getattr(__future__, alias.name).compiler_flag
        training = [statement for statement in tree.body if _trains(statement)]
        left_out = [f"line {statement.lineno} (it trains)" for statement in training]
        remaining: list[ast.stmt] = [statement for statement in tree.body if statement not in training]
        first: BaseException | None = TimeUp() if training else None
        supplied = 0
        while remaining:
            code = compile(ast.Module(remaining, []), str(path), "exec", flags, dont_inherit=True)
            try:
                with limited(self.limit):
                    exec(code, vars(module))
                break
            except (Exception, SystemExit, TimeUp) as error:
                line = _line_of(error, path)
                at = next((i for i, s in enumerate(remaining) if line <= (s.end_lineno or s.lineno)), -1)
                statement, remaining = remaining[at], remaining[at:]
                supplied += 1
                if supplied <= _MOST_SUPPLIES and (in_its_folder(error, path) or self.supplies(error)):
                    continue
                supplied, first = 0, first or error
                left_out.append(f"line {statement.lineno} ({self._in_words(error)})")
                remaining = remaining[1:]
                # What follows a program that failed belongs to that program, but for what it defines.
                if not isinstance(statement, _DEFINES):
                    remaining = [one for one in remaining if _defines(one)]
        if left_out:
            self.say(f"{LEFT_OUT} {path.name}: {', '.join(left_out[:3])}" + (", ..." if len(left_out) > 3 else ""))
        return first

    def _in_words(self, error: BaseException) -> str:
        if isinstance(error, SystemExit):
            return "it exits"
        return f"it runs more than {self.limit:g} s" if isinstance(error, TimeUp) else in_one_line(error)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, sources: Sources) -> None:
        super().__init__(fullname, path)
        self.sources = sources

    def exec_module(self, module: types.ModuleType) -> None:
        raised = self.sources.run(module, Path(self.path))
        if isinstance(raised, ImportError) and is_caught(lambda file: is_users(file, self.sources.roots)):
            raise raised


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. Raises ExplainError where it is not Python of this version."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ExplainError(f"{path} cannot be imported: {in_one_line(error)}") from error


def on_the_cpu(tree: ast.AST) -> bool:
    """Rewrite `tree` such that `.cuda()`, a device "cuda" and `torch.cuda.FloatTensor` mean the CPU; whether any did.

    What only asks for the device, as `x.device.type == "cuda"`, stays.
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
        match node.func:
            case ast.Attribute(_, "cuda"):
                self.changed = True
                node.func.attr, node.args, node.keywords = "cpu", [], []
            # A number, -1 on the CPU, with which nothing can be moved.
            case ast.Attribute(tensor, "get_device") if not node.args and not node.keywords:
                self.changed = True
                return ast.copy_location(ast.Attribute(tensor, "device", ast.Load()), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Attribute(ast.Attribute(ast.Name("torch") as inner, "cuda"), name) if name.endswith("Tensor"):
                self.changed = True
                node.value = inner
        return node


def in_its_folder(error: BaseException, path: Path) -> bool:
    """Go to the folder above `path` that has the file that was not found; whether there is one.

    A script is run in its own folder, or in its repository's.
    """
    if not isinstance(error, FileNotFoundError) or error.filename is None:
        return False
    wanted = Path(os.fsdecode(error.filename))
    if wanted.is_relative_to(Path.cwd()):
        wanted = wanted.relative_to(Path.cwd())
    if wanted.is_absolute():
        return False
    for folder in (folder for folder in path.parents if folder.is_relative_to(repository_of(path))):
        if (folder / wanted).exists() and folder != Path.cwd():
            os.chdir(folder)
            return True
    return False


@contextlib.contextmanager
def same_folder_after() -> Iterator[None]:
    """The folder that the program runs in is the same after the block as before it."""
    folder = Path.cwd()
    try:
        yield
    finally:
        os.chdir(folder)


@contextlib.contextmanager
def without_own_compile(roots: Sequence[Path], say: Say) -> Iterator[None]:
    """Within the block `torch.compile` gives back what a file below `roots` hands it, and `say` is told of the first.

    Dynamo inlines a compiled part of a model that is compiled as a whole, so that the graphs are the same; of a part
    with default arguments it makes guards that raise an error (torch 2.13).
    """
    compiles = torch.compile
    told: list[object] = []

    def left_out(model: object = None, **options: object) -> object:
        if not is_users(sys._getframe(1).f_code.co_filename, roots):
            return compiles(model, **options)  # type: ignore[call-overload]
        if not told:
            told.append(model)
            say("its own calls of torch.compile are left out: the whole model is compiled")
        return model if model is not None else lambda one: one

    torch.compile = left_out  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiles


def _trains(statement: ast.stmt) -> bool:
    # Whether it is a loop with a backward pass, which a script runs for hours.
    return isinstance(statement, (ast.For, ast.While)) and any(
        isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(statement)
    )


def _defines(statement: ast.stmt) -> bool:
    is_assigned = isinstance(statement, (ast.Assign, ast.AnnAssign))
    return isinstance(statement, _DEFINES) or (
        is_assigned and not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    )


def _line_of(error: BaseException, path: Path) -> int:
    # The line of the file's own top level at which `error` came up.
    trace, line = error.__traceback__, 0
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == str(path) and code.co_name == "<module>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
