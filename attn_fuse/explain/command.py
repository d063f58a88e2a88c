"""The command line: ``python -m attn_fuse.explain model.py``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attn_fuse.errors import ExplainError, OptionError
from attn_fuse.explain import explanation_of, name_of
from attn_fuse.explain.explanation import Explanation
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.steps import TimeUp, step
from attn_fuse.explain.subject import add_flags, subject_of
from attn_fuse.files import unwritable
from attn_fuse.options import PICKS, parse_options

# How many times the limit of another step compiling may take.
COMPILING = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code: 0, or 2 after one line on stderr that says what to pass."""
    args = _parser().parse_args(argv)
    if args.html is not None and (problem := unwritable("--html", args.html)):
        return _refused(problem)
    try:
        # What the model's own code prints stays out of the report.
        with contextlib.redirect_stdout(sys.stderr):
            explanation = _explain_path(args)
    except (ExplainError, OptionError) as error:
        return _refused(str(error))
    except TimeUp:
        return _refused(f"{args.path}: it takes too long; give more with --time-limit")
    except (Exception, SystemExit) as error:
        return _refused(
            f"{args.path}: {in_one_line(error)}; name the class with --entry and its arguments with --inputs"
        )
    if args.json:
        print(json.dumps(explanation.as_json(args.graph), indent=2))
    else:
        print(explanation.text(args.expression))
        if args.graph:
            print(f"\n{explanation.graphs()}")
    # Last: the text is not lost where the page is.
    if args.html is not None and (problem := _written(args.html, explanation.html())):
        return _refused(problem)
    return 0


def _written(path: Path, text: str) -> str:
    """Write `text` to `path`; what went wrong, in words, else ""."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"--html {path}: it cannot be written: {error.strerror}"
    return ""


def _refused(why: str) -> int:
    print(f"attn_fuse.explain: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attn_fuse.explain",
        description="Say what attn_fuse makes of every attention of the model in a Python file.",
    )
    add_flags(parser)
    parser.add_argument("--dynamic", action="store_true", help="compile with dynamic shapes")
    parser.add_argument("--pick", help=f"{' or '.join(PICKS)}; fused: every site that some kernel can run")
    parser.add_argument("--kernels", help="names of the only kernels to use, with commas between")
    parser.add_argument("--json", action="store_true", help="print JSON, with every site by itself")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page, with pictures of masks")
    parser.add_argument("--expression", action="store_true", help="print each attention as mathematics, too")
    parser.add_argument("--graph", action="store_true", help="print each graph's code, before and after")
    return parser


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    # Dynamo logs a traceback of an operator that raises, which the one line of our error says; TORCH_LOGS asks for it.
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
    with subject_of(args) as subject:
        model, inputs = subject.model, subject.inputs
        try:
            advice = "pass a smaller model with --entry"
            with _without_logs(), step(f"compiling {name_of(model)}", COMPILING * subject.limit, advice):
                explanation = explanation_of(model, inputs, subject.call, options, args.dynamic)
        except (ExplainError, OptionError):
            raise
        except Exception as error:
            subject.call_as_written()
            raise ExplainError(
                f"{subject} runs as written, but torch.compile fails on it: {in_one_line(error)}"
            ) from error
        return dataclasses.replace(explanation, said=subject.said)
