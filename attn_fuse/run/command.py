"""The command line: ``python -m attn_fuse.run [OPTIONS] SCRIPT ARGS``, or ``-m MODULE`` in place of SCRIPT."""

from __future__ import annotations

import argparse
import atexit
import importlib.machinery
import importlib.util
import json
import os
import shlex
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attn_fuse.files import not_ours, unwritable
from attn_fuse.run.program import CannotRun, Program, show_program_frames_alone

if TYPE_CHECKING:
    from attn_fuse.run.watch import Watch

_TOTALS = ("attentions", "fused", "left_as_written")


def main(argv: Sequence[str]) -> int:
    """Run the program that `argv` names; exit with code 2 after one line if there is no such program.

    Whatever the program raises passes through, SystemExit too, unless --explain has stopped the program.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    program = Program(tuple(args.program if args.module is None else args.module), args.module is not None)
    _check(parser, program, args)
    watched = _Watched(program, args, argv)
    watched.begin()
    # Runs after the program's threads and its own atexit functions.
    atexit.register(watched.at_exit)
    try:
        program.run()
    except CannotRun as error:
        atexit.unregister(watched.at_exit)
        watched.end()
        parser.error(str(error))
    except BaseException:
        if not watched.is_stopped:
            show_program_frames_alone()
            raise
    if watched.is_stopped:
        import multiprocessing

        # Processes that the program has left running need not end by themselves; daemons are ended at exit.
        for process in multiprocessing.active_children():
            if not process.daemon:
                process.terminate()
        atexit._run_exitfuncs()
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"attn_fuse.run: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m attn_fuse.run",
        usage="python -m attn_fuse.run [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]",
        description="Run a program with its attention fused, and say at its end what became of each attention.",
        epilog="Options come before the script; what follows it is the script's.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script, a folder or an archive")
    parser.add_argument("--explain", action="store_true", help="only look, and stop the program after its first step")
    parser.add_argument("--steps", metavar="N", help="with --explain: stop after N steps (1)")
    parser.add_argument("--only-compiled", action="store_true", help="leave what the program does not compile itself")
    parser.add_argument("--pick", help="as the option of the backend: fastest, measured, memory or fused")
    parser.add_argument("--kernels", help="names of the only kernels to use, with commas between")
    parser.add_argument("--repro", type=Path, metavar="DIR", help="write a script there for each failure of attn_fuse")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as a page, with pictures of masks and biases"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--code", type=Path, metavar="FILE", help="write there the code to write by hand")
    return parser


def _check(parser: argparse.ArgumentParser, program: Program, args: argparse.Namespace) -> None:
    """End with a message if the command line is wrong. Paths become absolute: the program may change its folder."""
    if not program.argv:
        parser.error("name a script, or a module with -m")
    if args.steps is not None and not args.explain:
        parser.error("--steps goes with --explain: without it the program runs to its end")
    if args.steps is not None and not (args.steps.isdecimal() and int(args.steps) > 0):
        parser.error(f"--steps {args.steps}: name a whole number above 0")
    for name in ("html", "json", "code"):
        path = getattr(args, name)
        if path is not None and (problem := unwritable(f"--{name}", path)):
            parser.error(problem)
        setattr(args, name, path and path.resolve())
    if args.code is not None and (problem := not_ours("--code", args.code)):
        parser.error(problem)
    if args.repro is not None and args.repro.exists() and not args.repro.is_dir():
        parser.error(f"--repro {args.repro}: that is a file, name a folder")
    args.repro = args.repro and args.repro.resolve()
    if args.pick or args.kernels:
        from attn_fuse.errors import OptionError
        from attn_fuse.options import parse_options

        try:
            parse_options(_options(args))
        except OptionError as error:
            parser.error(str(error))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the backend."""
    kernels = args.kernels and [name.strip() for name in args.kernels.split(",")]
    options = {"pick": args.pick, "kernels": kernels, "repro": args.repro and str(args.repro)}
    return {name: value for name, value in options.items() if value}


class _Watched:
    """A program with a watch over it from its own import of torch on, and the report at its end."""

    def __init__(self, program: Program, args: argparse.Namespace, argv: Sequence[str]) -> None:
        self._program, self._args, self._argv = program, args, argv
        self._process = os.getpid()
        self._watch: Watch | None = None
        self._problem = "the program did not import torch"

    @property
    def is_stopped(self) -> bool:
        """Whether --explain has stopped the program."""
        return self._watch is not None and self._watch.steps is not None and self._watch.steps.ended != ""

    def begin(self) -> None:
        """Watch as soon as torch is imported."""
        if "torch" in sys.modules:
            self._watch_now()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """The spec of torch, whose import starts the watch. Python asks the finders in sys.meta_path."""
        if name != "torch":
            return None
        self._wait_no_longer()
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        loader: Any = spec and spec.loader
        if loader is not None:  # each spec has its own; not every spec found is imported
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                del loader.exec_module
                self._wait_no_longer()
                execute(module)
                self._watch_now()

            loader.exec_module = exec_module
        return spec

    def _wait_no_longer(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _watch_now(self) -> None:
        try:
            from attn_fuse.run.steps import Steps
            from attn_fuse.run.watch import Watch

            args = self._args
            steps = Steps(int(args.steps or 1)) if args.explain else None
            watch = Watch(steps, args.only_compiled, _options(args), args.html is not None, args.code is not None)
            watch.begin()
            self._watch = watch
        except Exception as error:  # the program runs all the same
            self._problem = f"the program was not watched: {type(error).__name__}: {error}"

    def end(self) -> None:
        """Watch no longer."""
        self._wait_no_longer()
        if self._watch is not None:
            self._watch.end()

    def at_exit(self) -> None:
        """Report, then leave a stopped program at once: its objects may not be ready to be torn down."""
        self.end()
        # The program may have forked. RANK is torchrun's number of the process.
        if os.getpid() == self._process and os.environ.get("RANK", "0") == "0":
            self._report()
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
            from attn_fuse.explain.explanation import code_file, part_of
            from attn_fuse.explain.page import page
            from attn_fuse.report import json_head

            title, told, notes = str(self._program), self._watch.explanations, list(_notes(self._watch))
            with redirect_stdout(sys.__stderr__):  # the text takes its width and colours
                _say("\n\n".join([f"attn_fuse.run: {title}", *map(str, told), *notes]))
            if file := self._args.html:
                command = shlex.join(["python", "-m", "attn_fuse.run", *self._argv])
                text = page(title, [part_of(one) for one in told], notes=notes, command=command)
                file.write_text(text, encoding="utf-8")
            if file := self._args.code:
                file.write_text(code_file(told), encoding="utf-8")
            if file := self._args.json:
                models = [one.as_json() for one in told]
                totals = {name: sum(model[name] for model in models) for name in _TOTALS}
                data = {**json_head(), "program": title, **totals, "models": models, "notes": notes}
                file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        except Exception as error:  # the exit code stays the program's
            _say(f"attn_fuse.run: the report failed: {type(error).__name__}: {error}")


def _notes(watch: Watch) -> Iterator[str]:
    if not any(explanation.sites for explanation in watch.explanations):
        left = ", and --only-compiled ignores modules that the program does not compile" if watch.only_compiled else ""
        yield (
            f"no attention was seen{left}. Plain functions are analysed only under @torch.compile, and processes that "
            "the program starts are not analysed."
        )
    if watch.steps is not None:
        ended = watch.steps.ended
        yield f"stopped after {ended}; use --steps N for more." if ended else "the program ended by itself."


def _say(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)
