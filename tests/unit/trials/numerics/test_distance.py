"""How far apart two results are, where there is nothing to measure by."""

from __future__ import annotations

import math

import pytest
import torch

from advisor.trials.numerics import distance as module
from advisor.trials.numerics.distance import OWN, distance, rows
from advisor.trials.numerics.replay import POOL, SMALL, Result


def result(**groups: list[float]) -> Result:
    return Result({name.replace("_", " "): [torch.tensor(values)] for name, values in groups.items()}, (), 0.0)


@pytest.mark.parametrize("group", ["output", "gradient_of_weight", "buffer_updates_of_norm"])
def test_what_was_zero_and_is_not_any_more_is_off_by_all_of_it(group: str) -> None:
    base = result(**{"output": [1.0, 2.0], group: [0.0, 0.0]})
    found = distance(result(**{"output": [1.0, 2.0], group: [0.5, -0.5]}), base)
    assert found.l2[group.replace("_", " ")] >= 1.0
    assert not found.broken
    assert distance(base, base).largest == 0.0


def expected(a: torch.Tensor, b: torch.Tensor) -> tuple[float, ...]:
    a, b = a.double(), b.double()
    d, rms = a - b, b.square().mean().sqrt()
    worst = (d.abs() / (b.abs() + rms)).max()
    return tuple(float(v) for v in (d.square().sum(), b.square().sum(), (a * b).sum(), a.square().sum(), worst, 0.0))


def pairs() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors as results hold them: of several dtypes, strided, single values, none at all."""
    torch.manual_seed(3)
    base = [torch.randn(7), torch.randn(5, 6).t(), torch.randn(3, 4, 5, 2).to(memory_format=torch.channels_last)]
    base += [torch.tensor(2.5), torch.randn(4, 4).bfloat16(), torch.randn(9).double(), torch.randn(11) * 1e-3]
    return [t + 0.01 * torch.randn(t.shape, dtype=t.dtype) for t in base], base


def sums(found: list[torch.Tensor], base: list[torch.Tensor]) -> module.Row:
    return module.added(rows(found, base))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("elements", [1, 20, 1 << 25])
def test_tensors_compared_together_are_as_far_apart_as_one_by_one(monkeypatch, together: bool, elements: int) -> None:
    monkeypatch.setattr(module, "BATCH_ELEMENTS", elements)
    if not together:

        def refused(*_: object, **__: object) -> None:
            raise RuntimeError("not on this device")

        monkeypatch.setattr(torch, "_foreach_norm", refused)
    found, base = pairs()
    single = rows(found, base)
    for row, a, b in zip(single, found, base, strict=True):
        assert row == pytest.approx(expected(a, b), rel=1e-5, abs=1e-12), a.shape
    whole = sums(found, base)
    assert whole[:4] == pytest.approx([math.fsum(row[i] for row in single) for i in range(4)])
    assert whole[4] == max(row[4] for row in single)


def test_the_same_bits_are_no_distance_apart() -> None:
    _, base = pairs()
    squares, reference, product, own, worst, broken = sums([t.clone() for t in base], base)
    assert (squares, worst, broken) == (0.0, 0.0, 0.0)
    assert product == reference == own
    other = [t.clone() for t in base]
    other[2][1, 2, 3, 1] = torch.nextafter(other[2][1, 2, 3, 1], torch.tensor(9.0))  # one bit of one element
    assert sums(other, base)[0] > 0.0


def test_values_that_are_not_finite_are_counted_where_the_other_has_them_not() -> None:
    base = [torch.tensor([1.0, 2.0, math.inf, math.nan]), torch.tensor([1.0, 1.0])]
    same = sums([t.clone() for t in base], base)
    assert (same[0], same[5]) == (0.0, 0.0)
    found = [torch.tensor([math.nan, 2.0, math.inf, math.nan]), torch.tensor([1.0, math.inf])]
    assert sums(found, base)[5] == 3.0  # a NaN counts as lost and as new, an infinity as lost
    assert sums([], []) == (0.0,) * 6
    assert sums([torch.zeros(0)], [torch.zeros(0)]) == (0.0,) * 6
    assert sums([torch.tensor([1, 5])], [torch.tensor([1, 2])])[:2] == (1.0, 2.0)


def of_parameters(gradients: dict[str, torch.Tensor]) -> Result:
    groups = {f"gradient of {name}": [g] for name, g in gradients.items() if g.numel() >= SMALL}
    small = {name: g for name, g in gradients.items() if g.numel() < SMALL}
    return Result({**groups, POOL: list(small.values())}, (), 0.0, tuple(small))


def test_small_parameters_are_also_compared_one_by_one_against_their_layer() -> None:
    torch.manual_seed(0)
    base = {
        "conv.weight": torch.randn(64, 64, 3, 3),
        "conv.bias": 1e-6 * torch.randn(64),  # truly zero, as a norm follows
        "norm.weight": torch.randn(64),
        "norm.bias": torch.randn(64),
        "gate.weight": torch.randn(4),
    }
    found = {name: g.clone() for name, g in base.items()}
    found["conv.bias"] += 0.03 * torch.randn(64)  # what bf16 leaves
    found["norm.weight"].zero_()
    apart = distance(of_parameters(found), of_parameters(base))
    own = {group.removeprefix(OWN): value for group, value in apart.l2.items() if group.startswith(OWN)}
    assert own["norm.weight"] == pytest.approx(1.0)
    assert own["norm.bias"] == 0.0
    assert 0.2 < own["conv.bias"] < 0.5
    assert "gate.weight" not in own  # of four values that may be rounding
    assert apart.largest == apart.l2[POOL] < 1.0
