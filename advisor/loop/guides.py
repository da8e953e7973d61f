"""Models that each step calls without gradients: teachers, perceptual losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from advisor.loop.training import RootModule


class Guides:
    """Found while a close look lasts, by what runs without gradients in every step of it."""

    def __init__(self) -> None:
        self._silent: dict[int, torch.nn.Module] = {}  # called without gradients since the last boundary
        self._known: dict[int, torch.nn.Module] | None = None  # so called in each of the looked-at steps but the first

    def called(self, module: torch.nn.Module) -> None:
        """The outermost call of a module without gradients."""
        self._silent[id(module)] = module

    def sift(self, *, first: bool) -> None:
        """Keep what runs without gradients in every step; the first interval may hold what comes before training."""
        silent, self._silent = self._silent, {}
        if first:
            return
        known = silent if self._known is None else self._known
        self._known = {key: module for key, module in known.items() if key in silent}

    def found(self, roots: Sequence[RootModule]) -> list[torch.nn.Module]:
        """The look is over: what is no part of a trained model, and has none in it. Nothing is known from here on."""
        known = self._known or {}
        self.let_go()
        within = {id(module) for root in roots for module in root.module.modules()}
        # What has the trained model in it, or is in it, is no other model.
        return [m for key, m in known.items() if key not in within and within.isdisjoint(map(id, m.modules()))]

    def let_go(self) -> None:
        """Hold nothing of the script's any more."""
        self._silent, self._known = {}, None
