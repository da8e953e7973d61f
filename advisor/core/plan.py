"""A plan: the changes to make to a script's training, in order, each with its status and reason.

`plan.yaml` is meant to be read, committed and edited by people.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from advisor.core.verdict import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanItem:
    """`advisor run` applies what is kept; `apply --plan` proves that and what is
    unconfirmed; the others are left for the record.
    """

    transform: str
    status: Status
    parameters: dict[str, str] = field(default_factory=dict)
    semantics: str = "exact"
    reason: str = ""
    predicted: str = ""  # "12–30 % of the step"
    measured: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHashes:
    """What the plan was proved on. A difference is named, and its items fall back to the plain script."""

    script: str = ""  # sha256 of the script file
    model: str = ""  # sha256 over module class names, parameter names, shapes and dtypes
    environment: str = ""  # "NVIDIA H200 sm_90 torch 2.11.0+cu130"
    kernels: str = ""  # sha256 over the kernel sources that kept items use


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Ordered items; `advisor run` applies those with status `kept`."""

    script: str
    argv: tuple[str, ...]
    created: str
    items: tuple[PlanItem, ...]
    hashes: PlanHashes = field(default_factory=PlanHashes)
    speedup: str = ""  # "3.10× (3.05 to 3.14)"
    run: str = ""  # folder of the search that proved it
    gpus: int = 1  # ranks that the script was proved to train alike on, by `--gpus`
    norms: str = ""  # of those: "local" where each has batch norm statistics of its own
    shard: str = ""  # of those: "zero1" or "fsdp2" where each keeps a share of the optimizer's state, or of all
