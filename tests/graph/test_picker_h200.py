"""What the picker chooses on an H200 by the evidence that ships, held against what an expert would choose."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.triton.flash.kernel import TRITON_FLASH
from attn_fuse.picker import evidence
from attn_fuse.picker.evidence import AS_WRITTEN as WRITTEN
from attn_fuse.picker.pick import Times
from attn_fuse.report import collecting
from tests.graph.h200_cases import FP32, WANTED, Want, banded, given, plain, trained
from tests.h200 import Picked, h200


@pytest.fixture(scope="module")
def picked() -> Iterator[Callable[..., list[Picked]]]:
    with h200() as found:
        yield found


@contextlib.contextmanager
def settings(case: Want) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if case.tf32 else "ieee"
    torch.use_deterministic_algorithms(case.deterministic)
    try:
        yield
    finally:
        matmul.fp32_precision = before
        torch.use_deterministic_algorithms(False)


@pytest.mark.thorough
@pytest.mark.parametrize("case", WANTED, ids=str)
def test_by_evidence(case: Want, picked: Callable[..., list[Picked]]) -> None:
    with settings(case):
        (site,) = picked(case.program(), *case.inputs(), training=case.training)
    assert site.kernel in case.best | case.ours, f"{case.why}: {site}"


# No row is about float32: there a kernel of ours has to pass a self-check.
FLOAT32 = [case for case in WANTED if "fp32" in case.name]


@pytest.mark.thorough
@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_without_a_self_check(case: Want, picked: Callable[..., list[Picked]]) -> None:
    with settings(case):
        (site,) = picked(case.program(), *case.inputs(), training=case.training)
    assert site.kernel in case.best, f"{case.why}: {site}"


@pytest.mark.thorough
@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_where_ours_pass_theirs(case: Want, picked: Callable[..., list[Picked]]) -> None:
    asked: list[tuple[str, str]] = []

    def passed(kernel: str, against: str) -> Times:
        asked.append((kernel, against))
        return Times({kernel: 0.8, against: 1.0}, {})

    with settings(case):
        (site,) = picked(case.program(), *case.inputs(), training=case.training, self_check=passed)
    ((kernel, against),) = asked
    assert site.kernel == kernel == "triton_flash" and (None if against == WRITTEN else against) in case.best, asked
    instead = "the program as written" if against == WRITTEN else against
    assert site.choice.because == f"1.25 times as fast as {instead}, checked and timed here"
    if against != WRITTEN:
        assert site.choice.why_not[against] == (f"{site.kernel} is {site.choice.because}",)


@pytest.mark.thorough
@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_where_ours_fail_theirs(case: Want, picked: Callable[..., list[Picked]]) -> None:
    """The choice is what it is without them, whether they are wrong or slow."""

    def wrong(kernel: str, against: str) -> Times:
        return Times({}, {kernel: "its self-check failed: wrong"})

    def slow(kernel: str, against: str) -> Times:
        return Times({kernel: 1.2, against: 1.0}, {})

    for self_check in (wrong, slow):
        with settings(case):
            (site,) = picked(case.program(), *case.inputs(), training=case.training, self_check=self_check)
        assert site.kernel in case.best, f"{case.why}: {site}"


def test_the_next_best_of_ours_is_tried(picked: Callable[..., list[Picked]], monkeypatch: pytest.MonkeyPatch) -> None:
    promising = dataclasses.replace(TRITON_FLASH, name="promising")
    monkeypatch.setattr("attn_fuse.picker.pick.KERNELS", (promising, *KERNELS))

    def checked(kernel: str, against: str) -> Times:
        wrong = {"promising": "its self-check failed: wrong"} if kernel == "promising" else {}
        return Times({} if wrong else {kernel: 0.6, against: 1.0}, wrong)

    (site,) = picked(banded(1024), *trained(2, 16, 8192, 64)(), training=True, self_check=checked)
    assert site.kernel == "triton_flash" and "by measurements" in site.choice.why_not["flex"][0]
    assert site.choice.why_not["promising"] == ("its self-check failed: wrong",)


def test_what_is_said_of_kernels_that_are_not_tried(picked: Callable[..., list[Picked]]) -> None:
    """Without a self-check none is tried, and with one only where much is to be gained."""
    for check, length in ((None, 1024), (lambda *_: pytest.fail("tried"), 64)):
        (site,) = picked(plain, *given(2, 8, length, 64, dtype=FP32)(), self_check=check)
        said = site.choice.why_not["triton_flash"]
        assert said == ("was not measured on such a device, and is not tried unless it is asked for",)


def test_dropout_is_left_to_measured_kernels(picked: Callable[..., list[Picked]]) -> None:
    """A self-check runs without dropout."""

    def dropping(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.dropout((query @ key.mT / 8).softmax(-1), 0.1) @ value

    (site,) = picked(
        dropping, *trained(2, 8, 4096, 64, dtype=FP32)(), training=True, self_check=lambda *_: pytest.fail()
    )
    assert site.kernel != "triton_flash"


def test_one_key_is_no_attention(picked: Callable[..., list[Picked]]) -> None:
    with collecting() as graphs:
        assert not picked(plain, *given(4, 8, 64, 64, kv_len=1)())
    assert graphs[0].sites[0].blocker.reason == "there is a single key, whose weight is 1"


def test_plans_count_where_shapes_change(picked: Callable[..., list[Picked]]) -> None:
    """They are spread over the calls that a shape comes back in, so that very long sequences bear them."""
    kernels = {}
    for length in (4096, 65536):
        (site,) = picked(plain, *given(2, 8, length, 128, moving=("batch",))())
        kernels[length] = site.kernel
        assert "with a plan for each of the shapes that change" in (
            site.choice.because if site.kernel == "cudnn" else site.choice.why_not["cudnn"][0]
        )
    assert kernels[4096] != "cudnn" and kernels[65536] == "cudnn"


# Among the everyday tests, since evidence that is measured anew may change each choice, within what an expert allows.
@pytest.mark.parametrize(
    "name",
    [
        "nanoGPT, bf16, training",
        "LLaMA training, grouped",
        "padded Hugging Face training",
        "ALiBi of slopes kept as a buffer, training",
        "window 1024, training",
        "softcap, training",
        "head_dim 256, causal, training",
    ],
)
def test_no_other_kernel_is_faster_by_the_evidence(name: str, picked: Callable[..., list[Picked]]) -> None:
    (case,) = [case for case in WANTED if case.name == name]
    with settings(case):
        (site,) = picked(case.program(), *case.inputs(), training=case.training)
    assert site.kernel in case.best | case.ours and "by measurements" in site.choice.because, site
    of_others = [_ratio(reason) for reasons in site.choice.why_not.values() for reason in reasons]
    own = 1.0 if site.kernel is None else _ratio(site.choice.because)
    assert own is not None and all(ratio is None or ratio >= own for ratio in of_others), site


def test_float32_is_not_judged_by_16_bits() -> None:
    (table,) = (t for t in evidence.tables() if t.device.type == "cuda")
    cases = [(row.case, kernel) for row in table.rows for kernel in row.times if kernel != evidence.AS_WRITTEN]
    assert cases
    for case, kernel in cases:
        other = dataclasses.replace(case, dtype="float32" if case.itemsize == 2 else "bfloat16")
        of_its_kind = dataclasses.replace(table, rows=tuple(r for r in table.rows if r.case.dtype == case.dtype))
        assert evidence.compare(kernel, other, table.device, table.torch, [of_its_kind]) is None


def _ratio(reason: str) -> float | None:
    found = re.match(r"([\d.]+) times as (fast|slow) as written, by measurements", reason)
    return None if found is None else float(found[1]) if found[2] == "slow" else 1 / float(found[1])
