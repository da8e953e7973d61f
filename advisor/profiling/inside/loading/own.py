"""Batches that no DataLoader makes: a generator of the script's, or calls in its loop, seen by sampling the training's thread.

What is the input's there, and what the training's? Inside a module's forward, an optimizer or a backward pass nothing is the input's. Of the
rest: what reads, decodes or changes images by its name, and all that a generator does in which no module was ever called.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from types import CodeType, FrameType
from typing import Any

from advisor.core.loading import COLOUR, CROP, DECODE, FLIP, READ, RESIZE, LoaderWork
from advisor.loop.sources import USER
from advisor.profiling.inside.loading.naming import NamedWork, outwards
from advisor.profiling.inside.loading.sampling import LoaderSampler

SURE = frozenset({READ, DECODE, RESIZE, FLIP, CROP, COLOUR})
# Modules of these packages change images, and are no part of the training.
_TRANSFORMS = ("torchvision.transforms", "kornia.augmentation", "albumentations")
_TRAINS = (
    "/torch/nn/modules/module.py",
    "/torch/optim/",
    "/torch/autograd/",
    "/torch/_tensor.py",
    "/torch/utils/data/",
)


class StepSampler(LoaderSampler):
    """Samples whole steps of the thread that has made it, from `start` to `stop_after`."""

    def __init__(self, clock: Any = time) -> None:
        super().__init__(worker=False, clock=clock)
        self._steps = 0
        self._spent_s = 0.0
        self._of_generators: defaultdict[tuple[NamedWork, CodeType | None], float] = defaultdict(float)
        self._counts: defaultdict[tuple[NamedWork, CodeType | None], int] = defaultdict(int)
        self._training: set[CodeType] = set()  # generators in which a module was called

    def stop_after(self, steps: int) -> None:
        """Over: so many steps were made meanwhile."""
        if not self.over:
            self._steps = steps
        self.stop()

    def take(self, frames: dict[int, Any], elapsed_s: float, now: float) -> None:
        """One sample, as `LoaderSampler.take` has it."""
        frame = frames.get(self._thread_id)
        self._spent_s += elapsed_s
        generator = next((each.f_code for each in outwards(frame) if self._is_own_generator(each)), None)
        if _trains(frame):
            if generator is not None:
                self._training.add(generator)
            return
        work = self._naming.anywhere(frame)
        if work is not None and (generator is not None or work.kind in SURE):
            key = work, None if work.kind in SURE else generator
            self._of_generators[key] += elapsed_s
            self._counts[key] += 1

    def work(self) -> LoaderWork:
        """What is known once it is over."""
        chosen = [key for key in self._of_generators if key[1] not in self._training]
        self.samples = sum(self._counts[key] for key in chosen)
        self._weights.clear()
        for key in chosen:
            self._weights[key[0]] += self._of_generators[key]
        whole = sum(self._weights.values())
        self._each_s = [whole / self._steps] if self._steps and whole else []
        self._since, self._until = 0.0, self._spent_s
        return super().work()

    def _is_own_generator(self, frame: FrameType) -> bool:
        code = frame.f_code
        return bool(code.co_flags & inspect.CO_GENERATOR) and self._naming.whose(frame) == USER


def _trains(frame: FrameType | None) -> bool:
    """Whether a module, an optimizer or a backward pass is running; a DataLoader is sampled for itself."""
    for each in outwards(frame):
        path = each.f_code.co_filename
        if any(part in path for part in _TRAINS):
            owner = type(each.f_locals.get("self")).__module__ if path.endswith("module.py") else ""
            if not owner.startswith(_TRANSFORMS):
                return True
    return False
