"""What `python -m attn_fuse.run` runs, it runs as Python does: the tests compare both, with programs without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHAT_IT_IS = '''
"""A docstring."""
import sys
print(sorted((name, value if isinstance(value, str) else type(value)) for name, value in globals().items()))
print(sys.argv, sys.path[0], vars(sys.modules["__main__"]) is globals(), __spec__ and __spec__.name)
'''
ENDS = """
import sys, os, signal
how = sys.argv[1]
def fail():
    raise ValueError("boom")
if how == "number":
    sys.exit(3)
if how == "text":
    sys.exit("bye")
if how == "error":
    fail()
if how == "chain":
    try:
        fail()
    except ValueError as error:
        raise RuntimeError("outer") from error
if how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
if how == "terminate":
    os.kill(os.getpid(), signal.SIGTERM)
if how == "hook":
    sys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_frame.f_code.co_name, trace.tb_lineno)
    fail()
"""


def python(folder: Path, *args: str, ours: bool = True, text: str = "") -> subprocess.CompletedProcess[str]:
    """`python ARGS` in `folder`, through `run` or not."""
    through = ["-m", "attn_fuse.run"] if ours else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *through, *args], cwd=folder, env=environment, input=text, capture_output=True, text=True
    )


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with a script, a package, a folder and an archive that can be run."""
    for place in ("script.py", "package/module.py", "package/__main__.py", "folder/__main__.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(WHAT_IT_IS)
    (tmp_path / "package/__init__.py").write_text("import sys\nprint(sys.argv)\n")
    (tmp_path / "package/fails.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link.py").symlink_to(tmp_path / "script.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", WHAT_IT_IS)
    (tmp_path / "ends.py").write_text(ENDS)
    (tmp_path / "wrong.py").write_text("x = = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    "args",
    [
        ["script.py", "a", "--help", "-m", "b"], ["elsewhere/link.py"], ["folder", "--explain"], ["archive.zip"],
        ["-m", "package.module", "--lr", "1e-3"], ["-m", "package", "--steps", "2"],
    ],
)  # fmt: skip
def test_a_program_sees_what_it_sees_in_python(args: list[str], programs: Path) -> None:
    got, wanted = python(programs, *args), python(programs, *args, ours=False)
    assert (got.stdout, got.returncode) == (wanted.stdout, 0)


@pytest.mark.parametrize("how", ["number", "text", "error", "chain", "interrupt", "terminate", "hook", ""])
def test_a_program_ends_as_in_python(how: str, programs: Path) -> None:
    args = ["ends.py", how] if how else ["wrong.py"]
    got, wanted = python(programs, *args), python(programs, *args, ours=False)
    assert (got.stdout, got.returncode) == (wanted.stdout, wanted.returncode)
    report = "" if how == "terminate" else "attn_fuse.run: the program did not import torch\n"
    assert got.stderr == wanted.stderr + report


def test_a_module_whose_import_fails_shows_where(programs: Path) -> None:
    got = python(programs, "-m", "package.fails")
    assert got.returncode == 1 and "attn_fuse/run" not in got.stderr
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in got.stderr


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([], "name a script, or a module with -m"),
        (["-m"], "name a script, or a module with -m"),
        (["nothing.py"], "nothing.py: no such file or directory"),
        (["elsewhere"], "can't find '__main__' module in '{folder}/elsewhere'"),
        (["-m", "nothing"], "No module named nothing"),
        (["-m", "package.nothing"], "No module named package.nothing"),
        (["-m", "xml"], "No module named xml.__main__; 'xml' is a package and cannot be directly executed"),
        (["--steps", "2", "script.py"], "--steps goes with --explain: without it the program runs to its end"),
        (["--explain", "--steps", "0", "script.py"], "--steps 0: name a whole number above 0"),
        (["--json", "nowhere/x.json", "script.py"],
         "--json nowhere/x.json: it cannot be written; name a file in a folder that exists"),
    ],
)  # fmt: skip
def test_what_is_no_program_is_one_line_and_exit_code_2(args: list[str], why: str, programs: Path) -> None:
    done = python(programs, *args)
    assert (done.stderr, done.returncode) == (f"attn_fuse.run: {why.format(folder=programs)}\n", 2)


def test_options_come_before_the_program(programs: Path) -> None:
    assert "--only-compiled" in python(programs, "--help").stdout
    done = python(programs, "--explain", "--steps", "3", "--only-compiled", "script.py", "--steps")
    assert "['script.py', '--steps']" in done.stdout
    (programs / "script.py").write_text("import argparse\nargparse.ArgumentParser(description='its own').parse_args()")
    assert "its own" in python(programs, "script.py", "--help").stdout


def test_the_programs_processes_pickles_and_input_work(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("""
import atexit, multiprocessing, pickle

class Point:
    x = 3

def work(point):
    return point.x + 1

print("imported as", __name__)
if __name__ == "__main__":
    atexit.register(print, "at exit")
    print(input(), type(pickle.loads(pickle.dumps(Point()))) is Point)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [Point()]))
""")
    got, wanted = (python(tmp_path, "script.py", ours=ours, text="a line\n") for ours in (True, False))
    assert got.stdout == wanted.stdout and "[4]" in got.stdout and got.returncode == 0
