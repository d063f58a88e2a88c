"""The command line: ``python -m attn_fuse.explain model.py``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attn_fuse.errors import ExplainError, OptionError
from attn_fuse.explain import explanation_of, name_of
from attn_fuse.explain.explanation import Explanation
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.steps import TimeUp, step
from attn_fuse.explain.subject import add_flags, subject_of
from attn_fuse.files import not_ours, unwritable
from attn_fuse.kernels.elsewhere import Elsewhere, on
from attn_fuse.options import PICKS, parse_options
from attn_fuse.picker.evidence import gpus

_IN_THE_REPORT = Path()
# The limit of compiling, in limits of another step.
COMPILING = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0, or 2 after one line on stderr that says what to pass."""
    args = _parser().parse_args(argv)
    command = shlex.join(["python", "-m", "attn_fuse.explain", *(sys.argv[1:] if argv is None else argv)])
    files = {"--html": args.html, "--code": args.code if args.code != _IN_THE_REPORT else None}
    for flag, file in files.items():
        problem = file and (unwritable(flag, file) or (not_ours(flag, file) if flag == "--code" else ""))
        if problem:
            return _refused(problem)
    try:
        # The model's own prints stay out of the report.
        with contextlib.redirect_stdout(sys.stderr):
            explanation = _explain_path(args)
    except (ExplainError, OptionError) as error:
        return _refused(str(error))
    except TimeUp:
        return _refused(f"{args.path}: it takes too long; give more with --time-limit")
    except (Exception, SystemExit) as error:
        return _refused(f"{args.path}: {in_one_line(error)}; pass a model with --entry, and its --inputs")
    if args.json:
        print(json.dumps(explanation.as_json(args.graph), indent=2))
    else:
        print(explanation.text(args.expression))
        if args.graph:
            print(f"\n{explanation.graphs()}")
    # Last, so that a failure does not cost the text.
    for flag, file in files.items():
        if file is not None:
            try:
                text = explanation.html(command=command) if flag == "--html" else explanation.code()
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                return _refused(f"{flag} {file}: it cannot be written: {error.strerror}")
    return 0


def _refused(why: str) -> int:
    print(f"attn_fuse.explain: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attn_fuse.explain",
        description="Explain what attn_fuse does with each attention of the model in a Python file.",
    )
    add_flags(parser)
    parser.add_argument("--dynamic", action="store_true", help="compile with dynamic shapes")
    parser.add_argument("--on", metavar="GPU", help="report as on a GPU with evidence, such as h200; `info` lists them")
    parser.add_argument("--pick", help=f"{' or '.join(PICKS)}; fused: each site that a kernel can run")
    parser.add_argument("--kernels", help="the only kernels to use, separated by commas")
    parser.add_argument("--json", action="store_true", help="print JSON, with each site by itself")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as a page, with pictures of masks and biases"
    )
    parser.add_argument(
        "--code", nargs="?", const=_IN_THE_REPORT, type=Path, metavar="FILE",
        help="print the code to write by hand for each attention, or write it to FILE",
    )  # fmt: skip
    parser.add_argument("--expression", action="store_true", help="also print each attention as mathematics")
    parser.add_argument("--graph", action="store_true", help="also print the code of each graph, before and after")
    return parser


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    # Dynamo logs a traceback for an operator that raises; our error says it in one line. TORCH_LOGS asks for it.
    before = logging.root.manager.disable
    if "TORCH_LOGS" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _explain_path(args: argparse.Namespace) -> Explanation:
    options = {"pick": args.pick, "kernels": args.kernels and [name.strip() for name in args.kernels.split(",")]}
    options = {name: value for name, value in options.items() if value is not None}
    parse_options(options)
    gpu = None if args.on is None else _gpu(args.on)
    with subject_of(args) as subject, on(gpu):
        model, inputs = subject.model, subject.inputs
        try:
            advice = "pass a smaller model with --entry"
            with _without_logs(), step(f"compiling {name_of(model)}", COMPILING * subject.limit, advice):
                explanation = explanation_of(model, inputs, subject.call, options, args.dynamic, args.code is not None)
        except (ExplainError, OptionError):
            raise
        except Exception as error:
            subject.call_as_written()
            raise ExplainError(
                f"{subject} runs as written, but torch.compile fails on it: {in_one_line(error)}"
            ) from error
        said = subject.said
        if gpu is not None:
            said = (f"as on an {gpu.name}, by measurements there and the rules of torch 2.11; nothing ran on it", *said)
        return dataclasses.replace(explanation, said=said)


def _gpu(name: str) -> Elsewhere:
    known = {gpu.name: gpu for gpu in gpus()}
    found = [gpu for gpu in known.values() if name.lower() in gpu.name.lower()]
    if len(found) != 1 or not name:
        raise OptionError(f"--on {name}: no evidence is on such a GPU, or several match; known: {', '.join(known)}")
    return found[0]
