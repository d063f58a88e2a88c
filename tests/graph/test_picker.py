"""What the picker goes by: evidence, then a cost model, torch's switches, and what a caller asks for by name."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.kernels import KERNELS, switches
from attn_fuse.kernels.switches import Switches, forbidden
from attn_fuse.picker import cost, evidence
from attn_fuse.picker.case import Case, visible_share
from attn_fuse.picker.evidence import AS_WRITTEN, REACH, Row, Table, compare
from attn_fuse.picker.pick import Choice
from attn_fuse.picker.regression import distance
from attn_fuse.picker.timing import Device, this_device
from attn_fuse.picker.workloads import reach_of
from attn_fuse.report import collecting

CPU = torch.device("cpu")
HERE = this_device(CPU)
ELSEWHERE = Device("cpu", "Another CPU", 64)
VERSION = torch.__version__
# The model was fitted to squares in fp32.
FITTED = [
    row for t in evidence.tables() if not t.own and t.device.type == "cpu" for row in t.rows
    if row.case.dtype == "float32" and row.case.q_len > 1 and "cpu_flash" in row.times
][::8]  # fmt: skip
PLAIN = Case("float32", False, 1, 8, 1024, 1024, 64)
CAUSAL = dataclasses.replace(PLAIN, mask="causal", visible=0.5)
TINY = Case("float32", False, 1, 4, 6, 6, 8)


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

    def test_the_hosts_times_stand_beside(self) -> None:
        (row,) = rows({"chunked": 0.5}, PLAIN)
        both = dataclasses.replace(row, host={AS_WRITTEN: 7.0, "chunked": 30.0})
        assert both.as_json()["chunked_host_us"] == 30.0 and both.as_json()["chunked_us"] == 5.0
        assert Row.from_json(json.loads(json.dumps(both.as_json()))) == both

    def test_the_hosts_times_change_no_choice(self) -> None:
        fast_to_issue = tuple(
            dataclasses.replace(row, host={AS_WRITTEN: 9.0, "chunked": 1.0}) for row in rows({"chunked": 2.0}, PLAIN)
        )
        found = compare("chunked", PLAIN, HERE, VERSION, [Table(HERE, VERSION, fast_to_issue)])
        assert found is not None and found.ratio == pytest.approx(2.0)

    def test_rows_of_another_clock_do_not_stay_beside(self) -> None:
        """A table of which some rows hold the GPU's waits for the host, and others do not, compares unlike ratios."""
        (old, other), (new,) = rows({"a": 0.5}, PLAIN, CAUSAL), rows({"a": 0.7}, PLAIN)
        assert evidence.merged([old, other], [new]) == [new, other]
        apart = dataclasses.replace(new, host={"a": 3.0})
        assert evidence.merged([old, other], [apart]) == [apart]
        assert evidence.merged([apart], [dataclasses.replace(apart, case=CAUSAL)])[0] == apart

    def test_what_the_times_are_is_said(self) -> None:
        gpu, (row,) = Device("cuda", "A GPU"), rows({"a": 0.5}, PLAIN)
        assert Table(HERE, VERSION, (row,)).figures == "wall time"
        assert Table(gpu, VERSION, (row,)).figures == "GPU time, its waits for the host included"
        assert Table(gpu, VERSION, (dataclasses.replace(row, host={"a": 3.0}),)).figures == "GPU time"

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
            ({"chunked_host_us": -1}, "a time is a number above 0"),
        ],
    )
    def test_what_is_no_row(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
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

    def test_half_of_what_a_model_says_between_two_cases_is_believed(self) -> None:
        short = dataclasses.replace(PLAIN, q_len=512, kv_len=512)
        tables = [table({"a": 0.4}, PLAIN)]
        moved = compare("a", short, HERE, VERSION, tables, model=lambda case: 1024 / case.q_len)
        assert moved.ratio == pytest.approx(0.4 * 2**0.5) and not moved.is_estimate
        assert compare("a", PLAIN, HERE, VERSION, tables, model=lambda case: 7.0).ratio == pytest.approx(0.4)

    def test_nothing_is_said_of_another_kernel_or_device(self) -> None:
        assert self.ask("b", PLAIN, table({"a": 0.25}, PLAIN)) is None
        assert self.ask("a", PLAIN, table({"a": 0.25}, PLAIN, device=Device("cuda", "A GPU"))) is None

    def test_what_is_out_of_reach_says_nothing(self) -> None:
        other = Case("bfloat16", True, 1, 8, 512, 512, 64, mask="documents", dropout=True)
        assert distance(PLAIN, other, "cpu") > REACH and self.ask("a", PLAIN, table({"a": 0.25}, other)) is None

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
            "no kernel is faster than the program as written: cpu_flash takes 1.20 of the time as written, by "
            f"measurements on a device of this name, the nearest at {TINY}"
        )
        assert "1.50 of the time as written" in site.why_not["chunked"][0]
        assert site_of(plain, Q, pick="fused").fused
        assert site_of(plain, Q, kernels=["cpu_flash"]).attention["picked"] == "asked for"
        known(table({"cpu_flash": 0.5, "chunked": 0.4, "flex": 2.0}, TINY))
        site = site_of(plain, Q)
        assert site.kernel == "chunked" and "0.40 of the time as written" in site.attention["picked"]
        assert "0.50 of the time as written" in site.why_not["cpu_flash"][0]

    def test_what_is_hardly_faster_does_not_read_as_even(self, known) -> None:
        known(table({"cpu_flash": 0.9969, "chunked": 2.0, "flex": 2.0}, TINY))
        assert site_of(plain, Q).attention["picked"].startswith("0.997 of the time as written")
        known(table({"cpu_flash": 1.0031, "chunked": 2.0, "flex": 2.0}, TINY))
        assert "cpu_flash takes 1.003 of the time as written" in site_of(plain, Q).blocker.reason

    def test_an_estimate_has_to_promise_more(self, known, monkeypatch) -> None:
        known(table({"cpu_flash": 0.9, "flex": 2.0}, TINY))
        promise = {}
        monkeypatch.setattr(
            cost, "estimated", lambda *_: evidence.Comparison(promise["ratio"], "estimated, not measured", True)
        )
        promise["ratio"] = 0.8
        assert site_of(plain, Q).kernel == "cpu_flash"
        promise["ratio"] = 0.1
        assert site_of(plain, Q).kernel == "cpu_flash"  # between two kernels an estimate tells less than a measurement
        known(table({"cpu_flash": 1.1, "flex": 2.0}, TINY))
        promise["ratio"] = 0.5
        site = site_of(plain, Q)
        assert (
            site.kernel == "chunked"
            and site.attention["picked"] == "0.50 of the time as written, estimated, not measured"
        )
        known()
        promise["ratio"] = 0.8
        site = site_of(plain, Q)
        assert site.status == "as written"
        assert site.blocker.reason.startswith("no kernel is surely faster than the program as written: ")
        assert site.blocker.reason.endswith("estimated, not measured, and an estimate has to promise 0.7")

    def test_without_any_measurement_the_cost_model_tells(self, known, monkeypatch) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        known()
        site = site_of(capped, Q)
        assert site.status == "as written" and "estimated, not measured" in site.blocker.reason
        assert "takes no softcap" in str(site.why_not["cpu_flash"])
        for options in ({"pick": "fused"}, {"kernels": ["chunked"]}):
            assert site_of(capped, Q, **options).kernel == "chunked"
        long = torch.zeros(1, 8, 4096, 64)
        site = site_of(lambda q: (q @ q.mT).softmax(-1) @ q, long)
        assert site.fused and "estimated, not measured" in site.attention["picked"]

    def test_weights_that_are_used(self, known) -> None:
        def both(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights = (q @ q.mT).softmax(-1)
            return weights @ q, weights.mean(1)

        known(table({"cpu_flash": 0.1}, TINY))
        assert site_of(both, Q).blocker.reason == "the weights are also used outside the attention, so nothing is saved"

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


KERNEL = {kernel.name: kernel for kernel in KERNELS}


class TestCost:
    """The model ranks as the figures that were published do; its times may be off by two."""

    def times(self, case: Case, here: cost.Peaks, device: str, *names: str) -> list[float]:
        reaches = {kernel.name: kernel.reach.get(device) for kernel in KERNELS}
        reaches[AS_WRITTEN] = cost.AS_WRITTEN_REACH[device]
        return [cost.seconds(reaches[name], case, here) for name in names]

    def test_cpu(self) -> None:
        here = cost._cpu_peaks(2, "ieee")
        for training, names in ((False, ("flex", "cpu_flash", AS_WRITTEN)), (True, ("cpu_flash", AS_WRITTEN))):
            case = dataclasses.replace(CAUSAL, q_len=2048, kv_len=2048, training=training)
            times = self.times(case, here, "cpu", *names)
            assert times == sorted(times)
        small = dataclasses.replace(CAUSAL, q_len=16, kv_len=16)
        as_written, chunked = self.times(small, here, "cpu", AS_WRITTEN, "chunked")
        assert as_written < chunked

    @pytest.mark.parametrize("row", FITTED, ids=lambda row: str(row.case))
    def test_near_the_shipped_table(self, row: Row) -> None:
        here = cost._cpu_peaks(2, "ieee")
        model, flash = self.times(row.case, here, "cpu", AS_WRITTEN, "cpu_flash")
        assert abs(math.log2(flash / model) - math.log2(row.times["cpu_flash"] / row.times[AS_WRITTEN])) < 1.6

    def test_many_short_rows_are_slow_where_products_may_be_of_bfloat16(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """float32_matmul_precision("medium") took Swin's 256 windows of 49 keys from 0.8 to 7 times as written."""
        cpu, by_name = torch.device("cpu"), {kernel.name: kernel for kernel in KERNELS}
        windows = dataclasses.replace(CAUSAL, batch=256, heads=3, kv_heads=3, q_len=49, kv_len=49, head_dim=16)
        long = dataclasses.replace(CAUSAL, q_len=2048, kv_len=2048)
        assert cost.calls(by_name["cpu_flash"], windows, cpu) == 0
        monkeypatch.setattr(cost, "float32_precision", lambda device: "bf16")
        assert cost.calls(by_name["cpu_flash"], windows, cpu) > 1 > 10 * cost.calls(by_name["cpu_flash"], long, cpu)
        for name, case in (("chunked", windows), ("cpu_flash", dataclasses.replace(windows, dtype="bfloat16"))):
            assert cost.calls(by_name[name], case, cpu) == 0

    def test_hopper(self) -> None:
        # An H200 as torch describes it: 132 SMs at 1.98 GHz, 4.8 TB/s.
        cycles = 132 * 1.98e9
        here = cost.Peaks(cycles * 4096, cycles * 256, cycles * 2048, 4.3e12, 14e12, 50e6, 4e-6)
        case = Case("bfloat16", False, 4, 16, 4096, 4096, 128, mask="causal", visible=0.5)
        names = ("cudnn", "triton_flash", "cuda_flash", "flex", "cuda_efficient", AS_WRITTEN)
        times = self.times(case, here, "cuda", *names)
        assert times == sorted(times)
        flops = 4 * case.scores * case.visible * case.head_dim / times[0] / 1e12
        assert 400 < flops < 800

    def test_every_kernel_has_a_class_where_it_runs(self) -> None:
        for kernel in KERNELS:
            # Triton's interpreter is not there to be fast.
            assert kernel.devices - ({"cpu"} if kernel.needs_evidence else set()) <= kernel.reach.keys(), kernel.name


# Each is set on top of what was set before. The older way to ask raises once the newer was used to set it.
PRECISIONS = """
import torch
import attn_fuse
from attn_fuse.kernels.switches import float32_precision

def plain(x):
    return torch.softmax(x @ x.mT, -1) @ x

def cuda_is(expected):
    found = [float32_precision(torch.device(device)) for device in ("cuda", "cpu")]
    assert found[0] == expected and found[1] in ("ieee", "tf32"), (found, expected)
    torch._dynamo.reset()
    options = {"inner_backend": "eager", "kernels": ["cpu_flash"], "strict": True}
    got = torch.compile(plain, backend="attn_fuse", options=options)(x)
    assert torch.allclose(got, plain(x), atol=1e-6)

x = torch.randn(1, 2, 16, 8)
cuda_is("ieee")
torch.backends.fp32_precision = "tf32"
cuda_is("tf32")
torch.set_float32_matmul_precision("highest")
cuda_is("ieee")
torch.set_float32_matmul_precision("high")
cuda_is("tf32")
torch.backends.cuda.matmul.fp32_precision = "ieee"
cuda_is("ieee")
torch.backends.cuda.matmul.fp32_precision = "tf32"
cuda_is("tf32")
"""


class TestSwitches:
    @pytest.fixture(autouse=True)
    def _facts(self) -> None:
        self.facts = SimpleNamespace(training=True, bias_needs_grad=True)

    def said(self, kernel: str, **on: bool) -> str:
        return "; ".join(forbidden(KERNEL[kernel], self.facts, Switches(**on)))

    def test_a_backend_of_sdpa_that_is_off(self) -> None:
        assert "flash attention is switched off" in self.said("cuda_flash", flash=False)
        assert "flash attention is switched off" in self.said("cpu_flash", flash=False)
        assert "enable_mem_efficient_sdp" in self.said("cuda_efficient", efficient=False)
        assert "enable_cudnn_sdp" in self.said("cudnn", cudnn=False)
        assert not self.said("chunked", flash=False, efficient=False, cudnn=False)
        assert not self.said("cuda_flash", math=False)

    def test_deterministic_algorithms(self) -> None:
        reason = "torch.use_deterministic_algorithms is on"
        assert reason in self.said("cudnn", deterministic=True) and reason in self.said("flex", deterministic=True)
        assert not self.said("cuda_efficient", deterministic=True)
        assert reason in self.said("cuda_efficient", deterministic=True, warns_only=True)
        assert not any(self.said(k, deterministic=True) for k in ("chunked", "cpu_flash", "cuda_flash", "triton_flash"))
        self.facts.bias_needs_grad = False
        assert not self.said("flex", deterministic=True) and reason in self.said("cudnn", deterministic=True)
        self.facts.training = False
        assert not self.said("cudnn", deterministic=True)

    def test_they_are_read_from_torch(self) -> None:
        assert switches.current().flash
        with sdpa_kernel([SDPBackend.MATH]):
            assert switches.current()[:4] == (False, False, True, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert switches.current()[4:] == (True, True)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_the_float32_precision_is_read_however_it_was_set(self) -> None:
        """In a process of its own: torch's operator database, once imported, freezes these settings."""
        done = subprocess.run([sys.executable, "-c", PRECISIONS], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    def test_nothing_asks_for_it_the_older_way(self) -> None:
        sources = [*Path(attn_fuse.__file__).parent.rglob("*.py")]
        assert sources and not [p for p in sources if "get_float32_matmul_precision" in p.read_text()]

    def test_a_compiled_program_notices(self) -> None:
        torch._dynamo.reset()
        options = {"inner_backend": "eager", "kernels": ["cpu_flash"]}
        run = torch.compile(plain, backend=backend, options=options)
        with collecting() as first:
            expected = run(Q)
        with collecting() as second, sdpa_kernel([SDPBackend.MATH]):
            assert torch.allclose(run(Q), expected, atol=1e-6)
        with collecting() as third:
            run(Q)
            with sdpa_kernel([SDPBackend.MATH]):
                run(Q)
        assert [len(graphs) for graphs in (first, second, third)] == [1, 1, 0], "each setting is compiled for once"
        assert first[0].sites[0].fused
        site = second[0].sites[0]
        assert not site.fused and "switched off" in site.blocker.reason


def test_a_kernel_that_cannot_be_called_leaves_the_reason_of_those_that_can() -> None:
    slower = ("1.07 of the time as written, by measurements",)
    choice = Choice(KERNELS[0], {"chunked": slower}, "0.8 of the time as written", slower=("chunked",))
    left = choice.without("a size is not that of any tensor here")
    assert left.kernel is None and left.advice
    assert left.because.startswith("no kernel that can be called is surely faster than the program as written: chunked")
    assert "chunked takes 1.07" in left.because and f"{KERNELS[0].name} cannot be called: a size" in left.because
    alone = Choice(KERNELS[0], {}, "asked for").without("a size")
    assert alone.because == f"{KERNELS[0].name} cannot be called: a size"
