"""What the picker chooses on an H200 by the evidence that ships, held against what an expert would choose."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator

import pytest
import torch

from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.triton.flash.kernel import TRITON_FLASH
from attn_fuse.picker import evidence
from attn_fuse.picker.evidence import AS_WRITTEN as WRITTEN
from attn_fuse.picker.pick import Times
from attn_fuse.report import collecting
from tests.graph.h200_cases import (
    AS_WRITTEN,
    BF16,
    CUDNN,
    EFFICIENT,
    FLEX,
    FP16,
    FP32,
    SDPA_HALF,
    T5,
    TRITON,
    ALiBi,
    Biased,
    Want,
    banded,
    beside,
    biased,
    chunked_prefill,
    computed_alibi,
    decode,
    documents,
    first_bert,
    given,
    gpt2,
    kept,
    llama,
    masked,
    nanogpt,
    noise,
    numbers,
    one_of,
    padded,
    plain,
    prefixed,
    trained,
    want,
    weights_too,
    words,
)  # fmt: skip
from tests.h200 import Picked, dynamic, h200

SEEN = {n: (lambda n=n: words(*n)) for n in ((8, 1024), (16, 512), (4, 2048), (2, 4096), (32, 128))}

WANTED = [
    # ---- the audit's table
    want("nanoGPT, bf16, training", "cuDNN is Hopper's fastest where nothing is odd",
         nanogpt(1024), trained(12, 12, 1024, 64), CUDNN, made=True, training=True),
    want("nanoGPT, dropout 0.1, training", "cuDNN rounds p to sixteenths; measured, ours takes 0.7 of FA2's time",
         nanogpt(1024, 0.1), trained(12, 12, 1024, 64), one_of("cuda_flash"), TRITON, made=True, training=True),
    want("nanoGPT, dropout 0.125, training", "an exact p for cuDNN; measured, ours takes 0.9 of its time",
         nanogpt(1024, 0.125), trained(12, 12, 1024, 64), SDPA_HALF, SDPA_HALF | TRITON, made=True, training=True),
    want("GPT-2, fp16, inference", "plain causal", gpt2, given(8, 12, 1024, 64, dtype=FP16), CUDNN),
    want("LLaMA prefill, grouped", "cuDNN shares keys", llama, given(1, 32, 4096, 128, kv_heads=8), CUDNN),
    want("LLaMA training, grouped", "cuDNN shares keys",
         llama, trained(4, 32, 2048, 128, kv_heads=8), CUDNN, training=True),
    want("LLaMA decode, repeat_kv", "the repeated keys are never written",
         decode, given(32, 32, 1, 128, kv_len=4096, kv_heads=8), SDPA_HALF),
    want("LLaMA decode, one sequence", "8 programs are few for 132 multiprocessors, unless the keys are split",
         decode, given(1, 32, 1, 128, kv_len=8192, kv_heads=8), one_of("cuda_flash"),
         one_of("cuda_flash")),
    want("padded Hugging Face training", "only a kernel that keeps the mean of the values takes such a mask",
         padded(True), beside(trained(8, 12, 1024, 64), SEEN[8, 1024]), AS_WRITTEN, one_of("triton_flash"),
         training=True),
    want("padded Hugging Face training, fp16", "as in bf16",
         padded(True), beside(trained(8, 12, 1024, 64, dtype=FP16), SEEN[8, 1024]), AS_WRITTEN, one_of("triton_flash"),
         training=True),
    want("padded encoder training", "as with a causal mask",
         padded(False), beside(trained(16, 16, 512, 64), SEEN[16, 512]), AS_WRITTEN, one_of("triton_flash"),
         training=True),
    want("a mask handed in, inference", "for all that is known it hides every key of a query, by the min of the dtype",
         biased, beside(given(16, 12, 512, 64), noise(16, 1, 1, 512)), EFFICIENT, TRITON),
    want("BERT, -10000, inference", "times what the mask holds, which may be anything", first_bert,
         beside(given(16, 12, 512, 64), SEEN[16, 512]), AS_WRITTEN, TRITON),
    want("padded Hugging Face inference", "flex has no mean of the values, torch's kernels would round the mask",
         padded(True), beside(given(8, 12, 1024, 64), SEEN[8, 1024]), AS_WRITTEN, TRITON),
    want("ALiBi of slopes kept as a buffer, training", "for all that is known a slope hides every key of a query",
         lambda: ALiBi(32), trained(4, 32, 2048, 128), AS_WRITTEN, one_of("triton_flash"), made=True, training=True),
    want("ALiBi of computed slopes, training", "no tensor of the bias, and hidden blocks skipped", computed_alibi,
         trained(4, 32, 2048, 128), FLEX, FLEX | TRITON, training=True),
    want("T5's table, training", "as a tensor its gradient is sorted, element by element, into 32 entries",
         lambda: T5(12, BF16), trained(8, 12, 1024, 64), AS_WRITTEN, one_of("triton_flash"), made=True,
         training=True),
    want("learned dense bias, training", "efficient, which alone has its gradient, is about as slow as the program",
         lambda: Biased(12, 1024, BF16), trained(8, 12, 1024, 64), EFFICIENT | AS_WRITTEN,
         one_of("triton_flash"), made=True, training=True),
    want("window 256, inference", "of 4096 keys 256 are seen", banded(256), given(2, 16, 4096, 64), FLEX,
         FLEX | TRITON),
    want("window 1024, training", "skips what is hidden", banded(1024), trained(2, 16, 8192, 64), FLEX, FLEX | TRITON,
         training=True),
    want("softcap, training", "Gemma 2", banded(10**6, 50.0), trained(2, 16, 4096, 128, kv_heads=8), FLEX,
         FLEX | TRITON, training=True),
    want("documents, training", "skips other documents", documents,
         beside(trained(2, 16, 4096, 128), numbers(2, 4096)), FLEX, FLEX | TRITON, training=True),
    want("sinks and window, training", "gpt-oss", banded(128, sink=True),
         beside(trained(2, 64, 4096, 64, kv_heads=8), noise(64, grad=True)), FLEX, FLEX | TRITON, training=True),
    want("head_dim 256, causal, training", "cuDNN takes it on sm_90 from 9.10", nanogpt(4096), trained(2, 8, 4096, 256),
         SDPA_HALF, made=True, training=True),
    want("head_dim 80, causal", "a multiple of 8", nanogpt(2048), given(4, 32, 2048, 80), SDPA_HALF, made=True),
    want("nanoGPT, fp32, training", "flex has 16 x 16 tiles without tensor cores; efficient splits into TF32",
         nanogpt(1024), trained(12, 12, 1024, 64, dtype=FP32), EFFICIENT, one_of("cuda_efficient", "triton_flash"),
         made=True, training=True),
    want("a growing cache", "cuDNN would build a plan at every length",
         decode, given(8, 32, 1, 128, kv_len=2048, kv_heads=8, moving=("kv_len",)), one_of("cuda_flash"),
         one_of("cuda_flash")),
    want("very short sequences", "launches are all there is", plain, given(1, 8, 16, 64), SDPA_HALF | AS_WRITTEN),
    # ---- more
    want("fp32 inference, causal", "efficient splits into TF32", nanogpt(2048), given(4, 12, 2048, 64, dtype=FP32),
         EFFICIENT, one_of("cuda_efficient", "triton_flash"), made=True),
    want("fp32 softcap, training", "flex without tensor cores is slower than the products as written",
         banded(10**6, 50.0), trained(4, 12, 1024, 64, dtype=FP32), AS_WRITTEN, AS_WRITTEN | {"triton_flash"},
         training=True),
    want("fp32 with TF32, causal, training", "efficient's three products are no faster than one over all scores",
         nanogpt(2048), trained(4, 12, 2048, 64, dtype=FP32), EFFICIENT | AS_WRITTEN, one_of("triton_flash"), made=True,
         training=True, tf32=True),
    want("fp32 with TF32, window, inference", "a sixteenth of the scores", banded(256),
         given(2, 12, 4096, 64, dtype=FP32), FLEX, FLEX | {"triton_flash"}, tf32=True),
    want("fp32, window 128 of 16k, inference", "even without tensor cores a hundredth of the work is less",
         banded(128), given(1, 8, 16384, 64, dtype=FP32), FLEX, FLEX | {"triton_flash"}),
    want("training on batches of any length", "cuDNN would build two plans for each",
         nanogpt(4096), trained(8, 16, 1024, 64, moving=("q_len", "kv_len")), one_of("cuda_flash"),
         one_of("cuda_flash") | TRITON, made=True, training=True),
    want("inference on batches of any size", "cuDNN would build a plan for each",
         nanogpt(1024), given(7, 16, 1024, 64, moving=("batch",)), one_of("cuda_flash"), one_of("cuda_flash") | TRITON,
         made=True),
    want("a handed mask of any length, inference", "efficient takes it and builds no plan",
         masked, beside(given(16, 12, 512, 64, moving=("q_len", "kv_len")),
                        lambda: dynamic(torch.ones(16, 1, 1, 512, dtype=torch.bool), 3)),
         EFFICIENT | FLEX, EFFICIENT | FLEX | TRITON),
    want("8k, causal, D 128", "cuDNN's best", nanogpt(8192), given(2, 16, 8192, 128), CUDNN, made=True),
    want("8k, causal, D 128, training", "cuDNN's best", nanogpt(8192), trained(2, 16, 8192, 128), CUDNN,
         made=True, training=True),
    want("deterministic training", "cuDNN's backward is not", nanogpt(2048), trained(4, 16, 2048, 64),
         one_of("cuda_flash"), one_of("cuda_flash") | TRITON, made=True, training=True, deterministic=True),
    want("two keys", "nothing but launches", plain, given(4, 8, 64, 64, kv_len=2),
         SDPA_HALF | AS_WRITTEN | {"cuda_efficient"}),
    want("Whisper's cross attention", "no mask, unequal lengths", plain, given(8, 20, 448, 64, kv_len=1500), SDPA_HALF),
    want("Stable Diffusion's cross attention", "a multiple of 8", plain,
         given(2, 8, 4096, 40, dtype=FP16, kv_len=77), SDPA_HALF),
    want("ViT, inference", "short rows, many of them", plain, given(64, 12, 197, 64, dtype=FP16), SDPA_HALF),
    want("ViT, training", "short rows, many of them", plain, trained(64, 12, 197, 64), SDPA_HALF, training=True),
    want("head_dim 96, training", "a multiple of 8", nanogpt(2048), trained(4, 16, 2048, 96), SDPA_HALF, made=True,
         training=True),
    want("head_dim 100", "no multiple of 8 for cuDNN and efficient; FA2 pads; by the rows flex and ours are level",
         plain, given(4, 16, 2048, 100), one_of("cuda_flash"), one_of("cuda_flash", "flex", "triton_flash")),
    want("latent attention, 192 and 128", "FA2 takes one width only; no row has two", nanogpt(4096),
         given(1, 16, 4096, 192, value_dim=128), CUDNN, CUDNN | TRITON, made=True),
    want("value_dim 128 beside 64, training", "FA2 takes one width only; no row has two", plain,
         trained(4, 16, 2048, 64, value_dim=128), CUDNN, CUDNN | TRITON, training=True),
    want("ALiBi, inference", "for all that is known a slope hides every key of a query", lambda: ALiBi(16),
         given(4, 16, 2048, 64), AS_WRITTEN, TRITON, made=True),
    want("documents, inference", "skips other documents", documents, beside(given(2, 16, 8192, 128), numbers(2, 8192)),
         FLEX, FLEX | TRITON),
    want("prefix, training", "flex computes half at half of cuDNN's rate", prefixed, trained(2, 16, 4096, 64),
         FLEX | CUDNN, TRITON, training=True),
    want("softcap, inference", "Gemma 2", banded(10**6, 50.0), given(1, 16, 4096, 256, kv_heads=8), FLEX,
         FLEX | TRITON),
    want("sinks, inference", "gpt-oss", banded(10**6, sink=True),
         beside(given(1, 64, 4096, 64, kv_heads=8), noise(64)), FLEX, one_of("flex", "triton_flash")),
    want("sinks, decode", "few queries, many keys", banded(10**6, sink=True),
         beside(given(16, 64, 1, 64, kv_len=4096, kv_heads=8), noise(64)), FLEX | AS_WRITTEN | {"triton_flash"},
         one_of("flex")),
    want("chunked prefill", "a causal mask at an offset is one of structure for flex, a tensor for cuDNN",
         chunked_prefill, given(1, 32, 1024, 128, kv_len=8192), FLEX | CUDNN, FLEX | CUDNN | TRITON),
    want("a dense mask, inference", "read once", masked, beside(given(4, 16, 1024, 64), kept(4, 1, 1024, 1024)),
         CUDNN, CUDNN | TRITON),
    want("multi-query decode", "Falcon: all heads share their keys", decode,
         given(16, 64, 1, 64, kv_len=2048, kv_heads=1), SDPA_HALF),
    want("four queries of a draft", "the repeated keys are never written", decode,
         given(8, 32, 4, 128, kv_len=4096, kv_heads=8), SDPA_HALF),
    want("window 128 of 1024, training, fp16", "a window in fp16 is one in bf16", banded(128),
         trained(8, 16, 1024, 64, dtype=FP16), FLEX, FLEX | TRITON, training=True),
    want("weights that are used", "nothing is saved", weights_too, given(4, 12, 1024, 64), AS_WRITTEN),
    want("tiny batch, 128 tokens", "one launch for several", plain, given(1, 12, 128, 64), SDPA_HALF | AS_WRITTEN),
    want("a learned bias of short rows", "Swin: 49 tokens a window", lambda: Biased(4, 49, BF16),
         trained(512, 4, 49, 32), EFFICIENT | AS_WRITTEN, EFFICIENT | AS_WRITTEN | TRITON, made=True,
         training=True),
]  # fmt: skip


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
    assert site.choice.because == f"0.80 of the time of {instead}, checked and timed here"
    if against != WRITTEN:
        assert site.choice.why_not[against] == (f"{site.kernel} takes {site.choice.because}",)


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
    found = re.match(r"([\d.]+) of the time as written, by measurements", reason)
    return float(found[1]) if found else None
