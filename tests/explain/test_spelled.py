"""Calls that a repository spells out, what of its text runs for them, and what that may not do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_fuse.explain.choose import candidates
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.spelled import Spelled, calls_of, constructions, only_computing, python_files
from attn_fuse.explain.steps import now
from tests.explain.repository import Write, net

GPT = net("width, flavour=2", "self.layer = nn.Linear(width, flavour)")


def spelled_in(path: Path) -> list[Spelled]:
    with imported(path) as module:
        return [*constructions(candidates(module)[0], module)]


# Of each repository its files beside the model's, and the calls that are found in them.
CONSTRUCTIONS: dict[str, tuple[dict[str, str], list[tuple[str, tuple[Any, ...], dict[str, Any]]]]] = {
    "a README": ({"README.md": "```python\nmodel = GPT(3 * 4)\n```"}, [("README.md", (12,), {})]),
    "one with prompts": (
        {"README.md": "```\n>>> n = 4\n>>> model = GPT(width=n)\n```"},
        [("README.md", (), {"width": 4})],
    ),
    "no prose": ({"README.md": "Call GPT(3) to build one.\n"}, []),
    "a script's function, by its defaults": (
        {
            "run.py": "from model import GPT\ndef run(n=4, *, m=3, **more):\n    k = n * 2\n"
            "    return GPT(k, flavour=m)\n"
        },
        [("run.py", (8,), {"flavour": 3})],
    ),
    "names that loops, comprehensions and functions bind": (
        {
            "run.py": "from model import GPT\ndef double(n):\n    return 2 * n\nsizes = [double(n) for n in (2, 3)]\n"
            "table = {}\ntable['flavour'] = sizes[0]\nGPT(sizes[1], **table)\n"
        },
        [("run.py", (6,), {"flavour": 4})],
    ),
    "what is written into, below a condition": (
        {
            "run.py": "from model import GPT\nimport argparse\nif True:\n    p = argparse.ArgumentParser()\n"
            "    p.add_argument('--width', default=5)\n    args = p.parse_args([])\nGPT(args.width)\n"
        },
        [("run.py", (5,), {})],
    ),
    "no other class of that name": ({"run.py": "class GPT:\n    pass\nGPT(3)\n"}, []),
    "no class of that name from elsewhere": ({"run.py": "from no_such_elsewhere import GPT\nGPT(3)\n"}, []),
    "by an alias of its module": ({"run.py": "import model as m\nm.GPT(3)\n"}, [("run.py", (3,), {})]),
    "not what the text does not give": ({"run.py": "from model import GPT\nGPT(unknown)\n"}, []),
    "not what raises": ({"run.py": "from model import GPT\nn = 1 // 0\nGPT(n)\n"}, []),
    "not what ends the program": ({"run.py": "from model import GPT\nimport sys\nGPT(sys.exit(3))\n"}, []),
    "not what reads a file that is not there": ({"run.py": "from model import GPT\nGPT(len(open('x').read()))\n"}, []),
    "what reads one that is": (
        {"run.py": "from model import GPT\nGPT(len(open(__file__[:-6] + 'words.txt').read()))\n", "words.txt": "abc"},
        [("run.py", (3,), {})],
    ),
    "nothing else of the text": (
        {"run.py": "from model import GPT\nprint(torch.nothing)\n1 / 0\nraise SystemExit\nn = 4\nGPT(n)\n"},
        [("run.py", (4,), {})],
    ),
    "not below a file that is no Python": ({"run.py": "from model import GPT\nGPT(3\n"}, []),
    "only in part": (
        {"run.py": "from model import GPT\nGPT(flavour=3, width=len(no_such_words))\n"},
        [("run.py", (), {"flavour": 3})],
    ),
}


@pytest.mark.parametrize(("files", "calls"), CONSTRUCTIONS.values(), ids=CONSTRUCTIONS)
def test_constructions(
    write: Write, files: Mapping[str, str], calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
) -> None:
    for name, text in files.items():
        write(text, name)
    assert [(one.source, one.args, one.kwargs) for one in spelled_in(write(GPT))] == calls


def test_those_that_are_known_in_whole_come_first(write: Write) -> None:
    write("from model import GPT\nGPT(flavour=3, width=len(no_such_words))\nGPT(9)\n", "run.py")
    found = spelled_in(write(GPT))
    assert [one.unknown for one in found] == [0, 1] and found[1].text == "GPT(flavour=3, width=len(no_such_words))"


def test_there_are_only_so_many(write: Write) -> None:
    write("from model import GPT\n" + "".join(f"GPT({n})\n" for n in range(1, 200)), "run.py")
    assert len(spelled_in(write(GPT))) <= 10


def test_a_statement_that_runs_on_is_given_up(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_fuse.explain.spelled._SECONDS", 0.3)
    write("from model import GPT\ndef n():\n    while True: pass\nGPT(n())\n", "run.py")
    start = now()
    assert spelled_in(write(GPT)) == [] and now() - start < 10


def test_nothing_stays_of_what_it_ran(write: Write, tmp_path: Path) -> None:
    before = Path.cwd(), torch.get_rng_state(), {*sys.modules}
    write(
        "from model import GPT\nimport os\nimport torch\ndef n():\n    os.chdir('/')\n    torch.manual_seed(3)\n"
        "    return int(torch.rand(1) > 2) + 3\nGPT(n())\n",
        "run.py",
    )
    assert [one.args for one in spelled_in(write(GPT))] == [(3,)]
    assert Path.cwd() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert {*sys.modules} == before[2]


# Of each text the shapes of the tensors that the calls in it pass.
CALLS: dict[str, tuple[dict[str, str], list[list[int]]]] = {
    "a README": (
        {
            "README.md": "```python\nmodel = GPT(width=3)\nn = 5\nx = torch.randn(2, n, 3)\n"
            "out = model(x, flag=True)\n```"
        },
        [[2, 5, 3]],
    ),
    "by the name that it has there": (
        {"README.md": "```\nimport torch\nnet = GPT(3).eval()\nnet(torch.ones(4, 3))\n```"},
        [[4, 3]],
    ),
    "a test": (
        {
            "tests/run.py": "import torch\nfrom model import GPT\ndef test():\n    net = GPT(3)\n"
            "    net(torch.ones(7, 3))\n"
        },
        [[7, 3]],
    ),
    "no number": ({"README.md": "```\nmodel = GPT(3)\nmodel(3)\n```"}, []),
    "not what the text does not give": ({"README.md": "```\nmodel = GPT(3)\nmodel(load('cat.png'))\n```"}, []),
    "not those of another": ({"README.md": "```\nmodel = GPT(3)\nother(torch.ones(3))\n```"}, []),
}


@pytest.mark.parametrize(("files", "shapes"), CALLS.values(), ids=CALLS)
def test_calls(write: Write, files: Mapping[str, str], shapes: list[list[int]]) -> None:
    for name, text in files.items():
        write(text, name)
    with imported(write(GPT)) as module:
        found = [*calls_of(module.GPT(3), module)]
    assert [list(one.args[0].shape) for one in found] == shapes


def test_files_of_environments_are_no_files_of_the_repository(write: Write, tmp_path: Path) -> None:
    for name in (
        ".venv/lib/site-packages/a.py",
        ".git/b.py",
        "venv/lib/python3.11/site-packages/c.py",
        "node_modules/d.py",
    ):
        write("", name)
    path = write("", "e.py")
    assert python_files(tmp_path) == [path]


FORBIDDEN: dict[str, Callable[[Path], object]] = {
    "open to write": lambda p: open(p / "new", "w"),
    "open to append": lambda p: open(p / "new", "ab"),
    "open to create": lambda p: open(p / "new", "x"),
    "open to change": lambda p: open(p / "there", "r+"),
    "os.open": lambda p: os.open(p / "new", os.O_WRONLY | os.O_CREAT),
    "a path that writes": lambda p: (p / "new").write_text("x"),
    "a path that touches": lambda p: (p / "new").touch(),
    "a folder": lambda p: (p / "new").mkdir(),
    "removing": lambda p: os.remove(p / "there"),
    "renaming": lambda p: os.rename(p / "there", p / "new"),
    "replacing": lambda p: os.replace(p / "there", p / "new"),
    "removing a folder": lambda p: os.rmdir(p / "folder"),
    "removing a tree": lambda p: shutil.rmtree(p / "folder"),
    "copying": lambda p: shutil.copy(p / "there", p / "new"),
    "cutting off": lambda p: os.truncate(p / "there", 0),
    "linking": lambda p: os.symlink(p / "there", p / "new"),
    "linking a second name": lambda p: os.link(p / "there", p / "new"),
    "torch.save": lambda p: torch.save({}, p / "new"),
    "a process": lambda p: subprocess.run([sys.executable, "-c", ""], check=True),
    "a shell": lambda p: os.system("true"),
    "a fork": lambda p: os.fork() or os._exit(0),
    "a pipe": lambda p: os.popen("true"),
    "a signal": lambda p: os.kill(os.getpid(), 0),
    "a connection": lambda p: socket.create_connection(("127.0.0.1", 9), 0.1),
    "an address": lambda p: socket.getaddrinfo("localhost", 80),
    "a datagram": lambda p: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
    "a server": lambda p: socket.socket().bind(("127.0.0.1", 0)),
}
ALLOWED: dict[str, Callable[[Path], object]] = {
    "reading": lambda p: open(p / "there").read(),
    "reading numbers": lambda p: torch.load(p / "numbers"),
    "listing": lambda p: [*os.scandir(p)],
    "nowhere": lambda p: open(os.devnull, "w").write("x"),
    "importing": lambda p: __import__("colorsys"),
    "computing": lambda p: torch.randn(8, 8) @ torch.randn(8, 8),
    "threads": lambda p: threading.Thread(target=len, args=([],)).start(),
    "the environment": lambda p: os.environ.get("HOME"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "there").write_text("there")
    torch.save({"a": torch.ones(2)}, tmp_path / "numbers")
    return tmp_path


@pytest.mark.parametrize("does", FORBIDDEN.values(), ids=FORBIDDEN)
def test_forbidden(folder: Path, does: Callable[[Path], object]) -> None:
    before = sorted(folder.iterdir()), (folder / "there").read_text()
    with only_computing(), pytest.raises(PermissionError, match="while explain looks for arguments"):
        does(folder)
    assert before == (sorted(folder.iterdir()), (folder / "there").read_text())


@pytest.mark.parametrize("does", ALLOWED.values(), ids=ALLOWED)
def test_allowed(folder: Path, does: Callable[[Path], object]) -> None:
    with only_computing():
        does(folder)


def test_after_the_block_all_is_allowed(folder: Path) -> None:
    with pytest.raises(ValueError, match="x"), only_computing(), only_computing():
        raise ValueError("x")
    (folder / "there").write_text("other")
    assert subprocess.run([sys.executable, "-c", ""], check=True).returncode == 0


def test_a_block_within_another_ends_alone(folder: Path) -> None:
    with only_computing():
        with only_computing():
            pass
        with pytest.raises(PermissionError):
            (folder / "there").write_text("other")
