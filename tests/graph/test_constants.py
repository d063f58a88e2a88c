"""Closed forms of buffers, element by element against the tensor."""

from __future__ import annotations

import itertools
import math

import pytest
import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.index import Space
from attn_fuse.lift.closed_forms import ClosedForm, Diagonals, closed_form

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
    "an integer that no float holds": torch.full((3,), 2**53 + 1),
    "a triangle of such integers": torch.full((6, 6), 2**62 + 1).tril(),
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
    assert isinstance(form, ClosedForm)
    for index in itertools.product(*map(range, tensor.shape)):
        element = form.element(tuple(map(sympy.Integer, index)), Space())
        assert isinstance(element, ex.Const) and element.value == tensor[index].item()


@pytest.mark.parametrize("name", NOT_FOUND)
def test_anything_else_has_none(name: str) -> None:
    assert closed_form(NOT_FOUND[name]) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (1, 3, 7), (8, 5)], ids=str)
def test_whole_numbers_by_distance(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, columns = shape[-2:]
    tensor = (torch.arange(columns) - torch.arange(rows)[:, None]).mul(7).remainder(11).to(dtype).view(shape)
    form = closed_form(tensor)
    assert isinstance(form, Diagonals)
    for index in itertools.product(*map(range, shape)):
        at = [_number(place) for place in form.places(tuple(map(sympy.Integer, index)))]
        assert 0 in at[-2:] and tensor[tuple(at)] == tensor[index]
    changed = tensor.clone()
    changed[..., -1, -1] += 1
    assert closed_form(changed) is None
    assert closed_form(tensor.double()) is None and closed_form(tensor.to(torch.uint8)) is None


def _number(place: ex.Expr) -> int:
    match place:
        case ex.Index(value):
            return int(value)
        case ex.Binary("maximum", ex.Index(value), ex.Const(0)):
            return max(int(value), 0)
    raise AssertionError(place)


def test_a_form_is_of_one_tensor_only() -> None:
    form = closed_form(FOUND["tril"])
    assert form is not None
    assert closed_form(torch.tensor(2**53 + 1)) != closed_form(torch.tensor(2**53))
    assert form not in (closed_form(FOUND["window"]), closed_form(FOUND["tril"].double()))
