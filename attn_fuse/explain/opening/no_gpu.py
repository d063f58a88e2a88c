"""A repository's files on a machine without a GPU: what they put on "cuda" stays on the CPU."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_fuse.explain.roots import is_users

CUDA = re.compile(r"^cuda(:\d+)?$")
MOVES = ("to", "device", "set_default_device", "full", "zeros", "ones")
SWITCHES = re.compile(r"^(use_)?(cuda|gpu)$")


def on_this_machine(name: str, value: Any) -> Any:
    """The option `value`, where there is no GPU without what asks for one."""
    if torch.cuda.is_available():
        return value
    if isinstance(value, str) and CUDA.match(value):
        return "cpu"
    return False if SWITCHES.match(name) and value is True else value


def on_the_cpu(tree: ast.Module) -> bool:
    """Rewrite `tree` such that `.cuda()`, `device="cuda"`, `torch.cuda.FloatTensor` and `.get_device()` mean the CPU;
    whether any was.

    What only asks for the device, as `x.device.type == "cuda"`, stays.
    """
    rewriting = _OnTheCpu(tree)
    rewriting.visit(tree)
    return rewriting.changed


class _OnTheCpu(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        self.changed = False
        imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
        self.imported = {alias.asname or alias.name for node in imports for alias in node.names}

    def _moved(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.Constant(str() as text) if CUDA.match(text):
                self.changed = True
                return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(ast.Name(module), "get_device") if module in self.imported:
                pass  # a function of the repository's, as one of its processes
            case ast.Attribute(tensor, "get_device") if not node.args and not node.keywords:
                # A number, -1 on the CPU, with which nothing can be moved.
                self.changed = True
                return ast.copy_location(ast.Attribute(tensor, "device", ast.Load()), node)
            case ast.Attribute(_, "cuda"):
                self.changed = True
                node.func.attr, node.args, node.keywords = "cpu", [], []
            case ast.Attribute(_, called) | ast.Name(called) if called in MOVES:
                node.args = [self._moved(given) for given in node.args]
        for keyword in node.keywords:
            if keyword.arg in ("device", "map_location"):
                keyword.value = self._moved(keyword.value)
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        self.generic_visit(node)
        names = [*node.posonlyargs, *node.args][-len(node.defaults) :] if node.defaults else []
        node.defaults = [
            self._moved(default) if "device" in name.arg else default
            for name, default in zip(names, node.defaults, strict=True)
        ]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Attribute(ast.Attribute(ast.Name("torch") as inner, "cuda"), name) if name.endswith("Tensor"):
                self.changed = True
                node.value = inner
            case ast.Attribute(ast.Attribute(ast.Attribute(ast.Name("torch"), "version"), "cuda") as version, _):
                # None without CUDA, and has no `split`.
                self.changed = True
                node.value = ast.copy_location(ast.Constant("0.0"), version)
        return node


class Sources(importlib.abc.MetaPathFinder):
    """Loads the files below `roots` with `on_the_cpu`, and calls `changed` where that rewrote something."""

    def __init__(self, roots: Sequence[Path], changed: Callable[[], object]) -> None:
        self.roots, self.changed = tuple(roots), changed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a file below the roots, or None for all others."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        if not is_users(spec.origin, self.roots):
            return None
        spec.loader = _Loader(fullname, spec.origin, self.changed)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, changed: Callable[[], object]) -> None:
        super().__init__(fullname, path)
        self.changed = changed

    def get_code(self, fullname: str) -> types.CodeType:
        # Neither read from the cache of compiled files nor written there: this code is not what the file says.
        tree = ast.parse(self.get_data(self.path), self.path)
        if on_the_cpu(tree):
            self.changed()
        return compile(tree, self.path, "exec", dont_inherit=True)
