"""Shapes that hypothesis draws for every family: one image, one row, one column, channels that fill no tile.

Numerics: errors against fp64 no worse than PyTorch's own, as `advisor kernels verify` takes them. Macros that a source is compiled with
come from the families' verification cases, which other tests compile too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.ops import catalog, dispatch, verify
from advisor.ops.family import Case
from advisor.ops.pointwise.spec import BehindNorm
from advisor.ops.pooling.spec import K2S2, K3S1, K3S2, PoolWindow

Shapes = st.SearchStrategy[tuple[int, int, int, int]]
MOST = 4096  # elements: what an example takes is the emulator's time for them
FEW, MANY = 3, 200  # examples of a family, in every run and with `make test-long`


def cases_of(family: str) -> Any:
    """The family's module of cases."""
    return catalog.get(family).module("cases")


def shapes(channels: st.SearchStrategy[int], least: int = 1, rows: int = 1, most: int = MOST) -> Shapes:
    """[N, C, H, W] of at least `least` rows and columns, and of at least `rows` values a channel."""
    found = st.tuples(st.integers(1, 3), channels, st.integers(least, 9), st.integers(least, 9))
    return found.filter(lambda s: s[0] * s[2] * s[3] >= rows and torch.Size(s).numel() <= most)


def multiples(of: int, most: int) -> st.SearchStrategy[int]:
    """Of `of`, from it up to `most`; the odd ones too."""
    return st.integers(1, most // of).map(lambda n: n * of)


def one_of(*choices: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(choices)


DTYPES = one_of("bfloat16", "float16", "float32")
HALF = one_of("bfloat16", "float16")
# A norm's gradient of three values a channel or fewer is what cancellation leaves of it; behind a convolution in half precision, whose
# result is rounded ahead of it, more of them cancel.
STEADY_ROWS, BEHIND_A_CONVOLUTION = 4, 16


def batchnorm_max_pool() -> st.SearchStrategy[Case]:
    variants = ((K3S2, "float32", "relu"), (K3S2, "bfloat16", "relu"), (K2S2, "float16", "leaky_relu"))
    drawn = shapes(multiples(8, 40), least=2, rows=STEADY_ROWS)
    return st.builds(lambda s, v: cases_of("batchnorm_max_pool")._case(s, *v), drawn, one_of(*variants))


def batchnorm_concat() -> st.SearchStrategy[Case]:
    return st.builds(
        cases_of("batchnorm_concat")._case,
        shapes(multiples(8, 40), rows=STEADY_ROWS, most=MOST // 4),
        st.integers(1, 4),
        multiples(8, 40),
        HALF,
        st.just("relu"),
    )


def batchnorm_act() -> st.SearchStrategy[Case]:
    cases = cases_of("batchnorm_act")
    drawn = shapes(multiples(8, 80), rows=STEADY_ROWS)
    residual, way = st.booleans(), one_of("two launches", "one launch", "whole grid")
    trained = st.builds(
        lambda s, r, w, f: cases.case_of(s, "bfloat16", "relu", r, way=w, forked=f), drawn, residual, way, st.booleans()
    )
    frozen = st.builds(cases.frozen_case_of, drawn, st.just("bfloat16"), st.just("relu"), residual, st.booleans())
    return st.one_of(trained, trained, frozen)


def squeeze_excite() -> st.SearchStrategy[Case]:
    return st.builds(
        lambda hidden, s, v: cases_of("squeeze_excite")._case(hidden, s, *v),
        st.integers(1, 40),
        shapes(multiples(8, 80)),
        one_of(("silu", "sigmoid", "bfloat16", True), ("relu", "hardsigmoid", "float32", True)),
    )


def pooling() -> st.SearchStrategy[Case]:
    cases = cases_of("pooling")

    def windowed(window: PoolWindow, least: int, make: Any) -> st.SearchStrategy[Case]:
        return st.builds(lambda s, d: make(s, window, d), shapes(multiples(8, 40), least), HALF)

    return st.one_of(
        windowed(K3S2, 1, cases._max),
        windowed(K3S2, 1, cases.bias_max_case),
        windowed(K3S2, 1, lambda *given: cases._avg(*given, include=False)),
        st.builds(cases._max, shapes(multiples(8, 40)), st.just(K3S1), st.just("bfloat16")),
        st.builds(cases.bias_max_case, shapes(multiples(8, 40), 2), st.just(K2S2), st.just("bfloat16")),
        st.builds(cases._global, shapes(multiples(8, 200)), DTYPES),
    )


def upsample() -> st.SearchStrategy[Case]:
    cases = cases_of("upsample")
    bilinear = st.builds(
        lambda s, d, skip: cases.case_of(s, d, skip=skip),
        shapes(multiples(8, 24), most=MOST // 4),
        DTYPES,
        one_of(0, 8, 24),
    )
    sized = st.builds(
        lambda s, mode, size: cases.case_of(s, "bfloat16", mode, size=size),
        shapes(multiples(8, 24)),
        one_of("bilinear", "nearest"),
        st.tuples(st.integers(1, 13), st.integers(1, 13)),
    )
    exact = st.builds(
        lambda s, up: cases.case_of(s, "bfloat16", "nearest-exact", size=(int(s[2] * up[0]), int(s[3] * up[1]))),
        shapes(multiples(8, 24), most=MOST // 8),
        st.tuples(st.floats(1, 14), st.floats(1, 14)),
    )
    return st.one_of(bilinear, sized, exact)


def layer_norm() -> st.SearchStrategy[Case]:
    pairs = (("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32"))
    # A norm over few channels leaves little of a gradient.
    drawn = shapes(multiples(8, 300))
    return st.builds(
        lambda s, p, dim: cases_of("layer_norm")._case(s, *p, dim=dim), drawn, one_of(*pairs), one_of(1, -1)
    )


def group_norm() -> st.SearchStrategy[Case]:
    variants = one_of(
        ("bfloat16", "bfloat16", "silu", True),
        ("float32", "float32", "silu", True),
        ("float32", "bfloat16", "relu", True),
    )
    size = st.tuples(st.integers(1, 6), multiples(8, 40)).map(lambda pair: (pair[0], pair[0] * pair[1]))
    return size.flatmap(
        lambda pair: st.builds(
            lambda s, v: cases_of("group_norm")._case(pair[0], s, *v), shapes(st.just(pair[1])), variants
        )
    )


def depthwise() -> st.SearchStrategy[Case]:
    cases = cases_of("depthwise")
    taps = one_of((3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2))
    alone = st.builds(lambda s, d, t: cases._case(s, d, *t), shapes(multiples(2, 40), most=MOST // 2), DTYPES, taps)
    normed = st.builds(
        lambda s: cases._with_norm(cases._case(s, "float32", 3, 1), 3, 1)[0],
        shapes(multiples(8, 40), rows=BEHIND_A_CONVOLUTION, most=MOST // 2),
    )
    return alone | normed


def large_depthwise() -> st.SearchStrategy[Case]:
    cases = cases_of("large_depthwise")
    taps = one_of((11, 11), (13, 5), (1, 11), (15, 15))
    return st.builds(
        lambda s, d, t, bias: cases._case(s, t, d, bias=bias),
        shapes(st.integers(1, 3), most=MOST // 8),
        DTYPES,
        taps,
        st.booleans(),
    )


def fft_conv() -> st.SearchStrategy[Case]:
    return st.builds(
        lambda s, outputs, t: cases_of("fft_conv")._case(s, outputs, t),
        shapes(st.integers(1, 3), most=MOST // 8),
        st.integers(1, 4),
        one_of((11, 11), (11, 13)),
    )


def exact_conv() -> st.SearchStrategy[Case]:
    cases = cases_of("exact_conv")
    taps = one_of(((3, 3), 1), ((3, 3), 2), ((1, 1), 1), ((1, 1), 2), ((5, 3), 1))
    return st.builds(
        lambda s, outputs, t, bias: cases._case(s, outputs, *t, bias=bias),
        shapes(st.integers(1, 40), most=MOST // 4),
        st.integers(1, 90),
        taps,
        st.booleans(),
    )


def grouped() -> st.SearchStrategy[Case]:
    variants = one_of((4, 1), (4, 2), (8, 1), (8, 2), (16, 1), (16, 2), (24, 1), (32, 1), (64, 1), (40, 1))

    def of(variant: tuple[int, int]) -> st.SearchStrategy[Case]:
        channels = multiples(max(8, variant[0]), 80)
        return st.builds(lambda s: cases_of("grouped")._case(s, "bfloat16", *variant), shapes(channels, most=MOST // 2))

    return variants.flatmap(of)


def bias_act() -> st.SearchStrategy[Case]:
    cases = cases_of("bias_act")
    variants = one_of(("relu", True, False), ("relu", True, True), ("silu", True, False))
    drawn = shapes(multiples(8, 80))
    linear = st.tuples(st.integers(1, 3), st.integers(1, 9), multiples(8, 80))
    scaled = one_of(
        ("bfloat16", "float32", cases._BOTH),
        ("bfloat16", "bfloat16", cases._DROP),
        ("float32", "float32", cases._SCALE),
    )
    return st.one_of(
        st.builds(lambda s, d, v: cases._case(s, d, *v), drawn, DTYPES, variants),
        st.builds(lambda s, d: cases._linear_case(s, d, "gelu", measured=False), linear, DTYPES),
        st.builds(lambda s, v: cases._scale_case(s, *v, measured=False), drawn, scaled),
    )


def first_conv() -> st.SearchStrategy[Case]:
    variants = one_of((16, 3, 1), (32, 3, 2), (64, 7, 2), (40, 5, 3))
    return st.builds(
        lambda s, v, bias: cases_of("first_conv")._case(s, "bfloat16", *v, bias=bias),
        shapes(st.just(3), most=MOST // 8),
        variants,
        st.booleans(),
    )


def conv3x3() -> st.SearchStrategy[Case]:
    pairs = one_of((64, 64), (128, 32), (32, 128), (32, 64), (64, 32))
    return pairs.flatmap(
        lambda pair: st.builds(
            lambda s: cases_of("conv3x3")._case(s, pair[1]), shapes(st.just(pair[0]), most=MOST // 2)
        )
    )


def winograd() -> st.SearchStrategy[Case]:
    pairs = one_of((192, 256), (256, 192))
    return pairs.flatmap(
        lambda pair: st.builds(
            lambda s: cases_of("winograd")._case(s, pair[1]), shapes(st.just(pair[0]), least=4, most=2 * MOST)
        )
    )


def pointwise() -> st.SearchStrategy[Case]:
    cases = cases_of("pointwise")
    drawn = shapes(multiples(8, 80), rows=BEHIND_A_CONVOLUTION, most=MOST // 2)
    alone = st.builds(lambda s, out: cases._cases(s, out, "bfloat16")[0], drawn, multiples(8, 80))
    behind = st.builds(
        lambda s, out, forked: cases._behind_cases(s, BehindNorm(s[1], out, 0, "relu", forked, forked), "bfloat16")[0],
        drawn,
        multiples(8, 80),
        st.booleans(),
    )
    return alone | behind


def strided_pointwise() -> st.SearchStrategy[Case]:
    drawn = shapes(multiples(8, 80), most=MOST // 2)
    return st.builds(cases_of("strided_pointwise").case_of, drawn, multiples(8, 80), HALF)


def images() -> st.SearchStrategy[Case]:
    layouts = one_of((True, False), (True, True), (False, False))
    return st.builds(
        lambda s, d, order: cases_of("input")._case(s, d, x_nhwc=order[0], y_nhwc=order[1]),
        shapes(st.just(3)),
        DTYPES,
        layouts,
    )


def casts() -> st.SearchStrategy[Case]:
    sizes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5).map(tuple)
    return st.builds(lambda s, d: cases_of("casts")._case("any", s, d), sizes, HALF)


def padding() -> st.SearchStrategy[Case]:
    modes = one_of("reflect", "replicate", "circular")
    return st.builds(
        lambda s, d, mode, sides: cases_of("padding")._case(s, d, mode, sides),
        shapes(multiples(8, 40), least=2),
        DTYPES,
        modes,
        one_of((1, 1, 1, 1), (0, 1, 1, 0)),
    )


def few_channels() -> st.SearchStrategy[Case]:
    variants = one_of(((2, 2), (1, 1), (0, 0)), ((3, 3), (1, 1), (1, 1)), ((3, 3), (2, 2), (1, 1)))
    drawn = shapes(one_of(1, 2, 4, 5, 6, 7), least=3, most=MOST // 8)
    return st.builds(lambda s, d, v: cases_of("few_channels")._case(s, d, 8, *v), drawn, HALF, variants)


def bias_add() -> st.SearchStrategy[Case]:
    return st.builds(
        lambda s, d, residual: cases_of("bias_add")._case(s, d, residual=residual),
        shapes(multiples(8, 80)),
        DTYPES,
        st.booleans(),
    )


def volume_pooling() -> st.SearchStrategy[Case]:
    cases = cases_of("volume_pooling")
    variants = one_of(("max_pool3d", cases._STEM), ("max_pool3d", cases._HALVING), ("avg_pool3d", cases._HALVING))
    size = st.integers(2, 5)
    drawn = st.tuples(st.integers(1, 2), multiples(8, 24), size, size, size)
    return st.builds(lambda s, d, v: cases._case(v[0], s, v[1], d), drawn, DTYPES, variants)


def prelu() -> st.SearchStrategy[Case]:
    return st.builds(lambda s, d: cases_of("prelu")._case(s, d), shapes(multiples(8, 80)), DTYPES)


DRAWN = {
    drawn.__name__.replace("images", "input"): drawn
    for drawn in (
        batchnorm_max_pool, batchnorm_concat, batchnorm_act, squeeze_excite, pooling, upsample, layer_norm, group_norm,
        large_depthwise, depthwise, grouped, fft_conv, bias_act, exact_conv, first_conv, conv3x3, winograd, pointwise, strided_pointwise, images, casts,
        padding, few_channels, bias_add, volume_pooling, prelu,
    )
}  # fmt: skip


def check(identifier: str, case: Case) -> None:
    """Raises AssertionError where the kernels did not run, or their errors are larger than PyTorch's own and rounding."""
    family = catalog.get(identifier)
    before = sum(family.engaged.values())
    mine, theirs = verify.errors(case, (case.ours, case.eager), "cpu", batch=case.shape[0], seed=0)
    assert sum(family.engaged.values()) > before, dispatch.told(identifier)
    assert verify.accepted(case.dtype, mine, theirs) == ""


def test_every_family_is_drawn_for() -> None:
    assert set(DRAWN) == {family.id for family in catalog.FAMILIES}


@pytest.mark.each_value
@pytest.mark.parametrize("images", [pytest.param(None, id="any"), pytest.param(1, id="one image")])
@pytest.mark.parametrize("identifier", DRAWN)
def test_errors_are_no_worse_than_pytorchs_own(emulated: Any, identifier: str, images: int | None) -> None:
    hold_for(identifier, images, FEW)


@pytest.mark.long
@pytest.mark.parametrize("identifier", DRAWN)
def test_nor_are_those_of_many(emulated: Any, identifier: str) -> None:
    hold_for(identifier, None, MANY)


def hold_for(identifier: str, images: int | None, examples: int) -> None:
    drawn = DRAWN[identifier]()

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(drawn if images is None else drawn.filter(lambda case: case.shape[0] == images))
    def hold(case: Case) -> None:
        check(identifier, case)

    hold()
