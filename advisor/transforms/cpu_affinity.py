"""Each rank's processes on the cores beside its GPU: its threads, and the loader workers below it.

Parameter `cores`: "node" for all cores of the GPU's NUMA node; "share" for its part of them, so that ranks do not take each other's cores.
PyTorch's `torchrun --numa-binding` has the same two ways, from a process's start on; here they can be tried beside each other in the running
loop. What moves is where threads run. Memory that lies on another node already stays there: pinned buffers made later lie on this one.
Threads that the script has bound by itself are left where they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.profiling.machine import cores, hostload, nvml
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing

NODE, SHARE = "node", "share"
LEAST_CORES = 2  # of a process that launches, and one thread more


class CpuAffinity(Transform):
    """Of the process and all below it."""

    id = "cpu_affinity"
    traced = False

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if not hasattr(os, "sched_setaffinity"):
            return Match(applies=False, reason="this system binds no process to cores")
        if training.device.type != "cuda":
            return Match(applies=False, reason="there is no GPU whose cores it would run on")
        now, wanted = os.sched_getaffinity(0), _wanted(training.device, parameters)
        if not wanted:
            return Match(applies=False, reason="the machine does not tell which cores are near the GPU, or has too few")
        if wanted == now:
            return Match(applies=False, reason=f"it runs on no other cores already ({cores.text(now)})")
        if len(wanted) < LEAST_CORES:
            return Match(applies=False, reason=f"its GPU's part of the cores is one ({cores.text(wanted)})")
        return Match(applies=True, sites=(f"cores {cores.text(now)} → {cores.text(wanted)}",))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        before, wanted = os.sched_getaffinity(0), _wanted(training.device, parameters)

        def back() -> None:
            BoundCores.before.remove(before)
            _move(wanted, before)

        with all_or_nothing() as undo:
            BoundCores.before.append(before)
            undo.push(back)
            _move(before, wanted)
        return undo

    def sites(self, training: Training) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        now, given = os.sched_getaffinity(0), BoundCores.cores()
        return None if now == given else ((f"cores {cores.text(given)} → {cores.text(now)}",), ())

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        near, now = cores.of_node(address_of(training.device), BoundCores.cores()), os.sched_getaffinity(0)
        return Check(
            passed=now <= near and now != BoundCores.cores(),
            detail=f"on cores {cores.text(now)}, of {cores.text(near)} near the GPU",
        )


class BoundCores:
    """What this process might run on before it was bound, each time that it was."""

    before: list[set[int]] = []  # noqa: RUF012  the process's own, as its affinity is

    @classmethod
    def cores(cls) -> set[int]:
        """All that it was given at its start."""
        return cls.before[0] if cls.before else os.sched_getaffinity(0)


def _wanted(device: torch.device, parameters: Mapping[str, str]) -> set[int]:
    find = cores.of_share if parameters.get("cores") == SHARE else cores.of_node
    address = address_of(device)
    return find(address, BoundCores.cores()) if address else set()


def address_of(device: torch.device) -> str:
    """The GPU's in PCI, "" where neither torch nor NVML tells it."""
    known: Any = torch.cuda.get_device_properties(device)
    if hasattr(known, "pci_domain_id"):  # from torch 2.9 on
        return cores.pci_address(known.pci_domain_id, known.pci_bus_id, known.pci_device_id)
    try:
        nv = nvml.load()
        found = nv.nvmlDeviceGetPciInfo(nvml.select(nv, str(known.uuid)))
    except Exception:  # NVML's, or a torch that tells no UUID
        return ""
    return cores.pci_address(found.domain, found.bus, found.device)


def _move(source: set[int], target: set[int]) -> None:
    """Threads that may run on just the one set of cores run on the other: this process's, and of all below it.

    Raises:
        OSError: where this process may not run there.
    """
    own = os.getpid()
    for pid in (own, *hostload.descendants(own)):
        for thread in _threads(pid):
            try:
                if os.sched_getaffinity(thread) == source:
                    os.sched_setaffinity(thread, target)
            except ProcessLookupError:
                continue  # ended meanwhile
            except OSError:
                if pid == own:
                    raise


def _threads(pid: int) -> list[int]:
    try:
        return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
