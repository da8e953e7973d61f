"""Whether a plan's items, or transforms by name, show their effect in a measured step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.core.profile import StepProfile
from advisor.core.verdict import Check, Status
from advisor.testing.live import LiveStep
from advisor.transforms import registry
from advisor.trials import planfile


def checks(
    live: LiveStep, names: Sequence[str | Path], after: StepProfile, before: StepProfile | None
) -> Iterator[tuple[str, Check]]:
    """Each transform's own check of its effect; a name that ends in `.yaml` stands for a plan's kept items.

    Raises:
        AdvisorError: for no name, an unknown transform, or a plan that cannot be read or keeps nothing.
    """
    if not names:
        raise AdvisorError("nothing was named", expected="transforms, or a plan file")
    for name in _transforms(names):
        yield name, registry.get(name).effect(live.training, before, after)


def _transforms(names: Sequence[str | Path]) -> Iterator[str]:
    for name in names:
        if not str(name).endswith((".yaml", ".yml")):
            yield str(name)
            continue
        kept = [item.transform for item in planfile.read(Path(name)).items if item.status == Status.KEPT]
        if not kept:
            raise AdvisorError(f"{name} keeps nothing", expected="a plan with an item whose status is kept")
        yield from kept
