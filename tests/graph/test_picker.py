"""What the picker goes by: evidence, what torch itself would take, and what a caller asks for by name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.bench.workloads import reach_of
from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.picker import evidence
from attn_fuse.picker import pick as picker
from attn_fuse.picker.case import Case, visible_share
from attn_fuse.picker.evidence import AS_WRITTEN, REACH, Row, Table, compare
from attn_fuse.picker.regression import distance
from attn_fuse.picker.timing import Device, this_device

CPU = torch.device("cpu")
HERE = this_device(CPU)
ELSEWHERE = Device("cpu", "Another CPU", 64)
VERSION = torch.__version__
PLAIN = Case("float32", False, 1, 8, 1024, 1024, 64)
CAUSAL = dataclasses.replace(PLAIN, mask="causal", visible=0.5)
TINY = Case("float32", False, 1, 4, 6, 6, 8)
# Beyond reach of both.
FAR = Case("float64", True, 512, 64, 2048, 2048, 64, mask="documents", dropout=True)


KERNEL = {kernel.name: kernel for kernel in KERNELS}


def rows(ratios: dict[str, float], *cases: Case) -> tuple[Row, ...]:
    return tuple(Row(case, {AS_WRITTEN: 10.0} | {name: 10.0 * r for name, r in ratios.items()}) for case in cases)


def table(ratios: dict[str, float], *cases: Case, device: Device = HERE, torch: str = VERSION, own: bool = False):
    return Table(device, torch, rows(ratios, *cases), own)


@pytest.fixture
def known(monkeypatch) -> Callable[..., None]:
    """Replaces every table of the picker."""
    return lambda *tables: monkeypatch.setattr(evidence, "tables", lambda: tables)


def site_of(function, *inputs: object, **options: object) -> attn_fuse.SiteReport:
    torch._dynamo.reset()
    torch.compile(function, backend=backend, options={"inner_backend": "eager"} | options)(*inputs)
    (site,) = attn_fuse.reports()[-1].sites
    return site


def plain(q: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).softmax(-1) @ q


def capped(q: torch.Tensor) -> torch.Tensor:
    return (5 * torch.tanh(q @ q.mT / 5)).softmax(-1) @ q


Q = torch.arange(1.0 * 4 * 6 * 8).sin().view(1, 4, 6, 8)


class TestRows:
    full = Case(
        "bfloat16", True, 2, 8, 100, 200, 64, kv_heads=2, value_dim=128, mask="window", visible=0.25, bias="gradient",
        function=True, dropout=True, sink=True,
    )  # fmt: skip

    @pytest.mark.parametrize("case", [PLAIN, CAUSAL, full], ids=str)
    def test_there_and_back(self, case: Case) -> None:
        (row,) = rows({"chunked": 0.5}, case)
        assert Row.from_json(json.loads(json.dumps(row.as_json()))) == row

    def test_new_rows_replace_those_of_their_cases(self) -> None:
        (old, other), (new,) = rows({"a": 0.5}, PLAIN, CAUSAL), rows({"a": 0.7}, PLAIN)
        assert evidence.merged([old, other], [new]) == [new, other]

    def test_what_says_nothing_is_left_out(self) -> None:
        assert PLAIN.as_json().keys() == {"dtype", "training", "batch", "heads", "q_len", "kv_len", "head_dim"}

    @pytest.mark.parametrize(
        "change, words",
        [
            ({"dtype": "int8"}, "dtype 'int8' is none of"),
            ({"mask": "bool"}, "mask 'bool' is none of"),
            ({"bias": True}, "bias True is no str"),
            ({"heads": True}, "heads True is no int"),
            ({"q_len": 0}, "sizes are 1 or more"),
            ({"visible": 1.5}, "at most 1"),
            ({"softcap": 3}, "unexpected keyword argument 'softcap'"),
            ({"chunked_us": 0}, "a time is a number above 0"),
            ({"chunked_us": "fast"}, "a time is a number above 0"),
            ({"chunked_us": -1}, "a time is a number above 0"),
        ],
    )
    def test_what_is_no_row(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises((ValueError, TypeError), match=words):
            Row.from_json(rows({}, PLAIN)[0].as_json() | change)

    def test_words(self) -> None:
        assert str(PLAIN) == "no mask, inference, float32, 1 x 8 heads, head_dim 64, q_len 1024, kv_len 1024"
        assert str(self.full) == (
            "window mask (25% seen), bias with gradient, a function of the scores, dropout, sink, training, bfloat16, "
            "2 x 8 heads, 2 kv_heads, head_dim 64, value_dim 128, q_len 100, kv_len 200"
        )

    @pytest.mark.parametrize(
        "q_len, kv_len, offset, reach", [(7, 7, 0, None), (5, 9, 4, 2), (1, 30, 29, 3), (9, 4, 0, 1), (8, 8, None, 3)]
    )
    def test_the_share_that_is_seen(self, q_len: int, kv_len: int, offset: int | None, reach: int | None) -> None:
        i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        if offset is not None:
            seen &= j <= i + offset
        if reach is not None:
            seen &= j >= i - reach
        assert visible_share(q_len, kv_len, offset, reach) == pytest.approx(seen.double().mean().item(), abs=1e-4)

    def test_of_long_sequences_a_part_of_the_queries_tells(self) -> None:
        assert visible_share(100_000, 100_000, 0, None) == pytest.approx(0.5, abs=1e-3)

    def test_a_window_from_its_share(self) -> None:
        case = dataclasses.replace(PLAIN, mask="window", visible=visible_share(1024, 1024, 0, 100))
        assert reach_of(case) == 100

    def test_the_shipped_tables(self) -> None:
        shipped = [t for t in evidence.tables() if not t.own]
        assert shipped and all(t.rows for t in shipped)
        cases = [row.case for t in shipped for row in t.rows if t.device.type == "cpu"]
        assert {case.mask for case in cases} >= {"none", "causal", "dense"} and {c.training for c in cases} == {
            True,
            False,
        }
        assert all(AS_WRITTEN in row.times for t in shipped for row in t.rows)


class TestCases:
    """The case of an attention that was recognised, as the report tells it."""

    @pytest.fixture(autouse=True)
    def _asked(self, monkeypatch) -> None:
        self.cases: list[Case] = []
        monkeypatch.setattr(evidence, "compare", lambda kernel, case, *rest: self.cases.append(case))

    def asked(self, function, *inputs: object) -> str:
        site_of(function, *inputs)
        return str(self.cases[0])

    def test_causal(self) -> None:
        def causal(q):
            return (q @ q.mT).masked_fill(torch.ones(6, 6).tril() == 0, -math.inf).softmax(-1) @ q

        assert self.asked(causal, Q).startswith("causal mask, inference, float32, 1 x 4 heads, head_dim 8, q_len 6")

    def test_a_window(self) -> None:
        def window(q):
            i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
            return (q @ q.mT).masked_fill((j > i) | (j < i - 1), -math.inf).softmax(-1) @ q

        assert self.asked(window, Q).startswith("window mask (31% seen), inference")

    def test_a_causal_mask_at_an_offset(self) -> None:
        def cached(q):
            i, j = torch.arange(2)[:, None] + 4, torch.arange(6)[None, :]
            return (q[:, :, 4:] @ q.mT).masked_fill(j > i, -math.inf).softmax(-1) @ q

        assert "window mask (92% seen)" in self.asked(cached, Q)

    def test_training_grouped_heads_and_a_gradient_of_the_bias(self) -> None:
        bias = torch.zeros(1, 4, 6, 6, requires_grad=True)

        def grouped(q, k, v):
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            return (torch.tanh(q @ k.mT) + bias).softmax(-1) @ v

        q, k, v = Q.clone().requires_grad_(), Q[:, :2], Q[:, :2, :, :5]
        assert self.asked(grouped, q, k, v) == (
            "no mask, bias with gradient, a function of the scores, training, float32, 1 x 4 heads, 2 kv_heads, "
            "head_dim 8, value_dim 5, q_len 6, kv_len 6"
        )


class TestEvidence:
    def ask(self, kernel: str, case: Case, *tables: Table) -> evidence.Comparison | None:
        return compare(kernel, case, HERE, VERSION, tables)

    def test_the_nearest_row_tells_most(self) -> None:
        far = dataclasses.replace(PLAIN, q_len=64, kv_len=64)
        tables = [table({"a": 0.25}, PLAIN), table({"a": 3.0}, far)]
        found = self.ask("a", PLAIN, *tables)
        assert found.ratio == pytest.approx(0.25, rel=0.2)
        assert found.how == f"by measurements on a device of this name, the nearest at {PLAIN}"

    def test_rows_beside_each_other_count_for_less_than_one_on_the_other_side(self) -> None:
        near, nearer, asked, across = (dataclasses.replace(PLAIN, q_len=n, kv_len=n) for n in (60, 59, 236, 944))
        found = self.ask("a", asked, table({"a": 1.0}, near, nearer), table({"a": 0.25}, across))
        assert found.ratio == pytest.approx(0.5, rel=0.05)

    def test_a_row_that_stands_out_is_taken_for_noise_in_part(self) -> None:
        around = [dataclasses.replace(PLAIN, q_len=n, kv_len=n) for n in (512, 768, 1536, 2048)]
        found = self.ask("a", PLAIN, table({"a": 0.5}, *around), table({"a": 2.0}, PLAIN))
        assert 0.6 < found.ratio < 1.8

    def test_between_two_rows_the_ratio_lies_between_theirs(self) -> None:
        short, asked, long = (dataclasses.replace(PLAIN, q_len=n, kv_len=n) for n in (200, 400, 800))
        found = self.ask("a", asked, table({"a": 0.9}, short), table({"a": 0.4}, long))
        assert found.ratio == pytest.approx(0.6, rel=1e-6)

    def test_beyond_the_rows_their_trend_goes_on(self) -> None:
        lengths = (128, 256, 512, 1024)
        rising = [table({"a": 2.0 - n / 4}, *self.squares(length)) for n, length in enumerate(lengths)]
        last, beyond, far = (self.ask("a", *self.squares(n), *rising).ratio for n in (1024, 2048, 8192))
        assert far < beyond < last
        assert self.ask("a", *self.squares(64), *rising).ratio > self.ask("a", *self.squares(128), *rising).ratio

    def squares(self, *lengths: int) -> list[Case]:
        return [dataclasses.replace(PLAIN, q_len=n, kv_len=n) for n in lengths]

    def test_kernels_are_compared_on_the_rows_of_both(self) -> None:
        """That `a` gains much from a window, which `b` does not take, says nothing of the two without one."""
        both = table({"a": 0.6, "b": 0.5}, *self.squares(512, 4096))
        windows = [dataclasses.replace(case, mask="window", visible=0.1) for case in self.squares(768, 1024, 1536)]
        tables = [both, table({"a": 0.05}, *windows)]
        assert self.ask("a", PLAIN, *tables).ratio < 0.3
        alike = compare("a", PLAIN, HERE, VERSION, tables, beside=["a", "b", "never measured"])
        assert alike.ratio == pytest.approx(0.6)
        assert compare("a", windows[1], HERE, VERSION, tables, beside=["a"]).ratio < 0.1

    def test_it_says_about_how_long_the_program_as_written_takes(self) -> None:
        twice = dataclasses.replace(PLAIN, batch=2)
        assert self.ask("a", twice, table({"a": 0.5}, PLAIN)).seconds == pytest.approx(20e-6)

    def test_nothing_is_said_of_another_kernel_or_device(self) -> None:
        assert self.ask("b", PLAIN, table({"a": 0.25}, PLAIN)) is None
        assert self.ask("a", PLAIN, table({"a": 0.25}, PLAIN, device=Device("cuda", "A GPU"))) is None

    def test_what_is_out_of_reach_is_an_estimate(self) -> None:
        assert distance(PLAIN, FAR, "cpu") > REACH
        found = self.ask("a", PLAIN, table({"a": 0.25}, FAR))
        assert found.is_estimate and found.how.startswith("estimated from measurements on a device of this name")
        found = self.ask("a", PLAIN, table({"a": 0.25}, FAR), table({"a": 0.8}, CAUSAL))
        assert not found.is_estimate and found.ratio == pytest.approx(0.8, rel=0.15)

    def test_own_rows_win_over_shipped_ones_that_are_nearer(self) -> None:
        near, off = table({"a": 0.2}, PLAIN), dataclasses.replace(PLAIN, q_len=256, kv_len=256)
        found = self.ask("a", PLAIN, near, table({"a": 0.8}, off, own=True))
        assert found.ratio == pytest.approx(0.8) and found.how.startswith("by measurements here,")

    def test_another_device_and_another_torch_are_said(self) -> None:
        found = self.ask("a", PLAIN, table({"a": 0.2}, PLAIN, device=ELSEWHERE, torch="1.9.1"))
        assert found.how == f"by measurements on Another CPU, 64 threads with torch 1.9, the nearest at {PLAIN}"

    def test_this_device_is_preferred(self) -> None:
        found = self.ask("a", PLAIN, table({"a": 0.2}, PLAIN, device=ELSEWHERE), table({"a": 0.9}, PLAIN))
        assert found.ratio > 0.6

    def test_own_rows_of_an_older_torch_are_rows_like_others(self) -> None:
        found = self.ask("a", PLAIN, table({"a": 0.9}, PLAIN, torch="1.9", own=True), table({"a": 0.2}, PLAIN))
        assert found.ratio < 0.35

    def test_the_distance_is_one(self) -> None:
        cases = [PLAIN, CAUSAL, TestRows.full, TINY]
        assert all(distance(a, a, "cpu") == 0 for a in cases)
        assert all(distance(a, b, "cpu") == distance(b, a, "cpu") > 0 for a in cases for b in cases if a != b)

    def test_scores_in_memory_that_is_cleared_anew_are_farther(self) -> None:
        """6 heads of 1280 to 1536 keys in bfloat16 stay below 32 MiB, 6 heads of 1536 to 1843 do not."""
        at = [Case("bfloat16", True, 1, 6, n, n, 64) for n in (1280, 1536, 1843)]
        below, above = distance(at[0], at[1], "cpu"), distance(at[1], at[2], "cpu")
        assert above > below + 1
        assert distance(at[1], at[2], "cuda") == pytest.approx(distance(at[0], at[1], "cuda"), rel=1e-2)


class TestPick:
    def test_the_fastest_kernel_or_as_written(self, known) -> None:
        known(table({"cpu_flash": 1.2, "chunked": 1.5, "flex": 2.0}, TINY))
        site = site_of(plain, Q)
        assert site.status == "as written"
        assert site.blocker.reason == (
            "no kernel is faster than the program as written: cpu_flash is 1.20 times as slow as written, by "
            f"measurements on a device of this name, the nearest at {TINY}"
        )
        assert "1.50 times as slow as written" in site.why_not["chunked"][0]
        assert site.ratios == pytest.approx({"cpu_flash": 1.2, "chunked": 1.5})
        assert site_of(plain, Q, pick="fused").fused
        asked = site_of(plain, Q, kernels=["cpu_flash"])
        assert asked.attention["picked"] == "asked for" and asked.ratios == {}
        known(table({"cpu_flash": 0.5, "chunked": 0.4, "flex": 2.0}, TINY))
        site = site_of(plain, Q)
        assert site.kernel == "chunked" and "2.5 times as fast as written" in site.attention["picked"]
        assert "2.0 times as fast as written" in site.why_not["cpu_flash"][0]
        assert site.ratios == pytest.approx({"cpu_flash": 0.5, "chunked": 0.4})

    def test_what_is_hardly_faster_does_not_read_as_even(self, known) -> None:
        known(table({"cpu_flash": 0.9969, "chunked": 2.0, "flex": 2.0}, TINY))
        assert site_of(plain, Q).attention["picked"].startswith("1.003 times as fast as written")
        known(table({"cpu_flash": 1.0031, "chunked": 2.0, "flex": 2.0}, TINY))
        assert "cpu_flash is 1.003 times as slow as written" in site_of(plain, Q).blocker.reason

    def test_an_estimate_has_to_promise_more(self, known) -> None:
        def estimated(ratio: float) -> Table:
            return table({"chunked": ratio}, FAR)

        faster, slower = (table({"cpu_flash": ratio, "flex": 2.0}, TINY) for ratio in (0.9, 1.1))
        for ratio in (0.8, 0.1):
            # Between two kernels an estimate tells less than a measurement.
            known(faster, estimated(ratio))
            assert site_of(plain, Q).kernel == "cpu_flash"
        known(slower, estimated(0.5))
        site = site_of(plain, Q)
        assert site.kernel == "chunked"
        assert site.attention["picked"].startswith("2.0 times as fast as written, estimated from measurements")
        known(estimated(0.8))
        site = site_of(plain, Q)
        assert site.status == "as written"
        assert site.blocker.reason.startswith("no kernel is surely faster than the program as written: ")
        assert site.blocker.reason.endswith(", and an estimate has to promise 1.43 times")

    def test_without_any_measurement_large_attentions_run_on_what_torch_would_take(self, known) -> None:
        known()
        site = site_of(capped, Q)
        assert site.status == "as written" and site.blocker.reason.startswith("no kernel was measured")
        assert "takes no softcap" in str(site.why_not["cpu_flash"])
        for options in ({"pick": "fused"}, {"kernels": ["chunked"]}):
            assert site_of(capped, Q, **options).kernel == "chunked"
        assert site_of(plain, Q).status == "as written"
        long = torch.zeros(1, 8, 2048, 64)
        site = site_of(lambda q: (q @ q.mT).softmax(-1) @ q, long)
        assert (
            site.kernel == "cpu_flash" and site.attention["picked"] == "it is large, and nothing like it was measured"
        )
        assert site_of(lambda q: torch.tanh(q @ q.mT).softmax(-1) @ q, long).status == "as written"

    def test_without_any_measurement_a_window_is_skipped(self, known) -> None:
        known()
        long = torch.zeros(1, 8, 2048, 64)

        def windowed(q: torch.Tensor) -> torch.Tensor:
            i = torch.arange(2048)
            far = (i[:, None] - i).abs() >= 64
            return (q @ q.mT).masked_fill(far, float("-inf")).softmax(-1) @ q

        assert site_of(windowed, long).kernel in ("flex", "chunked")

    def test_many_short_rows_are_slow_where_products_may_be_of_bfloat16(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """float32_matmul_precision("medium") took Swin's 256 windows of 49 keys from 0.8 to 7 times as written."""
        flash, chunked = KERNEL["cpu_flash"], KERNEL["chunked"]
        windows = Case("float32", True, 256, 3, 49, 49, 16)
        facts = SimpleNamespace(device=CPU, symbolic=frozenset())

        def ratio(kernel: Kernel, case: Case) -> float:
            found = picker._judged(kernel, case, facts, [kernel])
            return found.ratio

        cases = (windows, dataclasses.replace(windows, dtype="bfloat16"), dataclasses.replace(PLAIN, training=True))
        before = [ratio(flash, case) for case in cases]
        of_chunked = ratio(chunked, windows)
        monkeypatch.setattr(picker, "float32_precision", lambda device: "bf16")
        swin, halves, long = (ratio(flash, case) / old for case, old in zip(cases, before, strict=True))
        assert swin > 2 and halves == 1 and ratio(chunked, windows) == of_chunked
        assert long > 1 and swin - 1 > 10 * (long - 1)

    def test_a_kernel_by_name_never_gives_way_silently(self, known) -> None:
        known(table({"chunked": 0.1}, TINY))
        site = site_of(capped, Q, kernels=["cpu_flash", "cudnn"])
        assert site.status == "as written" and site.why_not["chunked"] == ("not among the kernels allowed",)
        assert site.why_not["cudnn"] == ("runs on cuda, not on cpu",)
        assert site.blocker.reason == "no kernel can run it: cpu_flash: takes no softcap"
        with attn_fuse.use_kernels("cpu_flash"):
            assert site_of(capped, Q).status == "as written"
        with pytest.raises(attn_fuse.NotFusedError, match="cpu_flash: takes no softcap"):
            site_of(capped, Q, kernels=["cpu_flash"], strict=True)
