"""Export a model with fused attention as an ExportedProgram, which can be saved, loaded and run without attn_fuse.

    python examples/export.py [--folder build] [--compile]

--compile also makes an AOTInductor package, in about a minute.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import attn_fuse
from compare import tell
from distributed import GPT


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = GPT(length=256).eval()
    tokens = torch.randint(97, (2, 200))
    sizes = {"tokens": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    program = attn_fuse.export(model, (tokens,), dynamic_shapes=sizes, options={"pick": "fused"})
    tell()
    path = args.folder / "gpt.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    other = torch.randint(97, (3, 123))
    torch.testing.assert_close(loaded(other), model(other), atol=1e-5, rtol=1e-4)
    print(f"{path}: loaded, it computes the same for tokens {list(other.shape)}")
    if args.compile:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(args.folder / "gpt_aoti.pt2"))
        runner = torch._inductor.aoti_load_package(package)
        torch.testing.assert_close(runner(other), model(other), atol=1e-5, rtol=1e-4)
        print(f"{package}: so does the AOTInductor package")


if __name__ == "__main__":
    main()
