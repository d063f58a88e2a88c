"""Calls of a model that its repository spells out: in the file, a docstring, a README, a test or a script.

Of each call the statements that its arguments come of are run, and nothing else of the text: a backward slice (Weiser,
Program slicing, 1981). They run in a few seconds, and can neither write files nor reach out to other processes.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import doctest
import inspect
import io
import itertools
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_fuse.explain.opening.roots import repository_of
from attn_fuse.explain.opening.sources import on_the_cpu
from attn_fuse.explain.steps import TimeUp, limited

_MOST_FILES, _MOST_CALLS, _SECONDS = 100, 8, 8.0
# Methods that a value is made with, as a parser's `add_argument` and a config's `update`.
_MAKES = re.compile(r"^(add|set|update|merge|append|extend|insert|put|register|override)")
_BUILTINS = {*vars(builtins), "__name__", "__file__"}
_FORBIDDEN = re.compile(
    r"^(socket\.(connect|getaddrinfo|bind|send\w+)|subprocess\.|os\.(system|exec|posix_spawn|fork|remove|rename|rmdir"
    r"|mkdir|kill|truncate|symlink|link|chmod|chown|utime|setxattr)|shutil\.)"
)


@dataclass(frozen=True)
class Spelled:
    """A call that some text spells out.

    source: the file that has it. text: the call as Python. args, kwargs: its arguments.
    unknown: how many of them the text alone does not give.
    """

    source: str
    text: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unknown: int = 0


def constructions(cls: type[nn.Module], module: types.ModuleType) -> Iterator[Spelled]:
    """The calls of `cls`: first those whose arguments are all known, then those of which some are."""
    partly: list[Spelled] = []
    found = 0
    for text in _texts(module, cls.__name__):
        for call, scopes in text.calls(cls.__name__):
            spelled = text.evaluated(call, scopes, cls)
            if spelled is None:
                continue
            if spelled.unknown:
                partly.append(spelled)
                continue
            yield spelled
            found += 1
            if found == _MOST_CALLS:
                return
    yield from sorted(partly, key=lambda one: one.unknown)[:2]


def calls_of(model: nn.Module, module: types.ModuleType) -> Iterator[Spelled]:
    """The calls of an object of the class of `model`, with `model` in its place, that pass a tensor."""
    found, name_of = 0, type(model).__name__
    for text in _texts(module, name_of):
        names = {
            target.id
            for node in ast.walk(text.tree)
            if isinstance(node, ast.Assign) and any(_is_call_of(inner, name_of) for inner in ast.walk(node.value))
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for name in names:
            for call, scopes in text.calls(name):
                spelled = text.evaluated(call, scopes, None, dict.fromkeys(names, model))
                if spelled is None or spelled.unknown:
                    continue
                if any(isinstance(v, torch.Tensor) for v in (*spelled.args, *spelled.kwargs.values())):
                    yield spelled
                    found += 1
                if found == _MOST_CALLS:
                    return


# The module or function that a call stands in, from the outermost to the innermost.
_Scopes = tuple[ast.Module | ast.FunctionDef, ...]


@dataclass(frozen=True)
class _Text:
    # source: what it is called. names: the values that it has without its own statements.
    source: str
    tree: ast.Module
    names: Mapping[str, Any]

    def calls(self, name: str) -> Iterator[tuple[ast.Call, _Scopes]]:
        # The calls of a name with the scopes that they stand in.
        def within(node: ast.AST, scopes: _Scopes) -> Iterator[tuple[ast.Call, _Scopes]]:
            for child in ast.iter_child_nodes(node):
                inner = (*scopes, child) if isinstance(child, ast.FunctionDef) else scopes
                if isinstance(child, ast.Call) and _is_call_of(child, name):
                    yield child, inner
                yield from within(child, inner)

        yield from within(self.tree, (self.tree,))

    def evaluated(
        self, call: ast.Call, scopes: _Scopes, cls: type | None, names: Mapping[str, Any] | None = None
    ) -> Spelled | None:
        # The arguments of a call of `cls`; None where it is of another class, or where none of them has a value.
        known = {**self.names, **(names or {})}
        scope: dict[str, Any] = dict(known)
        if cls is not None and not self._is_of(cls, call.func, scopes, known):
            return None
        written = ast.unparse(call)
        shown = written if len(written) <= 160 else f"{written[:157]}..."
        whole = self.value(_tuple_of(call), scopes, known, scope)
        if whole is not _UNKNOWN:
            return Spelled(self.source, shown, *whole) if cls is None or any(whole) else None
        if cls is None:
            return None
        values: dict[str, Any] = {}
        unknown = 0
        for name, given in _by_parameter(cls, call):
            value = self.value(given, scopes, known, dict(known))
            unknown += value is _UNKNOWN
            values |= {} if value is _UNKNOWN else {name: value}
        return Spelled(self.source, shown, (), values, unknown) if values else None

    def _is_of(self, cls: type, function: ast.expr, scopes: _Scopes, known: Mapping[str, Any]) -> bool:
        # A file that is imported under two names has two classes.
        value = self.value(function, scopes, known, dict(known))
        if value is _UNKNOWN:
            return False
        return value is cls or (
            isinstance(value, type) and value.__qualname__ == cls.__qualname__ and _file_of(value) == _file_of(cls)
        )

    def value(self, node: ast.expr, scopes: _Scopes, known: Mapping[str, Any], scope: dict[str, Any]) -> Any:
        # The value of an expression in a scope; _UNKNOWN where the text alone does not give it.
        statements = _sliced(node, scopes, known)
        if statements is None:
            return _UNKNOWN
        folder = Path.cwd()
        try:
            silent = contextlib.redirect_stderr(io.StringIO())
            with limited(_SECONDS), only_computing(), torch.random.fork_rng([]), silent:
                body = ast.fix_missing_locations(ast.Module(statements, []))
                exec(compile(body, self.source, "exec"), scope)
                return eval(compile(ast.fix_missing_locations(ast.Expression(node)), self.source, "eval"), scope)
        except (Exception, SystemExit, TimeUp):
            return _UNKNOWN
        finally:
            os.chdir(folder)


_UNKNOWN = object()


def _is_call_of(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Call(ast.Name(called) | ast.Attribute(_, called)):
            return called == name
    return False


def _tuple_of(call: ast.Call) -> ast.expr:
    # An expression for the arguments of a call, by position and by name.
    keywords = [
        ast.Dict(
            [None if k.arg is None else ast.Constant(k.arg) for k in call.keywords], [k.value for k in call.keywords]
        )
    ]
    return ast.copy_location(ast.Tuple([ast.Tuple(call.args, ast.Load()), *keywords], ast.Load()), call)


def _by_parameter(cls: type, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    # The arguments of a call by the constructor's names.
    try:
        names = [name for name, p in inspect.signature(cls).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        return
    yield from zip(names, itertools.takewhile(lambda a: not isinstance(a, ast.Starred), call.args), strict=False)
    yield from ((k.arg, k.value) for k in call.keywords if k.arg is not None)


def _sliced(node: ast.expr, scopes: _Scopes, known: Mapping[str, Any]) -> list[ast.stmt] | None:
    # The statements before an expression that give its names their values; None where one has none.
    needed = _loaded(node)
    kept: list[ast.stmt] = []
    line = getattr(node, "lineno", sys.maxsize)
    for scope in reversed(scopes):
        needed -= known.keys() if isinstance(scope, ast.Module) else set()
        for statement in reversed(_before(scope, line)):
            assigned = _assigned_by(statement)
            if not needed & assigned:
                continue
            kept.append(statement)
            if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
                needed -= assigned
                inner = _loaded(statement) if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else set()
                # What a function reads only when it is called may be missing.
                needed |= {name for name in inner if name not in known and _is_assigned(name, scopes)}
                continue
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                needed -= _names_bound_by(statement)
            needed |= _loaded(statement)
        if isinstance(scope, ast.FunctionDef):
            kept += _defaults(scope, needed)
            line = sys.maxsize
    return kept[::-1] if not needed - known.keys() - _BUILTINS else None


def _before(scope: ast.Module | ast.FunctionDef, line: int) -> list[ast.stmt]:
    # The statements of a scope that begin above a line and hold no others, but for functions and classes.
    found: list[ast.stmt] = []
    waiting = list(scope.body)
    while waiting:
        statement = waiting.pop(0)
        if statement.lineno >= line:
            continue
        blocks = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) or not any(blocks):
            found.append(statement)
        else:
            waiting[:0] = [inner for block in blocks for inner in block]
    return found


def _assigned_by(statement: ast.stmt) -> set[str]:
    # The names that a statement binds, or into whose value it writes.
    match statement:
        case ast.Import(aliases) | ast.ImportFrom(_, aliases):
            return {alias.asname or alias.name.partition(".")[0] for alias in aliases}
        case ast.FunctionDef(name) | ast.ClassDef(name):
            return {name}
        case ast.Assign(targets):
            return {_root(one) for target in targets for one in _single(target)}
        case ast.AnnAssign(target) | ast.AugAssign(target):
            return {_root(target)}
        case ast.Expr(ast.Call(ast.Attribute(owner, method))) if _MAKES.search(method):
            return {_root(owner)}
    return set()


def _names_bound_by(statement: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {one.id for target in targets for one in _single(target) if isinstance(one, ast.Name)}


def _single(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _loaded(node: ast.AST) -> set[str]:
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    own = {a.arg for n in ast.walk(node) if isinstance(n, ast.arguments) for a in (*n.args, *n.kwonlyargs)}
    # What a comprehension binds it does not need.
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store)} if not isinstance(node, ast.stmt) else set()
    inner = {n.target.id for n in ast.walk(node) if isinstance(n, ast.comprehension) and isinstance(n.target, ast.Name)}
    return {n.id for n in names if isinstance(n.ctx, ast.Load)} - own - stored - inner


def _is_assigned(name: str, scopes: _Scopes) -> bool:
    return any(name in _assigned_by(statement) for scope in scopes for statement in _before(scope, sys.maxsize))


def _defaults(function: ast.FunctionDef, needed: set[str]) -> list[ast.stmt]:
    # Statements that give the parameters of a function their defaults; takes those out of `needed`.
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    defaults |= {a: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    values: dict[str, ast.expr] = {argument.arg: default for argument, default in defaults.items()}
    if arguments.kwarg is not None:
        values[arguments.kwarg.arg] = ast.copy_location(ast.Dict([], []), arguments.kwarg)
    if arguments.vararg is not None:
        values[arguments.vararg.arg] = ast.copy_location(ast.Tuple([], ast.Load()), arguments.vararg)
    given = [name for name in values if name in needed]
    needed -= set(given)
    needed |= {loaded for name in given for loaded in _loaded(values[name])}
    made = [ast.Assign([ast.Name(name, ast.Store())], values[name]) for name in given]
    return [ast.copy_location(assignment, assignment.value) for assignment in made]


def _texts(module: types.ModuleType, name: str) -> Iterator[_Text]:
    # The texts of the repository that may call the class: the file and its docstrings, READMEs, then its other files.
    path = Path(module.__file__ or "")
    root, own = repository_of(path), {"torch": torch, "nn": nn, **vars(module)}
    tree = _tree(path.read_text(encoding="utf-8", errors="replace"))
    if tree is None:
        return
    yield _Text(path.name, tree, own)
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Module)) and name in (ast.get_docstring(node) or ""):
            with contextlib.suppress(ValueError):  # its lines are not laid out as examples are
                examples = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
                inner = _tree("".join(example.source for example in examples))
                if inner is not None and inner.body:
                    yield _Text(f"a docstring of {path.name}", inner, own)
    for file in sorted({*root.glob("*.md"), *path.parent.glob("*.md")}):
        text = file.read_text(encoding="utf-8", errors="replace")
        for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.S):
            inner = _tree(re.sub(r"^(>>> |\.\.\. )", "", block, flags=re.M)) if f"{name}(" in block else None
            if inner is not None:
                yield _Text(file.name, inner, own)
    for file in itertools.islice(_scripts(path, root, name), _MOST_FILES):
        inner = _tree(file.read_text(encoding="utf-8", errors="replace"))
        if inner is not None:
            yield _Text(file.name, inner, {"__name__": "_", "__file__": str(file)})


def _scripts(path: Path, root: Path, name: str) -> Iterator[Path]:
    # The Python files of the repository that call a name and do not define it, the nearest to `path` first.
    files = [file for file in python_files(root) if file != path]
    near = sorted(files, key=lambda file: (-len(os.path.commonpath([file, path])), len(file.parts), str(file)))
    for file in near:
        text = file.read_text(encoding="utf-8", errors="replace")
        if f"{name}(" in text and f"class {name}(" not in text:
            yield file


def python_files(root: Path) -> list[Path]:
    """The Python files below a folder, up to 2000, but for those of hidden folders and environments."""
    found: list[Path] = []
    for place, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in ("site-packages", "node_modules"))
        found += [Path(place) / file for file in sorted(files) if file.endswith(".py")]
        if len(found) > 2000:
            break
    return found


def _tree(text: str) -> ast.Module | None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    if not torch.cuda.is_available():
        on_the_cpu(tree)
    return tree


def _file_of(cls: type) -> str:
    module = sys.modules.get(cls.__module__)
    return str(Path(str(getattr(module, "__file__", ""))).resolve())


_state = {"hooked": False, "closed": 0}


@contextlib.contextmanager
def only_computing() -> Iterator[None]:
    """Within the block the process writes no file, removes none, starts no process and uses no network.

    An attempt raises PermissionError.
    """
    if not _state["hooked"]:
        _state["hooked"] = True
        sys.addaudithook(_forbid)
    _state["closed"] += 1
    # Its writer is not Python's.
    save, torch.save = torch.save, _no_save  # type: ignore[assignment]
    try:
        yield
    finally:
        _state["closed"] -= 1
        torch.save = save


def _no_save(value: object, file: object, *args: object, **kwargs: object) -> None:
    _forbid("open", (file, "w", 0))


def _forbid(event: str, args: Sequence[Any]) -> None:
    if not _state["closed"]:
        return
    writes = event == "open" and (
        (isinstance(args[1], str) and set(args[1]) & set("wax+")) or (isinstance(args[2], int) and args[2] & 3)
    )
    if (writes and args[0] != os.devnull) or _FORBIDDEN.search(event):
        raise PermissionError(f"{event} while explain looks for arguments: {args[0] if args else ''}")
