"""The same step again from the same state: does it leave the same bits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from advisor.core.errors import AdvisorError
from advisor.testing.device_lock import alone
from advisor.testing.live import LiveStep
from advisor.trials.numerics.state import SavedState

SHOWN = 5


def difference(live: LiveStep, runs: int) -> str:
    """What differs between `runs` runs of the step, with the operators that torch knows to vary; "" when nothing does.

    Raises:
        AdvisorError: with fewer than two runs, or when the measurement has found no module to compare.
    """
    if runs < 2:
        raise AdvisorError(f"runs={runs}", expected="two or more")
    modules = [root.module for root in live.training.roots]
    if not modules:
        raise AdvisorError("no module with parameters was seen in the step", expected="a step that trains a module")
    with alone(), _kept(live) as saved:
        first = _run(live, saved)
        for number in range(2, runs + 1):
            other = _run(live, saved)
            changed = [name for name, value in first.items() if not _equal(value, other.get(name))]
            if changed:
                return _told(changed, number, _varying(live, saved))
    return ""


class _Optimizers:
    """State and settings of the optimizers and scalers, put back by `restore`."""

    def __init__(self, live: LiveStep) -> None:
        self._saved = [
            (o, _copied(o.state), [_settings(group) for group in o.param_groups]) for o in live.training.optimizers
        ]
        self._scalers = [(scaler, copy.deepcopy(scaler.state_dict())) for scaler in live.training.scalers]

    def restore(self) -> None:
        for optimizer, state, groups in self._saved:
            optimizer.state.clear()
            optimizer.state.update(_copied(state))
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for key, (value, was) in settings.items():
                    group[key] = was
                    if isinstance(value, torch.Tensor):  # stays the one that a scheduler or compiled code holds
                        value.detach().copy_(was)
                        group[key] = value
        for scaler, state in self._scalers:
            if state:
                scaler.load_state_dict(state)


@contextmanager
def _kept(live: LiveStep) -> Iterator[tuple[SavedState, _Optimizers]]:
    """The training is afterwards what it was before: parameters, buffers, gradients, optimizers, random states."""
    optimizers = _Optimizers(live)
    with SavedState([root.module for root in live.training.roots], live.training) as saved:
        try:
            yield saved, optimizers
        finally:
            optimizers.restore()


def _run(live: LiveStep, saved: tuple[SavedState, _Optimizers]) -> dict[str, torch.Tensor]:
    for state in saved:
        state.restore()
    live.call()
    found: dict[str, torch.Tensor] = {}
    for root in live.training.roots:
        for name, parameter in root.module.named_parameters():
            found[f"{root.name}.{name}"] = parameter.detach().clone()
            if parameter.grad is not None:
                found[f"{root.name}.{name}.grad"] = parameter.grad.detach().clone()
        for name, buffer in root.module.named_buffers():
            found[f"{root.name}.{name}"] = buffer.detach().clone()
    for number, optimizer in enumerate(live.training.optimizers):
        for position, entry in enumerate(optimizer.state.values()):
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    found[f"{type(optimizer).__name__}#{number}.state[{position}].{name}"] = value.detach().clone()
    return found


def _varying(live: LiveStep, saved: tuple[SavedState, _Optimizers]) -> list[str]:
    """Operators of the step of which torch says that they have no deterministic implementation in use."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _run(live, saved)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    texts = (str(warning.message) for warning in caught)
    return sorted({text.partition(" does not have")[0] for text in texts if "deterministic" in text})


def _told(changed: list[str], number: int, varying: list[str]) -> str:
    rest = len(changed) - SHOWN
    lines = [
        f"run {number} of the step left other bits than the first, from the same state, in {len(changed)} tensors:"
    ]
    lines += [f"  {name}" for name in changed[:SHOWN]] + ([f"  and {rest} more"] if rest > 0 else [])
    if varying:
        lines.append("operators that torch calls nondeterministic: " + ", ".join(varying))
    else:
        lines.append("If the step draws another batch each time, give it a fixed one.")
    return "\n".join(lines)


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return (
        other is not None
        and one.shape == other.shape
        and bool(((one == other) | ((one != one) & (other != other))).all())
    )


def _settings(group: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a group says beside its parameters, as it stands there and as a copy."""
    return {
        key: (value, value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value))
        for key, value in group.items()
        if key != "params"
    }


def _copied(state: Any) -> dict[Any, Any]:
    """Optimizer state by parameter: new tensors, the same parameters as keys."""
    return {
        key: {k: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in entry.items()}
        for key, entry in state.items()
    }
