"""Where the plain forward of a model loses NHWC: told of kernels that are in place and not run."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from advisor.loop.layouts import LayoutWatch
from advisor.loop.training import Training
from advisor.transforms.forward import CAPTURED, ForwardStack
from advisor.transforms.graphs import calls
from advisor.transforms.patch import target_of
from advisor.transforms.replay import replay


def layout_losses(training: Training) -> tuple[str, ...]:
    """`model.3 (InstanceNorm2d)` of each module that is given NHWC and returns NCHW, with how often where that is more than once.

    The roots' forwards run once more, without captures. One that cannot is passed over.
    """
    watch = LayoutWatch()
    names = {id(m): path or root.name for root in training.roots for path, m in root.module.named_modules()}

    def enter(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        watch.enter(module, args)

    def leave(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        watch.leave(module, args, output)

    modules = [module for root in training.roots for module in root.module.modules()]
    hooks = [h for m in modules for h in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
    try:
        with (
            calls.paused(),
            ForwardStack.without([target_of(training, root) for root in training.roots], CAPTURED),
        ):
            for root in (root for root in training.roots if root.args or root.kwargs):
                with contextlib.suppress(Exception):  # the forward is the script's own code
                    replay(root)
    finally:
        for hook in hooks:
            hook.remove()
    found = sorted(watch.breaks.items(), key=lambda item: -item[1])
    return tuple(
        f"{names.get(module, '')} ({what})" + (f" {times} times" if times > 1 else "")
        for (module, what), times in found
    )
