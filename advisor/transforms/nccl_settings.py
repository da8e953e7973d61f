"""Settings of NCCL in the environment, which it reads when it first connects the ranks: on from a process's start only.

Parameters are the variables and their values. What the user has set stays. How many SMs a collective takes from the backward beside it
(NCCL_MAX_CTAS, NCCL_MIN_CTAS) and by which protocol it sends (NCCL_PROTO) is a matter of the machine and of the sizes that are sent; NCCL
guesses it from the machine alone. Source: NCCL User Guide, "Environment Variables".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from advisor.loop import ranks
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing


class NcclSettings(Transform):
    """Of this rank; all ranks have the same."""

    id = "nccl_settings"
    traced = False

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        why = _why_not(parameters)
        return Match(applies=not why, reason=why, sites=() if why else _words(parameters))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        """Before NCCL connects the ranks.

        Raises:
            RuntimeError: where it has, or where the user has set one of these otherwise.
        """
        if why := _why_not(parameters):
            raise RuntimeError(why)
        with all_or_nothing() as undo:
            for name, value in parameters.items():
                if name not in os.environ:
                    os.environ[name] = value
                    undo.push(lambda name=name: os.environ.pop(name, None))
        return undo


def _why_not(parameters: Mapping[str, str]) -> str:
    if not distributed.is_available() or not distributed.is_nccl_available():
        return "this torch has no NCCL"
    for name, value in parameters.items():
        if os.environ.get(name, value) != value:
            return f"{name} is set to {os.environ[name]} already"
    return "NCCL has connected the ranks already, with the settings it had then" if _connected() else ""


def _connected() -> bool:
    group: Any = distributed.group.WORLD if ranks.in_group() else None
    if group is None:
        return False
    try:
        return bool(group._get_backend(torch.device("cuda"))._is_initialized())
    except (AttributeError, RuntimeError):  # another backend, which reads none of them, or none for GPUs
        return False


def _words(parameters: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in parameters.items())
