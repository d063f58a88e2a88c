"""Calls of a class that its repository spells out: under the file's `__main__`, in a docstring, a README, a test or a
script."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_fuse.explain.roots import repository_of
from attn_fuse.explain.steps import TimeUp, limited

MOST_FILES, MOST_CALLS, DEEPEST = 100, 8, 6
# Functions that try a model out.
TRIES = re.compile(r"^(main|test|demo|run|example)", re.I)
# Calls that a value may hold besides those of the file's names.
HARMLESS = {
    f.__name__: f
    for f in (int, float, bool, str, len, range, list, tuple, dict, set, max, min, round, sum, zip, enumerate, sorted)
}
# Seconds of evaluating an argument.
EVALUATED = 5.0
# Builtin functions that do more than compute, and parts of libraries that read and write files.
REACHES_OUT = {"open", "exec", "eval", "input", "__import__", "compile", "breakpoint", "print"}
FILES = re.compile(r"load|save|pretrained|hub|download|file|open|dump|memmap|distributed|multiprocessing")
# What counts, prints or exports a model that is its first argument, and what names the inputs or their shapes.
TOOLS: dict[str, tuple[str, ...]] = {
    "summary": ("input_size", "input_data"), "profile": ("inputs",), "get_model_complexity_info": ("input_res",),
    "FlopCountAnalysis": ("inputs",), "trace": ("example_inputs",), "export": ("args",),
}  # fmt: skip
# Of a call: those by position, those by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Snippet:
    """A call that some text of the repository spells out.

    text: the call as Python. source: the file that has it. names: the values that it uses.
    """

    text: str
    source: str
    names: Mapping[str, Any]


def calls_of(cls: type[nn.Module], namespace: Mapping[str, Any], path: Path) -> Iterator[Snippet]:
    """The calls of `cls` whose arguments are constants, names of the file, or values the same text assigns to names."""
    found = 0
    for source, tree in _texts(path, cls.__name__):
        for node in _calls(tree, cls.__name__):
            if any(keyword.arg is None for keyword in node.keywords) or any(
                isinstance(a, ast.Starred) for a in node.args
            ):
                continue
            names = _values_with_imports(node, tree, {**HARMLESS, "torch": torch, "nn": nn, **namespace}, path)
            if names is None or not (node.args or node.keywords):
                continue
            node.func = ast.Name(cls.__name__, ast.Load())
            for keyword in node.keywords:
                if keyword.arg == "pretrained":  # the weights change nothing here
                    keyword.value = ast.Constant(False)
            yield Snippet(ast.unparse(node), source, {cls.__name__: cls, **names})
            found += 1
            if found == MOST_CALLS:
                return


def made_by_methods(cls: type[nn.Module], namespace: Mapping[str, Any], path: Path) -> Iterator[Snippet]:
    """The calls of class methods of `cls` that some text spells out and that load nothing, as `from_name("small")`."""
    methods = {
        name
        for name, value in vars(cls).items()
        if isinstance(value, classmethod) and not name.startswith("_") and not FILES.search(name)
    }
    known = {**HARMLESS, "torch": torch, "nn": nn, **namespace}
    for source, tree in _texts(path, cls.__name__) if methods else ():
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Attribute(ast.Name(owner), method)) if owner == cls.__name__ and method in methods:
                    given = ast.Tuple([*node.args, *(k.value for k in node.keywords)], ast.Load())
                    names = _values_with_imports(given, tree, known, path)
                    if names is not None:
                        yield Snippet(ast.unparse(node), source, {cls.__name__: cls, **names})


def parts_of_calls(
    cls: type[nn.Module], namespace: Mapping[str, Any], path: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of the calls of `cls` that a text spells out in part only: the file, and the arguments that it does, by name.

    An argument may call what the text imports from the repository, where that only computes.
    """
    known = {**HARMLESS, "torch": torch, "nn": nn, **namespace}
    found = 0
    for source, tree in _texts(path, cls.__name__):
        for node in _calls(tree, cls.__name__):
            values: dict[str, Any] = {}
            for name, given in _by_parameter(cls, node):
                used = {n.id for n in ast.walk(given) if isinstance(n, ast.Name)}
                value = _value_of(given, tree, {**known, **_imported(used, tree, path)})
                if value is not None:
                    values[name] = value
            if values:
                yield source, values
                found += 1
            if found == MOST_CALLS:
                return


