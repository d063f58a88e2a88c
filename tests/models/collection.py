"""Every spelling of attention that we know, by group, and the programs one step away from one."""

from __future__ import annotations

from tests.models.biases import BIASES
from tests.models.groups import GROUPS
from tests.models.language import LANGUAGE
from tests.models.lookalikes import LOOKALIKES
from tests.models.masks import MASKS
from tests.models.rare import RARE
from tests.models.score_mods import SCORE_MODS
from tests.models.scores import SCORES
from tests.models.softmaxes import SOFTMAXES
from tests.models.spelling import Spelling
from tests.models.surroundings import SURROUNDINGS
from tests.models.trained import TRAINED
from tests.models.vision import VISION

__all__ = ["LOOKALIKES", "RARE", "SPELLINGS", "Spelling"]

SPELLINGS: tuple[Spelling, ...] = (
    *SCORES, *SOFTMAXES, *BIASES, *MASKS, *SCORE_MODS, *GROUPS, *SURROUNDINGS, *TRAINED, *LANGUAGE, *VISION
)  # fmt: skip
