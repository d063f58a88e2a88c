"""Functions that Triton's language lacks, for the generated score functions.

They are written in Triton, because libdevice does not run in the interpreter. Errors in float32 are a few roundings of
the result, or of 1 where a docstring says so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

IN_PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
_APPROXIMATE_TANH = tl.constexpr("tanh.approx.f32 $0, $1;")


@triton.jit
def before(position, end):
    """Whether `position` is before `end`. end: None if it certainly is."""
    return tl.cast(True, tl.int1) if end is None else position < end


@triton.jit
def spread(x, like):
    """`x` as float32 in the shape of `like`, without a tile of zeros, for which Gluon would want a layout."""
    wide = tl.cast(x, tl.float32)
    return tl.where(like == like, wide, wide)


@triton.jit
def tanh(x):
    # Cephes (Moshier): a polynomial near 0, where 1 - 2 / (exp(2x) + 1) cancels.
    y = x * x
    near = (((-5.70498872745e-3 * y + 2.06390887954e-2) * y - 5.37397155531e-2) * y + 1.33314422036e-1) * y
    near = x + x * y * (near - 3.33332819422e-1)
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def tanh_of_score(x, HALF: tl.constexpr):
    """tanh with an error of a rounding of 1, which a cap multiplies.

    HALF: whether the score is a product in 16 bits, for which an error of 2^-11 will do.
    """
    if HALF and IN_PTX:
        y = tl.inline_asm_elementwise(_APPROXIMATE_TANH, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)
    return y


@triton.jit
def expm1(x):
    # The Taylor series where exp(x) - 1 cancels.
    near = 1.0 + x * (1 / 7) * (1.0 + x * (1 / 8))
    near = 1.0 + x * (1 / 4) * (1.0 + x * (1 / 5) * (1.0 + x * (1 / 6) * near))
    near = x * (1.0 + x * (1 / 2) * (1.0 + x * (1 / 3) * near))
    return tl.where(tl.abs(x) < 0.5, near, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    # Kahan's correction for the part of x that 1 + x loses.
    y = 1.0 + x
    far = tl.log(y)
    return tl.where((y == 1.0) | (tl.abs(x) == float("inf")), tl.where(y == 1.0, x, far), far - ((y - 1.0) - x) / y)


@triton.jit
def atan(x):
    # Cephes: one polynomial for three ranges.
    y = tl.abs(x)
    far, middle = y > 2.414213562373095, y > 0.4142135623730951
    z = tl.where(far, -1.0 / tl.where(y == 0.0, 1.0, y), tl.where(middle, (y - 1.0) / (y + 1.0), y))
    z = tl.where(y == float("inf"), 0.0, z)
    start = tl.where(far, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    s = z * z
    z = (((8.05374449538e-2 * s - 1.38776856032e-1) * s + 1.99777106478e-1) * s - 3.33329491539e-1) * s * z + z
    return tl.where(x < 0.0, -(start + z), start + z)


@triton.jit
def atan2(y, x):
    angle = atan(y / tl.where(x == 0.0, 1.0, x))
    beyond = tl.where(y < 0.0, angle - 3.141592653589793, angle + 3.141592653589793)
    upright = tl.where(y > 0.0, 1.5707963267948966, tl.where(y < 0.0, -1.5707963267948966, 0.0))
    return tl.where(x > 0.0, angle, tl.where(x < 0.0, beyond, upright))


@triton.jit
def sinh(x):
    y = expm1(tl.abs(x))
    # Halving first delays overflow.
    half = 0.5 * y + 0.5 * (y / (y + 1.0))
    half = tl.where(y == float("inf"), y, half)
    return tl.where(x < 0.0, -half, half)


@triton.jit
def cosh(x):
    y = tl.exp(tl.abs(x))
    return 0.5 * y + 0.5 / y


@triton.jit
def asinh(x):
    y = tl.abs(x)
    far = tl.log(y) + 0.6931471805599453
    near = log1p(y + y * y / (1.0 + tl.sqrt(1.0 + y * y)))
    found = tl.where(y > 1e9, far, near)
    return tl.where(x < 0.0, -found, found)


@triton.jit
def acosh(x):
    y = x - 1.0
    return tl.where(x > 1e9, tl.log(x) + 0.6931471805599453, log1p(y + tl.sqrt(2.0 * y + y * y)))


@triton.jit
def atanh(x):
    y = tl.abs(x)
    half = 0.5 * log1p(2.0 * y / (1.0 - y))
    return tl.where(x < 0.0, -half, half)


@triton.jit
def sinc(x):
    y = 3.141592653589793 * tl.where(x == 0.0, 1.0, x)
    return tl.where(x == 0.0, 1.0, tl.sin(y) / y)


@triton.jit
def softplus(x):
    # With torch's threshold.
    return tl.where(x > 20.0, x, log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def round_(x):
    # Halves round to even.
    below = tl.floor(x)
    apart = x - below
    odd = below - 2.0 * tl.floor(below * 0.5) != 0.0
    return tl.where((apart > 0.5) | ((apart == 0.5) & odd), below + 1.0, below)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)


@triton.jit
def floor_divide(a, b):
    """The quotient of two integers, rounded down; Triton's division and remainder round towards 0."""
    quotient = a // b
    left = a - quotient * b
    return tl.where((left != 0) & ((left < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def modulo(a, b):
    """The remainder of two integers, with the sign of `b`."""
    left = a - (a // b) * b
    return tl.where((left != 0) & ((left < 0) != (b < 0)), left + b, left)


@triton.jit
def float_modulo(a, b):
    left = a % b
    return tl.where((left != 0.0) & ((left < 0.0) != (b < 0.0)), left + b, left)


@triton.jit
def float_floor_divide(a, b):
    # From the remainder, which is exact, as torch does.
    left = a % b
    quotient = tl.div_rn(a - left, b)
    quotient = tl.where((left != 0.0) & ((left < 0.0) != (b < 0.0)), quotient - 1.0, quotient)
    below = tl.floor(quotient)
    return tl.where(b == 0.0, a / b, tl.where(quotient - below > 0.5, below + 1.0, below))


@triton.jit
def power(a, b):
    """a ** b, with an error of a rounding of the exponent b * log2(a), times the result."""
    size = tl.exp2(b * tl.log2(tl.abs(a)))
    whole = tl.floor(b) == b
    odd = b - 2.0 * tl.floor(b * 0.5) != 0.0
    signed = tl.where(a < 0.0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    return tl.where((b == 0.0) | (a == 1.0), 1.0, signed)
