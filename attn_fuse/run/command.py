"""The command line: ``python -m attn_fuse.run [OPTIONS] SCRIPT ARGS``, or ``-m MODULE`` in the place of SCRIPT."""

from __future__ import annotations

import argparse
import atexit
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_fuse.files import unwritable
from attn_fuse.run.program import CannotRun, Program, show_program_frames_alone

if TYPE_CHECKING:
    from attn_fuse.run.watch import Watch

_TOTALS = ("attentions", "fused", "left_as_written")


def main(argv: Sequence[str]) -> int:
    """Run the program that `argv` names; gives the exit code, 2 after one line where there is no such program.

    Whatever the program raises passes through, SystemExit too, except where --explain has stopped the program.
    """
    args = _parser().parse_args(argv)
    program = Program(tuple(args.program if args.module is None else args.module), args.module is not None)
    watched = _Watched(program, args)
    if problem := watched.begin():
        return _refused(problem)
    # It runs after the program's threads, and after what the program does at its exit.
    atexit.register(watched.at_exit)
    try:
        program.run()
    except CannotRun as error:
        atexit.unregister(watched.at_exit)
        watched.end()
        return _refused(str(error))
    except BaseException:
        if not watched.is_stopped:
            show_program_frames_alone()
            raise
    if watched.is_stopped:
        # What the program has left running need not end by itself.
        multiprocessing = sys.modules.get("multiprocessing")
        for process in multiprocessing.active_children() if multiprocessing else ():
            if not process.daemon:  # the others end at exit
                process.terminate()
        atexit._run_exitfuncs()
    return 0


def _refused(why: str) -> int:
    print(f"attn_fuse.run: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attn_fuse.run",
        usage="python -m attn_fuse.run [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]",
        description="Run a program with its attention fused, and say at its end what became of each attention.",
        epilog="Options come before the script; what follows it is the script's.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script, a folder or an archive")
    parser.add_argument("--explain", action="store_true", help="only look, and stop the program after its first step")
    parser.add_argument("--steps", metavar="N", help="with --explain: stop after N steps (1)")
    parser.add_argument("--only-compiled", action="store_true", help="leave what the program does not compile itself")
    parser.add_argument("--pick", help="as the option of the backend: fastest, measured or fused")
    parser.add_argument("--kernels", help="names of the only kernels to use, with commas between")
    parser.add_argument(
        "--repro", type=Path, metavar="DIR", help="write a script there for each attention that attn_fuse fails on"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page, with pictures of masks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    return parser


class _Watched:
    """A program with a watch over it, from its own import of torch on, and the report at the end."""

    def __init__(self, program: Program, args: argparse.Namespace) -> None:
        self._program, self._args = program, args
        # The program may go to another folder, or fork.
        self._files = {name: path and path.resolve() for name, path in (("html", args.html), ("json", args.json))}
        self._scripts = args.repro and args.repro.resolve()
        self._process: int | None = os.getpid()
        self._at_import = _AtImport(self._watch_now)
        self._watch: Watch | None = None
        self._problem = "the program did not import torch"

    @property
    def is_stopped(self) -> bool:
        """Whether --explain has stopped the program."""
        return self._watch is not None and self._watch.steps is not None and self._watch.steps.ended != ""

    def begin(self) -> str:
        """Watch as soon as the program has imported torch; a problem with the command line in words, else ""."""
        if not self._program.argv:
            return "name a script, or a module with -m"
        if (steps := self._args.steps) is not None and not self._args.explain:
            return "--steps goes with --explain: without it the program runs to its end"
        if steps is not None and not (steps.isdecimal() and int(steps) > 0):
            return f"--steps {steps}: name a whole number above 0"
        for name, path in self._files.items():
            if path is not None and (problem := unwritable(f"--{name}", getattr(self._args, name))):
                return problem
        if self._scripts is not None and self._scripts.exists() and not self._scripts.is_dir():
            return f"--repro {self._args.repro}: that is a file, name a folder"
        if not (self._options().keys() & {"pick", "kernels"}) and "torch" not in sys.modules:
            sys.meta_path.insert(0, self._at_import)
            return ""
        from attn_fuse.errors import OptionError
        from attn_fuse.options import parse_options

        try:
            parse_options(self._options())
        except OptionError as error:
            return str(error)
        self._watch_now()
        return ""

    def _options(self) -> dict[str, Any]:
        kernels = self._args.kernels and [name.strip() for name in self._args.kernels.split(",")]
        options = {"pick": self._args.pick, "kernels": kernels, "repro": self._scripts and str(self._scripts)}
        return {name: value for name, value in options.items() if value}

    def _watch_now(self) -> None:
        try:
            from attn_fuse.run.steps import Steps
            from attn_fuse.run.watch import Watch

            steps = Steps(int(self._args.steps or 1)) if self._args.explain else None
            watch = Watch(steps, self._args.only_compiled, self._options(), draws=self._args.html is not None)
            watch.begin()
            self._watch = watch
        except Exception as error:  # the program runs all the same
            self._problem = f"the program was not watched: {type(error).__name__}: {error}"

    def end(self) -> None:
        """Watch no longer."""
        self._at_import.end()
        if self._watch is not None:
            self._watch.end()

    def at_exit(self) -> None:
        """Report, and leave a program that was stopped at once: what it holds may not be ready to be torn down."""
        self.end()
        if os.getpid() == self._process and os.environ.get("RANK", "0") == "0":  # torchrun's number of the process
            self._report()
        self._process = None
        if self.is_stopped:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # the program may have closed it
                    stream.flush()
            os._exit(0)

    def _report(self) -> None:
        if self._watch is None:
            _say(f"attn_fuse.run: {self._problem}")
            return
        try:
            from attn_fuse.explain.explanation import part_of
            from attn_fuse.explain.page import page

            title, told, notes = str(self._program), self._watch.explanations, list(_notes(self._watch))
            with redirect_stdout(sys.__stderr__):  # whose width and colours the text takes
                _say("\n\n".join([f"attn_fuse.run: {title}", *map(str, told), *notes]))
            if (file := self._files["html"]) is not None:
                file.write_text(page(title, [part_of(one) for one in told], notes=notes), encoding="utf-8")
            if (file := self._files["json"]) is not None:
                models = [one.as_json() for one in told]
                totals = {name: sum(model[name] for model in models) for name in _TOTALS}
                data = {"program": title, **totals, "models": models, "notes": notes}
                file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        except Exception as error:  # the program's exit code stays the program's
            _say(f"attn_fuse.run: the report failed: {type(error).__name__}: {error}")


def _notes(watch: Watch) -> Iterator[str]:
    if not any(explanation.sites for explanation in watch.explanations):
        left = ", and --only-compiled leaves what the program does not compile" if watch.only_compiled else ""
        yield (
            f"no attention was seen{left}. A plain function is looked at where it stands under @torch.compile, and "
            "processes that the program starts are not looked at."
        )
    if watch.steps is not None:
        ended = watch.steps.ended
        yield f"stopped after {ended}; --steps N goes on." if ended else "the program ended by itself."


def _say(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)


class _AtImport:
    """A finder of modules that calls `then` once torch is imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        self.end()
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        loader: Any = spec and spec.loader
        if loader is not None:  # of this spec alone, which may also be asked for and not used
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                del loader.exec_module
                self.end()
                execute(module)
                self._then()

            loader.exec_module = exec_module
        return spec

    def end(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