def _by_parameter(cls: type, node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    # The arguments of a call by the constructor's names.
    try:
        names = [name for name, p in inspect.signature(cls).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        return
    yield from zip(names, itertools.takewhile(lambda a: not isinstance(a, ast.Starred), node.args), strict=False)
    yield from ((k.arg, k.value) for k in node.keywords if k.arg in names and k.arg is not None)


def _value_of(node: ast.expr, tree: ast.AST, known: Mapping[str, Any]) -> Any:
    # The value of an expression of the text; None where the text alone does not give it.
    try:
        with limited(EVALUATED):
            names = _values(node, tree, known)
            return None if names is None else eval(ast.unparse(node), dict(names))
    except (Exception, SystemExit, TimeUp):
        return None


def _imported(names: set[str], tree: ast.AST, path: Path) -> dict[str, Any]:
    """What `tree` imports and the values behind `names` call, by name: classes of modules and of configs, and functions
    of its repository that compute.

    A function computes whose code, and that of what it calls, names nothing that reaches out.
    """
    asked = set(names)
    for _ in range(DEEPEST):
        assigned = (given for name in asked for given in _assigned(tree, name))
        asked |= {n.id for given in assigned for n in ast.walk(given) if isinstance(n, ast.Name)}
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(str() as module, aliases, 0):
                stands_for = {alias.asname or alias.name: alias.name for alias in aliases}
                wanted = asked if "*" in stands_for else asked & stands_for.keys()
                if not wanted or not _only_defines_module(module, path):
                    continue
                try:
                    loaded = importlib.import_module(module)
                except Exception:  # what cannot be imported gives no value
                    continue
                for name in wanted - found.keys():
                    value = getattr(loaded, stands_for.get(name, name), None)
                    if (isinstance(value, types.FunctionType) and only_computes(value)) or (
                        isinstance(value, type) and (issubclass(value, nn.Module) or dataclasses.is_dataclass(value))
                    ):
                        found[name] = value
    return found


def _only_defines_module(module: str, path: Path) -> bool:
    # Whether it is an installed library, or a file or package of the repository whose import runs no program.
    parts = module.split(".")
    places = [folder / Path(*parts) for folder in dict.fromkeys((path.parent, repository_of(path)))]
    files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
    file = next(filter(Path.is_file, files), None)
    if file is None:
        return "site-packages" in Path(getattr(_spec(parts[0]), "origin", None) or "").parts
    try:
        return only_defines(ast.parse(file.read_text(encoding="utf-8", errors="replace")))
    except (SyntaxError, ValueError):
        return False


def _spec(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def only_defines(tree: ast.Module) -> bool:
    """Whether importing a file runs no program: its loops and calls stand in functions and classes."""
    runs = (ast.For, ast.While, ast.With, ast.Expr)
    return not any(isinstance(node, runs) and not _is_harmless(node) for node in tree.body)


def _is_harmless(node: ast.stmt) -> bool:
    # A docstring, and a call that sets something up, as of a logger or of the path.
    return isinstance(node, ast.Expr) and (
        isinstance(node.value, ast.Constant)
        or (isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute))
    )


def only_computes(function: Callable[..., Any], seen: frozenset[object] = frozenset()) -> bool:
    """Whether the code of `function` names nothing but torch, NumPy, math, harmless builtins and functions alike."""
    if function in seen:
        return True
    if not isinstance(function, types.FunctionType):
        return False
    codes, names, attributes = [function.__code__], set[str](), set[str]()
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        names |= set(code.co_names) & (function.__globals__.keys() | vars(builtins).keys())
        attributes |= set(code.co_names)
    if any(FILES.search(attribute) for attribute in attributes):
        return False
    for name in names:
        value = function.__globals__.get(name, getattr(builtins, name, None))
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
            if not only_computes(value, seen | {function}):
                return False
        elif isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in ("torch", "math", "numpy"):
                return False
        elif name in REACHES_OUT and name not in function.__globals__:
            return False
    return True


def inputs_of(
    cls: type[nn.Module], namespace: Mapping[str, Any], path: Path
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments, by position and by name, that some text of the repository calls an object of `cls` with."""
    known = {**HARMLESS, "torch": torch, "nn": nn, **namespace}
    found = 0
    for _, tree in _texts(path, cls.__name__):
        models = set(_names_of(tree, cls.__name__))
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Name(called)) if called in models and (node.args or node.keywords):
                    arguments = _evaluated(node, tree, known, path)
                    if arguments is not None:
                        yield arguments
                        found += 1
                case ast.Call(ast.Name(tool) | ast.Attribute(_, tool), [model, *_]) if tool in TOOLS and (
                    _is_one_of(model, models) or any(_calls(model, cls.__name__))
                ):
                    for arguments in _tried_by(node, tool, tree, known, path):
                        yield arguments
                        found += 1
            if found == MOST_CALLS:
                return


def _is_one_of(node: ast.expr, names: Set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _tried_by(
    node: ast.Call, tool: str, tree: ast.AST, known: Mapping[str, Any], path: Path
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    # What a tool that counts or exports a model calls it with: inputs, or their shapes, with the batch or without. Of
    # values that nothing says, fractions fit most, as times of a day do.
    given = node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords if k.arg in TOOLS[tool]), None)
    found = _evaluated(ast.Call(node.func, [given], []), tree, known, path, whole=True) if given is not None else None
    value = found[0][0] if found is not None else None
    if isinstance(value, torch.Tensor):
        yield (value,), {}
    elif isinstance(value, (tuple, list)) and value:
        if any(isinstance(one, torch.Tensor) for one in value):
            yield tuple(value), {}
        if shapes := _shapes_in(value):
            yield tuple(torch.rand(1, *shape[1:]) for shape in shapes), {}
            yield tuple(torch.rand(1, *shape) for shape in shapes), {}


def _shapes_in(value: Sequence[Any]) -> list[tuple[int, ...]]:
    # The shapes that a value says, one or several; none where it says anything else.
    several = value if all(isinstance(one, (tuple, list)) for one in value) else [value]
    if all(type(n) is int and n > 0 for shape in several for n in shape):
        return [tuple(shape) for shape in several]
    return []


def _names_of(tree: ast.AST, name: str) -> Iterator[str]:
    # The names that an object of the class, or one moved to a device, is assigned to.
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(target)], value) if any(_calls(value, name)):
                yield target


def _evaluated(
    node: ast.Call, tree: ast.AST, known: Mapping[str, Any], path: Path, whole: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    # The arguments of a call that has tensors among them; whole: of any call.
    call = ast.Call(ast.Name("_given", ast.Load()), node.args, node.keywords)
    given = ast.Tuple([*node.args, *(k.value for k in node.keywords)], ast.Load())
    names = _values_with_imports(given, tree, known, path)
    if names is None:
        return None
    try:
        text = ast.unparse(ast.fix_missing_locations(call))
        args, kwargs = eval(text, {**names, "_given": lambda *args, **kwargs: (args, kwargs)})
    except (Exception, SystemExit):  # a value that this text alone does not give
        return None
    has_tensors = any(isinstance(v, torch.Tensor) for v in (*args, *kwargs.values()))
    return (args, kwargs) if whole or has_tensors else None


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name(called) | ast.Attribute(_, called)) if called == name:
                yield node


def _texts(path: Path, name: str) -> Iterator[tuple[str, ast.AST]]:
    root = repository_of(path)
    for source, tree in _parsed(path.name, path.read_text(encoding="utf-8", errors="replace")):
        # A class or a factory of the file itself calls with what it was given.
        defined = (ast.ClassDef, ast.FunctionDef)
        kept = [n for n in tree.body if not isinstance(n, defined) or TRIES.search(n.name)]
        yield source, ast.Module(kept, [])
        yield from _docstrings(tree, name)
    for file in sorted({*root.glob("*.md"), *path.parent.glob("*.md")}):
        text = file.read_text(encoding="utf-8", errors="replace")
        for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.S):
            for source, tree in _parsed(file.name, re.sub(r"^(>>> |\.\.\. )", "", block, flags=re.M)):
                if name in block and imports_class(tree, name, path, root) is not False:
                    yield source, tree
    usual = (root, root / "tests", root / "test", root / "examples", path.parent)
    folders = (*usual, *sorted(f for f in root.iterdir() if f.is_dir() and not f.name.startswith(".")))
    scripts = (file for folder in dict.fromkeys(folders) for file in sorted(folder.glob("*.py")) if file != path)
    for file in itertools.islice(scripts, MOST_FILES):
        text = file.read_text(encoding="utf-8", errors="replace")
        if f"{name}(" in text and f"class {name}(" not in text:
            yield from (
                (source, tree) for source, tree in _parsed(file.name, text) if imports_class(tree, name, path, root)
            )


def _docstrings(tree: ast.Module, name: str) -> Iterator[tuple[str, ast.AST]]:
    # The examples, as doctest has them, in the docstrings of the class, of its methods, and of the file.
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    methods = [node for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)]
    nodes: list[ast.ClassDef | ast.FunctionDef | ast.Module] = [*classes, *methods, tree]
    for node in nodes:
        try:
            examples = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
        except ValueError:  # its lines are not laid out as examples are
            continue
        if examples:
            yield from _parsed(f"{name}'s docstring", "".join(example.source for example in examples))


def imports_class(tree: ast.AST, name: str, path: Path, root: Path) -> bool | None:
    """Whether `tree` has the class `name` from the file at `path`; None where it imports none of that name.

    Two files of a repository may each have a class of this name, of other sizes. A package may hand the name on.
    """
    below = path.relative_to(root).parts if path.is_relative_to(root) else (path.name,)
    homes = {path.stem, *below[:-1]}
    found: bool | None = None
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module, aliases) if any(alias.name in (name, "*") for alias in aliases):
                is_home = module is None or module.rpartition(".")[2] in homes
                found = found or (is_home if is_home or any(alias.name == name for alias in aliases) else found)
            case ast.Import(aliases) if any(alias.name.rpartition(".")[2] in homes for alias in aliases):
                found = True
            case ast.ImportFrom(_, aliases) if any(alias.name in homes for alias in aliases):
                found = True
    return found


def _parsed(source: str, text: str) -> Iterator[tuple[str, ast.Module]]:
    try:
        yield source, ast.parse(text)
    except (SyntaxError, ValueError):
        return


def _values_with_imports(node: ast.AST, tree: ast.AST, known: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    # As `_values`, with what the text imports where it is needed: an import takes its time.
    names = _values(node, tree, known)
    if names is not None:
        return names
    imported = _imported({n.id for n in ast.walk(node) if isinstance(n, ast.Name)}, tree, path)
    return _values(node, tree, {**imported, **known}) if imported.keys() - known.keys() else None


def _values(node: ast.AST, tree: ast.AST, known: Mapping[str, Any], depth: int = 0) -> dict[str, Any] | None:
    # The values of the names that `node` uses, by name; None where one has none.
    values: dict[str, Any] = {}
    bound = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - bound:
        if name in known:
            values[name] = known[name]
            continue
        given = next(_assigned(tree, name), None) if depth < DEEPEST else None
        inner = _values(given, tree, known, depth + 1) if given is not None else None
        if given is None or inner is None:
            return None
        try:
            values[name] = eval(compile(ast.Expression(given), "<snippet>", "eval"), dict(inner))
            for attribute, value in _attributes_set(tree, name):
                setattr(values[name], attribute, value)
        except (Exception, SystemExit):  # a value that this text alone does not give
            return None
    return values


def _attributes_set(tree: ast.AST, name: str) -> Iterator[tuple[str, Any]]:
    # What the text writes into an object after it made it, as configs are often filled.
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Attribute(ast.Name(target), attribute)], ast.Constant(value)) if target == name:
                yield attribute, value


def _assigned(tree: ast.AST, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(target)], value) if target == name:
                yield value
