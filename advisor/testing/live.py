"""A measured step that can still be run: the callable, and the training that its measurement has found in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from advisor.loop.training import Training


@dataclass(slots=True, eq=False)
class LiveStep:
    """`training` holds the modules, optimizers and scalers that the step uses; `call` runs it once."""

    call: Callable[[], Any]
    training: Training
    compiled: bool = False  # compiled code runs in it

    @classmethod
    def of(cls, call: Callable[[], Any], training: Training, *, compiled: bool) -> LiveStep:
        """A copy of what `training` holds now: measuring lets go of the original."""
        copy = Training(
            device=training.device,
            roots=list(training.roots),
            guides=list(training.guides),
            optimizers=list(training.optimizers),
            scalers=list(training.scalers),
            loaders=list(training.loaders),
            batch_size=training.batch_size,
            fixed_shapes=training.fixed_shapes,
        )
        return cls(call=call, training=copy, compiled=compiled)
