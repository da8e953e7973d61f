"""Student's t distribution, for any degrees of freedom from 1 up; and the logarithms that it is taken of where runs are compared.

Sources: Abramowitz & Stegun, Handbook of Mathematical Functions, 26.5.8 (incomplete beta), 26.7.1 (Student's t).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Lentz's continued fraction of the incomplete beta function (A&S 26.5.8)."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    h = d
    for m in range(1, 400):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            h *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return h


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _beta_fraction(x, a, b) / a
    return 1.0 - front * _beta_fraction(1.0 - x, b, a) / b


def t_cdf(t: float, degrees: float) -> float:
    """P(T ≤ t) of Student's t with `degrees` of freedom."""
    tail = 0.5 * _incomplete_beta(degrees / (degrees + t * t), degrees / 2.0, 0.5)
    return 1.0 - tail if t >= 0 else tail


@functools.lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: float) -> float:
    """The t with P(T ≤ t) = `probability`, by bisection on the distribution function; 0 < probability < 1.

    Raises:
        ValueError: outside that range, or with less than one degree of freedom.
    """
    if not 0.0 < probability < 1.0 or degrees < 1:
        raise ValueError(f"t_quantile({probability}, {degrees}) is not defined")
    if probability < 0.5:
        return -t_quantile(1.0 - probability, degrees)
    low, high = 0.0, 2.0
    while t_cdf(high, degrees) < probability:
        low, high = high, high * 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if high - low <= 1e-12 * max(1.0, high):
            break
        if t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def block_logs(blocks: Sequence[Sequence[float]], *, means: bool) -> list[float]:
    """For each block of step times the logarithm of its median.

    With `means` the logarithm of the mean of all steps, plus what the block is above it as a share of it: the mean of these is that
    logarithm. Not the blocks' own, whose mean makes little of a block that holds a long wait or an epoch's start: what both arms wait for
    there would hardly count, and 1.15 times as fast was called 1.37.
    """
    if not means:
        return [math.log(statistics.median(block)) for block in blocks]
    steps = sum(map(len, blocks))
    mean = math.fsum(map(math.fsum, blocks)) / steps
    weight = len(blocks) / steps
    return [math.log(mean) + weight * math.fsum(s / mean - 1.0 for s in block) for block in blocks]
