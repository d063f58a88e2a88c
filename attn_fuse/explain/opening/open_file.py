"""A Python file as a module: its repository on the path, what it lacks stood in for, what it runs cut off.

A file that only defines classes will do, and so will a script: what fails or trains at the top of the file is left out.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.environment import environment_for
from attn_fuse.explain.opening.no_gpu import Sources, on_the_cpu
from attn_fuse.explain.opening.older import byte_masks, older_layers, older_names
from attn_fuse.explain.opening.own_compile import without_own_compile
from attn_fuse.explain.opening.stand_ins import standing_in
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.roots import is_users, projects_around, repository_of
from attn_fuse.explain.steps import TimeUp, limited

# Seconds that importing a file may take unless the user says otherwise: a script that trains shows itself by then.
IMPORT_LIMIT = 60.0

# How the note on statements that were left out begins.
LEFT_OUT = "left out of"

Say = Callable[[str], object]


@dataclass(frozen=True)
class _Run:
    # How files are run: in how many seconds each, and what may supply what an error lacks. is_users: whether a file is
    # of the repository. mended: those that were run without the statements that raise.
    limit: float
    supplies: Callable[[BaseException], bool]
    is_users: Callable[[str], bool]
    say: Say
    mended: set[Path] = field(default_factory=set)


@contextlib.contextmanager
def imported(path: Path, say: Say = lambda note: None, limit: float = IMPORT_LIMIT) -> Iterator[types.ModuleType]:
    """The file at `path` as a module; within the block it stands in `sys.modules`, and its import roots on `sys.path`.

    A file inside a package is imported as a module of that package, so that its relative imports work. Packages that
    are not installed are stood in for, and statements that raise or run longer than `limit` seconds are left out;
    `say` is told of both in one line each.
    Raises ExplainError where there is no such file, or where importing it leaves no class and no function.
    """
    if not path.is_file():
        raise ExplainError(f"{path}: {'this is a directory' if path.is_dir() else 'no such file'}; pass a Python file")
    path = path.resolve()
    if path.suffix != ".py":
        raise ExplainError(f"{path}: not a Python file; pass one that ends in .py")
    tree = _parsed(path)
    root, name = _root_and_name(path, tree)
    repository = repository_of(path)
    between = [folder for folder in path.parents if folder.is_relative_to(repository)]
    # An example has its own README, and imports the package around it.
    around = projects_around(repository)
    beside = [path.parent] if _imports_from_beside(tree, path, root) else []
    first = list(dict.fromkeys((*beside, root, repository, repository / "src")))
    # A folder within a package may have the name of a library that the package imports.
    # Nor may a file hide the package that it is in, which may be without __init__.py.
    package = path.relative_to(repository).parts[0]
    last = [
        folder
        for folder in (*reversed(between), *around)
        if folder not in first and not (folder / f"{package}.py").is_file()
    ]
    roots = list(dict.fromkeys((*first, *last)))
    before, argv, stdin = set(sys.modules), sys.argv, sys.stdin
    kept_path = list(sys.path)
    sys.path[:] = [*map(str, filter(Path.is_dir, first)), *kept_path, *map(str, filter(Path.is_dir, last))]
    sys.argv = [str(path)]
    try:
        with (
            open(os.devnull) as nothing,
            standing_in(roots, say) as finder,
            older_names(),
            byte_masks(say),
            older_layers(say),
            without_own_compile(finder.is_users, say),
            _without_gpu(roots) as moved,
            environment_for(repository, say) as set_variable,
        ):
            sys.stdin = nothing
            if not torch.cuda.is_available() and on_the_cpu(tree):
                moved.append(path.name)
            with same_folder_after():

                def supplies(error: BaseException) -> bool:
                    if isinstance(error, (ImportError, AttributeError)):
                        return finder.supplies(error)
                    return set_variable(error)

                run = _Run(limit, supplies, lambda file: is_users(file, roots), say)
                try:
                    module = _module(path, name, tree, say, run)
                except ExplainError as error:
                    other = _begins_with(error.__cause__, name)
                    if other is None:
                        raise
                    _forget_new(before, name, roots)
                    with contextlib.suppress(Exception, SystemExit, TimeUp), limited(limit):
                        importlib.import_module(other)
                    module = _module(path, name, tree, say, run)
            if moved:
                say("no GPU here: what its files put on cuda is on the CPU")
            if absent := [name for name in finder.names if name not in finder.broken]:
                say(f"not installed, and stood in for: {', '.join(absent)}")
            for package, raised in finder.broken.items():
                say(f"stood in for {package}, whose import raises {raised}")
            finder.permissive = False
            yield module
    finally:
        sys.argv, sys.stdin = argv, stdin
        sys.path[:] = kept_path
        _forget_new(before, name, roots)


def _forget_new(before: set[str], name: str, roots: Sequence[Path]) -> None:
    # All are judged before any is gone: where a namespace package lies is asked of its parent.
    new = [other for other in set(sys.modules) - before if other == name or _is_below(sys.modules[other], roots)]
    for other in new:
        sys.modules.pop(other, None)


def _begins_with(error: BaseException | None, name: str) -> str | None:
    # Of modules that import one another, and that failed as the one called `name` was imported first: the one that was
    # to be.
    if not isinstance(error, ImportError) or not (error.name == name or "circular import" in str(error)):
        return None
    innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return str(innermost.f_globals.get("__name__"))


def _imports_from_beside(tree: ast.Module, path: Path, root: Path) -> bool:
    # Whether the file imports, by a bare name, what stands beside it and not in its import root.
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(str() as module, _, 0):
                names.add(module.partition(".")[0])
            case ast.Import(aliases):
                names.update(alias.name.partition(".")[0] for alias in aliases)
    # Not the file itself, by the name of a package around it.
    return any(_is_in(path.parent, name) and not _is_in(root, name) for name in names - {path.stem})


def _is_in(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


@contextlib.contextmanager
def _without_gpu(roots: Sequence[Path]) -> Iterator[list[str]]:
    # Within the block files below `roots` are loaded for the CPU where there is no GPU; the list has what asks for one.
    moved: list[str] = []
    if torch.cuda.is_available():
        yield moved
        return
    sources = Sources(roots, lambda: moved.append("cuda"))
    sys.meta_path.insert(0, sources)
    try:
        yield moved
    finally:
        sys.meta_path.remove(sources)


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ExplainError(f"{path} cannot be imported: {in_one_line(error)}") from error


def _root_and_name(path: Path, tree: ast.Module) -> tuple[Path, str]:
    # The directory to import from, and the dotted name that the file has there.
    root, parts = path.parent, [path.stem]
    levels = max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)
    while root.name.isidentifier() and ((root / "__init__.py").is_file() or len(parts) <= levels):
        root, parts = root.parent, [root.name, *parts]
    repository = repository_of(path)
    below = path.relative_to(repository).with_suffix("").parts
    # A file that has the name of a package that it is in, and that is without __init__.py, would hide the package.
    if len(parts) == 1 < len(below) and below[0] == path.stem and all(map(str.isidentifier, below)):
        root, parts = repository, list(below)
    if len(parts) > 1:
        return root, ".".join(parts)
    # Where another module has the file's name already, the file goes by a longer one.
    name = path.stem
    while name in sys.modules:
        name = f"_{name}"
    return root, name


def _is_below(module: types.ModuleType, roots: Sequence[Path]) -> bool:
    file = getattr(module, "__file__", None)
    try:
        places = [file] if file else list(getattr(module, "__path__", ()))
    except KeyError:  # a namespace package whose parent held a stand-in and is gone
        return True
    return any(is_users(place, roots) for place in places)


def _module(path: Path, name: str, tree: ast.Module, say: Say, run: _Run) -> types.ModuleType:
    known = sys.modules.get(name)
    if known is not None and _is_whole(known, path):
        return known
    if known is not None:
        file = getattr(known, "__file__", None) or "another module"
        raise ExplainError(f"{path} cannot be imported: {file} is imported as {name} already")
    _import_packages(name, path, run)
    if name in sys.modules and _is_whole(sys.modules[name], path):
        return sys.modules[name]
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    _run(module, path, tree, say, run)
    _define_what_main_assigns(module, tree, say)
    return module


def _is_whole(module: types.ModuleType, path: Path) -> bool:
    # Whether the package's own __init__ has imported the file without a problem.
    source = getattr(module, "__file__", None)
    spec = getattr(module, "__spec__", None)
    return source is not None and Path(source).resolve() == path and not getattr(spec, "_initializing", False)


def _import_packages(name: str, path: Path, run: _Run) -> None:
    # Imports the packages above `name`; one whose __init__ raises has what the statements define that do not.
    *packages, _ = name.split(".")
    folder = path.parents[len(packages) - 1] if packages else path.parent
    for depth in range(1, len(packages) + 1):
        package, place = ".".join(packages[:depth]), folder
        folder = folder / packages[depth] if depth < len(packages) else folder
        try:
            with limited(run.limit):
                if _place_of(importlib.import_module(package)) == place:
                    continue
        except (Exception, SystemExit, TimeUp):
            pass
        loaded = sys.modules.get(package)
        if loaded is not None and _place_of(loaded) not in (None, place):
            raise ExplainError(f"{path} cannot be imported: {loaded} is imported as {package} already")
        if loaded is None:
            partial = sys.modules[package] = types.ModuleType(package)
            partial.__path__, partial.__package__ = [str(place)], package
            _run_init(partial, place / "__init__.py", run)


def _run_init(package: types.ModuleType, path: Path, run: _Run) -> None:
    if not path.is_file():
        return
    package.__file__ = str(path)
    with contextlib.suppress(ExplainError):
        _executed(package, path, _parsed(path), run)


def _place_of(package: types.ModuleType) -> Path | None:
    places = list(getattr(package, "__path__", ()))
    return Path(places[0]).resolve() if places else None


def _run(module: types.ModuleType, path: Path, tree: ast.Module, say: Say, run: _Run) -> None:
    left_out, first = _executed(module, path, tree, run)
    if first is None:
        return
    if not any(_is_model(value, module) for value in vars(module).values()):
        sys.modules.pop(module.__name__, None)
        raise ExplainError(f"{path} cannot be imported: {_why(first, run.limit)}") from first
    say(_of_left_out(path, left_out))


def _executed(
    module: types.ModuleType, path: Path, tree: ast.Module, run: _Run
) -> tuple[list[str], BaseException | None]:
    """Run the file's statements in `module`, without those that raise: these in words, and what the first raised."""
    flags = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                flags |= getattr(__future__, alias.name).compiler_flag
    left_out = [f"line {s.lineno} (it trains)" for s in tree.body if _trains(s)]
    remaining: list[ast.stmt] = [s for s in tree.body if not _trains(s)]
    first: BaseException | None = TimeUp() if left_out else None
    causes: dict[ast.stmt, BaseException] = {}
    while remaining:
        code = compile(ast.Module(remaining, []), str(path), "exec", flags, dont_inherit=True)
        try:
            with limited(run.limit):
                exec(code, vars(module))
            break
        except (Exception, SystemExit, TimeUp) as error:
            line = _line_of(error, path)
            index = next((i for i, s in enumerate(remaining) if line <= (s.end_lineno or s.lineno)), len(remaining) - 1)
            statement = remaining[index]
            if isinstance(error, FileNotFoundError) and moved_to_its_files(error, path):
                remaining = remaining[index:]
                continue
            if run.supplies(error):
                remaining = remaining[index:]
                continue
            if _imported_without(error, path, run):
                remaining, causes[statement] = remaining[index:], error
                continue
            cause = causes.get(statement, error)
            first = first or cause
            left_out.append(f"line {statement.lineno} ({_in_words(cause, run.limit)})")
            remaining = remaining[index + 1 :]
            if not isinstance(statement, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)):
                # What follows a program that failed belongs to that program, but for what it defines.
                remaining = [s for s in remaining if _defines(s)]
    return left_out, first


