"""The walk of a new user, timed: a clean clone, the demo, explain on one's own and on other people's repositories.

    python benchmarks/walk.py FOLDER [--trainer PYTHON]

FOLDER holds the repositories of explain_repositories.json as OWNER+NAME (its --clone brings them); explain runs on the
ten of WALKED. The clone, its environment and every cache of compilations are new. --trainer runs the Trainer's tests in
the environment of `make test-ecosystem`, whose packages take longer to download than all the rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from harness import ROOT, store

WALKED = (
    "karpathy/minGPT", "karpathy/llama2.c/model.py", "openai/whisper/whisper/model.py", "openai/CLIP/clip/model.py",
    "facebookresearch/dino/vision_transformer.py", "codertimo/BERT-pytorch/bert_pytorch/model/bert.py",
    "openai/guided-diffusion/guided_diffusion/unet.py", "sooftware/conformer/conformer/model.py",
    "thuml/Time-Series-Library/models/iTransformer.py",
    "jadore801120/attention-is-all-you-need-pytorch/transformer/Models.py",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A step of the walk.

    command: as a user types it. seconds: from the command to the prompt. status: its exit code. said: its last line.
    """

    command: str
    seconds: float
    status: int
    said: str


def taken(command: str, arguments: list[str], folder: Path, environment: dict[str, str]) -> Step:
    """The step of running `arguments` in `folder`; `command` is what it is called."""
    start = time.monotonic()
    ran = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    seconds = time.monotonic() - start
    lines = [line for line in (ran.stdout or ran.stderr).strip().splitlines() if line.strip()]
    step = Step(command, round(seconds, 1), ran.returncode, lines[-1].strip() if lines else "")
    print(f"{step.seconds:7.1f} s  {'' if step.status == 0 else f'exit code {step.status}  '}{command}", flush=True)
    return step


def walk(repositories: Path, trainer: Path | None, minutes: float) -> list[Step]:
    """The steps, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as place:
        home, clone = Path(place), Path(place) / "attn_fuse"
        caches = {"ATTN_FUSE_CACHE": str(home / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor")}
        environment = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **caches}
        python = str(clone / ".venv" / "bin" / "python")

        def run(command: str, *arguments: str, folder: Path = clone) -> Step:
            return taken(command, list(arguments), folder, environment)

        explain = (python, "-m", "attn_fuse.explain")
        steps = [run("git clone", "git", "clone", "-q", str(ROOT), str(clone), folder=home)]
        steps.append(run(f'make demo ARGS="--minutes {minutes:g}"', "make", "demo", f"ARGS=--minutes {minutes:g}"))
        steps.append(run("explain examples/nanogpt/model.py", *explain, "examples/nanogpt/model.py"))
        page = str(home / "report.html")
        steps.append(run("explain ... --html report.html", *explain, "examples/nanogpt/model.py", "--html", page))
        for target in WALKED:
            owner, name, *below = target.split("/")
            path = repositories.joinpath(f"{owner}+{name}", *below).resolve()
            steps.append(run(f"explain {target}", *explain, str(path)))
        steps.append(run("python -m attn_fuse info", python, "-m", "attn_fuse", "info"))
        steps.append(run("examples/export.py", python, "examples/export.py", "--folder", str(home / "out")))
        if trainer is not None:
            tests = (
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "ecosystem",
                "tests/ecosystem/test_trainer.py",
            )
            steps.append(run("the Trainer's tests", str(trainer), *tests))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the repositories are")
    parser.add_argument("--trainer", type=Path, help="the Python of the environment of `make test-ecosystem`")
    parser.add_argument("--minutes", type=float, default=2.0, help="of training in the demo (2)")
    arguments = parser.parse_args()
    steps = walk(arguments.folder, arguments.trainer, arguments.minutes)
    print(store("walk", torch.device("cpu"), {"steps": [asdict(step) for step in steps]}))


if __name__ == "__main__":
    main()
