"""Names: torch's tags say what is element-wise, in every version of torch that the tests run under."""

from __future__ import annotations

import pytest

from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.graph.names import DROPOUT, JOINS, LAYOUT, LOOKUPS, PRODUCTS, is_between, is_elementwise

# What programs compute masks and scores with, beside the functions that have a row.
ELEMENTWISE = (
    "absolute addcdiv addcmul and arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_not "
    "bitwise_or bitwise_xor bool celu clamp clamp_max clamp_min clip copy deg2rad divide elu eq equal expit fill fix "
    "float float_power floordiv fmax fmin frac ge greater greater_equal gt half hardshrink hardsigmoid hardswish "
    "hardtanh heaviside index_fill index_put int invert ldexp le leaky_relu lerp less less_equal log_sigmoid logaddexp "
    "logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid long lt masked_fill masked_scatter max "
    "min mish mod multiply nan_to_num ne negative not not_equal or positive prelu rad2deg relu6 rsub selu setitem sgn "
    "softshrink softsign square subtract tanhshrink threshold to true_divide type_as where xlogy xor zero"
).split()


@pytest.mark.parametrize("name", [*ELEMENTWISE, *sorted(FUNCTIONS.keys() - LAYOUT)])
def test_what_is_elementwise(name: str) -> None:
    assert is_elementwise(name) and is_between(name)


@pytest.mark.parametrize("name", ["hypot", "copysign", "lgamma", "entr", "nextafter"])
def test_what_only_torch_says(name: str) -> None:
    """`torch.special.entr` goes by its short name."""
    assert is_elementwise(name)


@pytest.mark.parametrize(
    "name", sorted(PRODUCTS | JOINS | LOOKUPS | DROPOUT | {"rrelu", "bernoulli", "sort", "conv2d", "no"})
)
def test_what_is_not(name: str) -> None:
    """A product sums, a lookup takes elements from elsewhere, and no drawn number is the same twice."""
    assert not is_elementwise(name)