def _imported_without(error: BaseException, path: Path, run: _Run) -> bool:
    """Run the file of the repository that raised while `path` imported it, without the statements that raise.

    False where `path` itself raised, a library did, or the file was run so before.
    """
    if isinstance(error, TimeUp):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    file = Path(frames[-1].f_code.co_filename) if frames else path
    if file == path or file in run.mended or not (file.is_file() and run.is_users(str(file))):
        return False
    run.mended.add(file)
    name = str(frames[-1].f_globals.get("__name__"))
    module = types.ModuleType(name)
    module.__file__, module.__package__ = str(file), name.rpartition(".")[0]
    if file.name == "__init__.py":
        module.__path__, module.__package__ = [str(file.parent)], name
    sys.modules[name] = module
    with contextlib.suppress(ExplainError):
        left_out, _ = _executed(module, file, _parsed(file), run)
        run.say(_of_left_out(file, left_out))
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], own, module)
    return True


def _of_left_out(path: Path, left_out: Sequence[str]) -> str:
    return f"{LEFT_OUT} {path.name}: {', '.join(left_out[:3])}" + (", ..." if len(left_out) > 3 else "")


def _trains(statement: ast.stmt) -> bool:
    """Whether it is a loop with a backward pass, which a script runs for hours."""
    return isinstance(statement, (ast.For, ast.While)) and any(
        isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(statement)
    )


