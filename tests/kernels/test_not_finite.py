"""NaN and Inf in each floating input and in what comes from above: they come out, of both passes, where PyTorch's own lets them.

What would hide them is a kernel that selects or compares where PyTorch's own adds and multiplies: a training that has gone wrong would
look sound, and a GradScaler would take a step that it should skip. What would spread them is a kernel that multiplies where PyTorch's own
selects, by a slope of zero.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulation.device import forget_launches
from emulation.planted import planted
from torch.nn import functional as F

from advisor.ops import catalog, verify
from advisor.ops.batchnorm_act import reference
from advisor.ops.family import Arguments, Case, Family
from advisor.ops.pooling import api as pooling_api

# Of each family a small case of each set of kernels; the first in every run, the others with `make test-long`.
SMALLEST: dict[tuple[Any, ...], tuple[Family, Case]] = {}
for _family in catalog.FAMILIES:
    for _case in sorted(_family.verification, key=lambda case: torch.Size(case.shape).numel(), reverse=True):
        if _family.captured or "backward" in _case.passes:  # images are bytes
            SMALLEST[(_family.id, *(work.kernels for work in _case.passes.values()))] = _family, _case
FIRST = {family.id: case for family, case in reversed(SMALLEST.values())}
CASES = [
    pytest.param(
        family, case, id=f"{family.id}-{case.label}", marks=[] if FIRST[family.id] is case else [pytest.mark.long]
    )
    for family, case in SMALLEST.values()
]

# Cases whose activation is flat in places; below these PyTorch's own gives zero, whatever comes from above. Of each family, backward
# and activation one whose tensor is large enough to have such places.
_FLAT = re.compile(r"(?<!leaky_)relu6?|hardswish")
_LEAST_ROWS = {"relu": 20, "relu6": 20, "hardswish": 150}
DEAD: dict[tuple[Any, ...], tuple[Family, Case]] = {}
for _family in catalog.FAMILIES:
    for _case in sorted(_family.verification, key=lambda case: torch.Size(case.shape).numel()):
        if "backward" in _case.passes and (_found := _FLAT.search(_case.name)):
            _what = _found.group()
            if torch.Size(_case.shape).numel() // _case.shape[1] >= _LEAST_ROWS[_what]:
                DEAD.setdefault((_family.id, _case.passes["backward"].kernels, _what), (_family, _case))


def _dead(family: Family, case: Case) -> Case:
    """Of squeeze-and-excite, with a second weight so large that the gate is flat too, in places."""
    if family.id != "squeeze_excite":
        return case

    def inputs(generator: torch.Generator, n: int) -> Arguments:
        x, w1, b1, w2, *rest = case.inputs(generator, n)
        return (x, w1, b1, (w2.detach() * 30).requires_grad_(), *rest)

    return replace(case, inputs=inputs)


_first_dead = {family.id: case for family, case in reversed(DEAD.values())}
DEAD_CASES = [
    pytest.param(
        family,
        _dead(family, case),
        id=f"{family.id}-{case.label}",
        marks=[] if _first_dead[family.id] is case else [pytest.mark.long],
    )
    for family, case in DEAD.values()
]


class _Hardswish(torch.autograd.Function):
    """As on CUDA: of NaN the CPU's gradient is NaN where it takes whole vectors, and what comes from above where not."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z)
        return F.hardswish(z)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (z,), (dy,) = ctx.saved_tensors, gradients
        return torch.where(z <= -3, 0.0, torch.where(z < 3, dy * (z / 3 + 0.5), dy))


def _values(tensor: torch.Tensor) -> tuple[float, ...]:
    """Not Inf in parameters of a channel: the CPU's batch norm folds mean and scale into an offset, Inf - Inf, as CUDA's does not."""
    return (float("nan"), float("inf")) if tensor.dim() > 1 else (float("nan"),)


def _all(result: verify.Computed) -> list[torch.Tensor]:
    return [*result.outputs, *result.gradients]


