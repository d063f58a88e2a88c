"""What code of the user may not do while explain builds its model."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attn_fuse.explain.sandbox import only_computing

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
    with only_computing(), pytest.raises(PermissionError, match="while explain builds a model"):
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