def moved_to_its_files(error: FileNotFoundError, path: Path) -> bool:
    """Go to the folder above `path` that has the file that was not found; whether there is one.

    A script is run in its own folder, or in its repository's.
    """
    wanted = Path(str(error.filename))
    if wanted.is_relative_to(Path.cwd()):
        wanted = wanted.relative_to(Path.cwd())
    if error.filename is None or wanted.is_absolute():
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


def _is_model(value: object, module: types.ModuleType) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__


def _why(error: BaseException, limit: float) -> str:
    if isinstance(error, SystemExit):
        return "it exits; keep what it runs under __main__"
    if isinstance(error, TimeUp):
        return (
            f"it runs a program of more than {limit:g} s; keep what it runs under __main__, "
            f"or give more with --time-limit"
        )
    return in_one_line(error)


def _in_words(error: BaseException, limit: float) -> str:
    if isinstance(error, SystemExit):
        return "it exits"
    return f"it runs more than {limit:g} s" if isinstance(error, TimeUp) else in_one_line(error)


def _line_of(error: BaseException, path: Path) -> int:
    # The line of the file's own top level at which `error` came up.
    trace, line = error.__traceback__, 0
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == str(path) and code.co_name == "<module>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _defines(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)):
        return True
    return isinstance(statement, (ast.Assign, ast.AnnAssign)) and not _calls(statement, ())


def _calls(statement: ast.AST, allowed: Sequence[str]) -> bool:
    return any(
        isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in allowed)
        for node in ast.walk(statement)
    )


def _define_what_main_assigns(module: types.ModuleType, tree: ast.Module, say: Say) -> None:
    # Tutorials set the sizes that their classes read as global names under `if __name__ == "__main__"`.
    read = {
        node.id
        for top in tree.body
        if isinstance(top, (ast.ClassDef, ast.FunctionDef))
        for node in ast.walk(top)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    taken: list[str] = []
    for block in (top for top in tree.body if isinstance(top, ast.If) and "__name__" in ast.unparse(top.test)):
        for statement in block.body:
            if not isinstance(statement, ast.Assign) or _calls(
                statement, ("len", "enumerate", "range", "dict", "list")
            ):
                continue
            # What no class reads may be part of another value that one reads.
            scope = dict(vars(module))
            try:
                exec(compile(ast.Module([statement], []), str(module.__file__), "exec"), scope)
            except Exception:  # a value that needs more than this block says
                continue
            for new in scope.keys() - vars(module).keys():
                setattr(module, new, scope[new])
                if new in read:
                    taken.append(new)
    if taken:
        say(f"from under __main__: {', '.join(taken)}")
