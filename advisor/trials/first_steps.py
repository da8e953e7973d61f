"""A fresh run's first steps are the plain script's, until its changes stand: cuDNN tries no algorithms by time for those. In the child."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from advisor.trials import planner

# What gives each convolution another dtype or memory format: PyTorch keeps its first algorithm for each of these, and the flag is no part
# of the key (transforms/cudnn_benchmark.py).
_OTHER_CONVOLUTIONS = planner.HALF | {planner.LAYOUT}


class Untuned:
    """From the first module's call on `cudnn.benchmark` is off where the script has set it, until the last of the plan's changes stands that
    make convolutions others: what runs untuned behind that would stay so.

    A 3-D ResNet spent 11 of a run's 38 s on algorithms of convolutions that never ran again, and as long on those that it keeps. Where the
    plan leaves convolutions as they are nothing is held back.
    """

    def __init__(self, waiting: Set[str]) -> None:
        self._wanted = False
        self._hook: Any = None
        if waiting & _OTHER_CONVOLUTIONS:
            self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.backends.cudnn.benchmark:
            self._wanted = True
            torch.backends.cudnn.benchmark = False

    def look(self, waiting: Set[str]) -> None:
        """At a step's end, of the changes that do not stand yet: with the last that matters it is as the script wants it again."""
        if self._hook is not None and not waiting & _OTHER_CONVOLUTIONS:
            self._hook.remove()
            self._hook = None
            if self._wanted:
                torch.backends.cudnn.benchmark = True
