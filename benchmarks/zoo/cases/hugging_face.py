"""transformers."""

from __future__ import annotations

from zoo.case import Package
from zoo.cases.transformers_more import AUDIO, MORE, PAIRS, STEPS
from zoo.cases.transformers_text import DECODERS, ENCODERS
from zoo.cases.transformers_vision import VISION

PACKAGES = (Package("transformers", {**ENCODERS, **DECODERS, **PAIRS, **AUDIO, **VISION, **MORE, **STEPS}),)
