"""Torch's switches, which the picker obeys: backends of SDPA, determinism, the precision of float32 products."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.kernels import KERNELS, switches
from attn_fuse.kernels.switches import Switches, forbidden
from attn_fuse.report import collecting

KERNEL = {kernel.name: kernel for kernel in KERNELS}
Q = torch.zeros(1, 4, 6, 8)


def plain(q: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).softmax(-1) @ q


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
        reason = "torch.use_deterministic_algorithms is on, and"
        assert self.said("cudnn", deterministic=True) == f"{reason} its backward is not deterministic"
        assert self.said("flex", deterministic=True).endswith("it adds up the gradient of a bias by atomics")
        assert not self.said("cuda_efficient", deterministic=True)
        said = self.said("cuda_efficient", deterministic=True, warns_only=True)
        assert said.endswith("its backward is not deterministic while torch is only to warn")
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
