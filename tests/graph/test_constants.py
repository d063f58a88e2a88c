"""Closed forms of buffers, element by element against the tensor."""

from __future__ import annotations

import itertools
import math

import pytest
import sympy
import torch

from attn_fuse import expression as ex
from attn_fuse.constants import closed_form
from attn_fuse.space import Space

FOUND = {
    "tril": torch.tril(torch.ones(6, 6)),
    "tril with leading ones": torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6),
    "tril bool": torch.tril(torch.ones(6, 6, dtype=torch.bool)),
    "triu of infinities": torch.triu(torch.full((6, 6), -math.inf), 1),
    "shifted": torch.tril(torch.ones(6, 6), -2),
    "wide": torch.tril(torch.ones(3, 7), 4),
    "tall": torch.tril(torch.ones(7, 3), -1),
    "window": torch.tril(torch.ones(6, 6)).triu(-2),
    "uint8": torch.tril(torch.ones(6, 6, dtype=torch.uint8)),
    "bfloat16": torch.triu(torch.full((6, 6), -1e9, dtype=torch.bfloat16), 1),
    "one value": torch.full((2, 3, 4), 5.0),
    "a number": torch.tensor(0.125),
    "a row": (torch.arange(8) < 5).view(1, 8),
    "not contiguous": torch.tril(torch.ones(6, 6)).t(),
}
NOT_FOUND = {
    "one element changed": torch.tril(torch.ones(6, 6)).index_put(
        (torch.tensor(2), torch.tensor(4)), torch.tensor(1.0)
    ),
    "last element changed": torch.tril(torch.ones(6, 6)).index_put(
        (torch.tensor(5), torch.tensor(5)), torch.tensor(0.0)
    ),
    "many steps": torch.arange(6.0)[None] - torch.arange(6.0)[:, None],
    "random": torch.rand(6, 6),
    "a batch of triangles": torch.tril(torch.ones(2, 6, 6)),
    "not a number": torch.full((3, 3), math.nan),
    "empty": torch.ones(0, 4),
    "complex": torch.ones(3, 3, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", FOUND)
def test_equals_the_tensor_everywhere(name: str) -> None:
    tensor = FOUND[name]
    form = closed_form(tensor)
    assert form is not None and form.equals(tensor)
    for index in itertools.product(*map(range, tensor.shape)):
        element = form.element(tuple(map(sympy.Integer, index)), Space())
        assert isinstance(element, ex.Const) and element.value == tensor[index].item()


@pytest.mark.parametrize("name", NOT_FOUND)
def test_anything_else_has_none(name: str) -> None:
    assert closed_form(NOT_FOUND[name]) is None


def test_a_form_is_of_one_tensor_only() -> None:
    form = closed_form(FOUND["tril"])
    assert form is not None
    assert not form.equals(FOUND["window"]) and not form.equals(FOUND["tril"].double())
