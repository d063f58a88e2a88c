"""torchvision beside a torch without CUDA: its own operators, which no model here needs, cannot be loaded."""

from __future__ import annotations

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_operators() -> None:
    """Declare the two operators that the import of torchvision asks for, where its library cannot be loaded."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", _SIGNATURE)
