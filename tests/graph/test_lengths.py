"""The report on an attention that is too short for a kernel says from which length on it would run on one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attn_fuse
from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, Row, Table
from attn_fuse.picker.timing import this_device

SHORT = Case("float32", False, 1, 4, 64, 64, 16)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


def advice(monkeypatch: pytest.MonkeyPatch, ratios: dict[int, float], q_len: int = 64, kv_len: int = 64) -> str:
    """The advice on an attention, where `ratios` were measured, by length."""
    cases = {replace(SHORT, q_len=1 if q_len == 1 else n, kv_len=n): r for n, r in ratios.items()}
    rows = tuple(Row(case, {AS_WRITTEN: 10.0, "cpu_flash": 10.0 * ratio}) for case, ratio in cases.items())
    tables = (Table(this_device(torch.device("cpu")), torch.__version__, rows),)
    monkeypatch.setattr(evidence, "tables", lambda: tables)
    with torch.no_grad():
        site = attn_fuse.explain(attention, *(torch.randn(1, 4, n, 16) for n in (q_len, kv_len, kv_len))).sites[0]
    return site.blocker.advice if site.blocker else ""


RISING = {64: 2.0, 256: 1.5, 512: 0.7, 1024: 0.5, 4096: 0.3}


def test_the_length_and_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    said = advice(monkeypatch, RISING)
    first = r"from about (\d+) tokens on \(explain --length \1\) it would run on cpu_flash; "
    found = re.match(first + r"at 1024: (\S+) times as fast", said)
    assert found and 256 < int(found[1]) <= 512 and 1.5 < float(found[2]) < 2.5
    assert "16.0 MiB of scores less" in said


def test_a_single_query_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at 1024: " in (said := advice(monkeypatch, RISING, q_len=1)) and "16.0 KiB of scores less" in said


def test_no_length_is_named_where_none_is_known_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advice(monkeypatch, {64: 2.0, 1024: 2.0, 32768: 2.0}).startswith("try larger inputs")
