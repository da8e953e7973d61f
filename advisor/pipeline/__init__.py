"""The one place that strings the stages together: what each command does, and what the hooked script is handed to.

Nothing here prints to stdout and nothing imports torch before the script has been started.
"""

from __future__ import annotations

from advisor.pipeline.applied import ApplyResult
from advisor.pipeline.applying import apply, prove, try_patch
from advisor.pipeline.inside import attach, attach_to_cupy, disable, enable, step
from advisor.pipeline.kernels import kernels_list, kernels_verify
from advisor.pipeline.memory_use import MemoryResult, memory, reach_memory, reach_memory_on_ranks
from advisor.pipeline.profiling import (
    ProfileResult,
    profile,
    profile_trace,
    recommend,
)
from advisor.pipeline.ranks import apply_on_ranks
from advisor.pipeline.scaling import ScaleResult, scale
from advisor.pipeline.shared import Say, recover
from advisor.pipeline.training import run

__all__ = [
    "ApplyResult",
    "MemoryResult",
    "ProfileResult",
    "Say",
    "ScaleResult",
    "apply",
    "apply_on_ranks",
    "attach",
    "attach_to_cupy",
    "disable",
    "enable",
    "kernels_list",
    "kernels_verify",
    "memory",
    "profile",
    "profile_trace",
    "prove",
    "reach_memory",
    "reach_memory_on_ranks",
    "recommend",
    "recover",
    "run",
    "scale",
    "step",
    "try_patch",
]