def _by_filter(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Of a filter's gradient whether any of its taps is not finite: who pads an image multiplies zeros, who does not has none."""
    wrong = ~torch.isfinite(tensor)
    return wrong.flatten(2).any(2) if like.dim() == 4 and like.is_leaf and like.shape[2] > 1 else wrong


def _differences(
    mine: verify.Computed, theirs: Sequence[verify.Computed], leaves: Sequence[torch.Tensor | None]
) -> list[str]:
    """Where all of `theirs` agree on what is finite and `mine` is not as they are."""
    found = []
    for number, leaf in enumerate(leaves):
        tensors = [_all(result)[number] for result in (mine, *theirs)]
        ours, *others = [_by_filter(t, leaf) if leaf is not None else ~torch.isfinite(t) for t in tensors]
        lost = int((torch.stack(others).all(0) & ~ours).sum())
        more = int((ours & ~torch.stack(others).any(0)).sum())
        if lost or more:
            found.append(f"tensor {number}: {lost} finite that should not be, {more} not finite that should be")
    return found


def _untouched(mine: verify.Computed, theirs: Sequence[verify.Computed], clean: Sequence[verify.Computed]) -> list[Any]:
    """`mine` and `theirs`, 0 wherever something planted has changed one of `theirs` from `clean`, or `mine` is not finite."""
    kept = [torch.isfinite(t) for t in _all(mine)]
    for dirty, before in zip(theirs, clean, strict=True):
        kept = [k & (a == b) for k, a, b in zip(kept, _all(dirty), _all(before), strict=True)]
    found = [[torch.where(k, t, 0.0) for k, t in zip(kept, _all(result), strict=True)] for result in (mine, *theirs)]
    count = len(mine.outputs)
    return [verify.Computed(tuple(tensors[:count]), tuple(tensors[count:])) for tensors in found]


class Planting:
    """A case's arguments and what comes from above, into which values are planted."""

    def __init__(self, case: Case) -> None:
        generator = verify.seeded("cpu", 3)
        self.case, self.arguments = case, case.inputs(generator, case.shape[0])
        with torch.no_grad():
            like = verify.tensors(case.eager(*verify.copies(self.arguments, wide=False)))
        self.above = verify.upstream(case, self.arguments, like, generator)
        self.clean = self._theirs(self.arguments, self.above)

    def _theirs(self, arguments: Sequence[Any], above: Sequence[torch.Tensor]) -> list[verify.Computed]:
        """PyTorch's own, and the definition."""
        wide = verify.copies(arguments, wide=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(reference.ACTIVATIONS, "hardswish", _Hardswish.apply)
            definition = verify.run_with(self.case, self.case.reference, wide, [dy.double() for dy in above])
        return [verify.run(self.case, self.case.eager, arguments, above), definition]

    def places(self) -> dict[int, torch.Tensor]:
        """Where values are planted: floating arguments by their number, and behind all arguments what comes from above."""
        given = [*self.arguments, *(self.above if "backward" in self.case.passes else [])]
        return {i: a for i, a in enumerate(given) if isinstance(a, torch.Tensor) and a.is_floating_point()}

    def _spot(self, place: int, tensor: torch.Tensor) -> tuple[int, ...]:
        """In the middle of an argument; above an output where most activations let a gradient through: next to 1."""
        number = place - len(self.arguments)
        if number < 0:
            return tuple(size // 2 for size in tensor.shape)
        nearest = int((self.clean[1].outputs[number] - 1).abs().argmin())
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(nearest), tensor.shape))

    def _dead(self, number: int) -> list[tuple[int, ...]]:
        """Where an output is just what an activation is where it is flat, a place of each such value; and where `_spot` is."""
        output = self.clean[1].outputs[number]
        steady = torch.ones_like(output, dtype=torch.bool)
        if self.case.steady is not None:
            masks = verify.tensors(self.case.steady(*verify.copies(self.arguments, wide=True)))
            steady = masks[number] if number < len(masks) else steady
        found = [((output == value) & steady).nonzero() for value in (0.0, 6.0)]
        spots = [tuple(int(i) for i in places[len(places) // 2]) for places in found if len(places)]
        return [*spots, self._spot(len(self.arguments) + number, output)]

    def dead_wrong(self) -> dict[str, str]:
        """What is wrong, by what was planted into what comes from above: where an activation is flat, and above others that are."""
        found = {
            f"{value} above output {number} at {spot}": self.wrong(len(self.arguments) + number, value, spot)
            for number in range(len(self.above))
            for spot in self._dead(number)
            for value in (float("nan"), float("inf"))
        }
        return {what: wrong for what, wrong in found.items() if wrong}

    def all_wrong(self) -> dict[str, str]:
        """What is wrong, by what was planted where."""
        found = {
            f"{value} in number {place} of {len(self.arguments)} arguments and what comes from above": self.wrong(
                place, value
            )
            for place, tensor in self.places().items()
            for value in _values(tensor)
        }
        return {what: wrong for what, wrong in found.items() if wrong}

    def wrong(self, place: int, value: float, spot: tuple[int, ...] | None = None) -> str:
        """What is wrong with the kernels' results where `value` stands in this place; empty for nothing."""
        case, above = self.case, [dy.clone() for dy in self.above]
        arguments = list(verify.copies(self.arguments, wide=False))
        tensor = [*arguments, *above][place]
        with torch.no_grad():
            tensor[self._spot(place, tensor) if spot is None else spot] = value
        mine, theirs = verify.run(case, case.ours, arguments, above), self._theirs(arguments, above)
        leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad] if mine.gradients else []
        found = _differences(mine, theirs, [*[None] * len(mine.outputs), *leaves])
        # Of a window all NaN by its bias PyTorch's own takes the last, the kernel that adds the bias behind it the largest.
        if not found and not (case.ours is pooling_api.bias_relu_max_pool2d and place == 1):
            ours, eager, want = _untouched(mine, theirs, self.clean)
            errors = [verify.compare(case, got, want, self.above) for got in (ours, eager)]
            found += filter(None, [verify.accepted(case.dtype, *errors)])
        return "; ".join(found)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_what_is_not_finite_comes_out_where_pytorchs_own_lets_it(emulated: Any, family: Family, case: Case) -> None:
    wrong = Planting(case).all_wrong()
    assert sum(family.engaged.values())
    assert not wrong


@pytest.mark.parametrize(("family", "case"), DEAD_CASES)
def test_nothing_comes_through_where_an_activation_is_flat(emulated: Any, family: Family, case: Case) -> None:
    wrong = Planting(case).dead_wrong()
    assert sum(family.engaged.values())
    assert not wrong


FAULTS = {
    "forward": ("return z > 0.f ? z : (z != z ? z : 0.f);", "return fmaxf(z, 0.f);"),
    "backward": ("through_streaming(g[j], d[j]", "through_streaming(fmaxf(fminf(g[j], 1e30f), -1e30f), d[j]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_is_found(emulated: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    family = catalog.get("batchnorm_act")
    case = next(case for case in family.verification if case.name == "bn+relu two launches" and case.shape[2] > 1)
    assert not Planting(case).all_wrong()
    forget_launches()
    with planted(monkeypatch, *FAULTS[fault]):
        assert Planting(case).all_wrong()


# A product in place of a selection, and cases that must show it.
MULTIPLIED = {
    "relu": ("return lives(z) ? g : 0.f;", "return g * (lives(z) ? 1.f : 0.f);"),
    "bit": ("return bit ? g : (ACT == 3 ? g * slope : 0.f);", "return g * (bit ? 1.f : (ACT == 3 ? slope : 0.f));"),
    "gate": ("z < 3.f ? g * (1.f / 6.f) : 0.f;", "z < 3.f ? g * (1.f / 6.f) : g * 0.f;"),
    "hardswish": ("+ 0.5f : 1.f) : 0.f;", "+ 0.5f : 1.f) : g * 0.f;"),
    "bits": ("& 1u ? g[j] : 0.f;", "& 1u ? g[j] : g[j] * 0.f;"),
    "position": (
        "if (position_of(chosen, c) != 255) total[c] +=",
        "total[c] += (position_of(chosen, c) != 255 ? 1.f : 0.f) *",
    ),
}


@pytest.mark.parametrize(
    ("fault", "family", "words"),
    [
        ("relu", "batchnorm_act", "bn+relu"),
        ("gate", "squeeze_excite", ""),
        ("hardswish", "batchnorm_act", "bn+hardswish"),
        ("bits", "batchnorm_act", "bn+add+relu"),
        ("position", "pooling", ""),
        ("relu", "batchnorm_concat", "relu"),
        ("relu", "batchnorm_max_pool", "relu"),
        ("bit", "bias_act", "relu"),
        ("relu", "group_norm", "relu"),
        ("relu", "pointwise", "bn+relu+1x1"),
        ("relu", "squeeze_excite", ""),
    ],
)
def test_a_fault_planted_where_a_gradient_stops_is_found(
    emulated: Any, monkeypatch: pytest.MonkeyPatch, fault: str, family: str, words: str
) -> None:
    case = next(_dead(f, case) for f, case in DEAD.values() if f.id == family and words in case.name)
    assert not Planting(case).dead_wrong()
    forget_launches()
    with planted(monkeypatch, *MULTIPLIED[fault]):
        assert Planting(case).dead_wrong()
