"""Load batches in worker processes.

A loader gets workers when it is next iterated with gradients on, so evaluation loaders stay as they are. Batches come in the same
order. A dataset that draws random numbers draws them from its worker's generator, not from the training process's: the
augmentation is as random as before, but its numbers are others (and so are those of anything that shared the generator).

Workers see the dataset as it was when they started, at the beginning of an epoch; so they persist over epochs only if asked to.
A dataset that keeps what it has read, draws from a generator of its own, or reads through a file that is open already (since its
`__init__`, or an item that the script has looked at) is left alone. Two of its items are to show that: arrays that are filled in place,
caches outside of it, pipes and sockets do not.
Loses where an item costs less than handing it over.

On a CPU the training's threads give up the cores that the workers take: an operator waits for the last of its threads, and with more of
both than cores that one waits for a core. On four cores, by turns, two workers made a step 57 % longer beside four threads, and 60 %
shorter beside two.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

from advisor.core.profile import StepProfile
from advisor.core.stderr import say
from advisor.core.units import bytes_text, counted
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.cpu_affinity import BoundCores
from advisor.transforms.loader import is_stream, probe
from advisor.transforms.patch import all_or_nothing, replace_attribute

# More workers than this seldom help one GPU, and each costs memory; torch warns above the number of cores. A script whose own workers are
# not enough may need more: of a 3-D ResNet whose six are starved, eight make batches only a third faster. So as many times its own as well.
_MOST_WORKERS, _TIMES_ITS_OWN = 8, 2
_PREFETCH = 2  # torch's default
_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


class LoaderWorkers(Transform):
    """Give training loaders worker processes and pinned memory."""

    id = "loader_workers"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        sites, unmatched, notes = [], [], []
        for index, loader in enumerate(training.loaders):
            name = f"{type(loader.dataset).__name__}, loader {index + 1}"
            wanted = workers_wanted(parameters, loader.num_workers)
            why_not = _why_not(loader, wanted, parameters)
            if why_not:
                unmatched.append(f"{name}: {why_not}")
                continue
            sites.append(f"{name}: {loader.num_workers} → {wanted} workers")
            if loader.num_workers == 0 and probe(loader).random:
                notes.append(f"{name}: random augmentation draws from its worker's generator, so its numbers differ")
        reason = "; ".join(notes) if sites else "; ".join(unmatched) or "no DataLoader was iterated in training"
        return Match(applies=bool(sites), reason=reason, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        """May be applied before the script has built its loaders.

        Parameters: `workers` (default: cores this process may use less one, at most 8 or twice the loader's own), `prefetch_factor`,
        `persistent` ("true" keeps workers over epochs, for datasets that do not change).
        """
        plain = DataLoader.__iter__
        # Loader → its own settings: weakly, for a script may make one an epoch, each with its data set and workers.
        raised: WeakKeyDictionary[DataLoader[Any], dict[str, Any]] = WeakKeyDictionary()
        threads = _Threads() if training.device.type == "cpu" else None

        @functools.wraps(plain)
        def iterate(self: DataLoader[Any]) -> Any:
            had = self in raised and self._iterator is None
            if had:  # asked anew: the script may have opened a file since
                _lower_workers(self, raised.pop(self))
            if torch.is_grad_enabled():
                wanted = workers_wanted(parameters, self.num_workers)
                why_not = _why_not(self, wanted, parameters)
                if not why_not:
                    raised[self] = {name: getattr(self, name) for name in _SETTINGS}
                    _raise_workers(self, wanted, parameters, training.device)
                    if threads is not None:
                        threads.give_up(wanted)
                elif had:
                    say(f"loader_workers: {type(self.dataset).__name__} goes on as the script has it: {why_not}")
            return plain(self)

        def put_back() -> None:
            for loader, settings in list(raised.items()):
                _lower_workers(loader, settings)
                loader._iterator = None  # an epoch that is running goes on with the iterator it has
            raised.clear()
            if threads is not None:
                threads.take_back()

        with all_or_nothing() as undo:
            undo.push(put_back)
            replace_attribute(undo, DataLoader, "__iter__", iterate)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        workers = [loader.num_workers for loader in training.loaders]
        if before is not None and after is not None:
            numbers = {"workers_before": float(before.input.workers), "workers_after": float(after.input.workers)}
            return Check(
                passed=after.input.workers > before.input.workers,
                detail=f"workers {before.input.workers} → {after.input.workers}",
                numbers=numbers,
            )
        raised = [loader for loader in training.loaders if "_advisor_workers" in vars(loader)]
        if raised:
            return Check(
                passed=True, detail=f"{raised[0].num_workers} workers", numbers={"workers": float(max(workers))}
            )
        return Check(passed=None if not workers else False, detail="no loader has been given workers yet")


def workers_wanted(parameters: Mapping[str, str], own: int = 0) -> int:
    """As many as the change names; else this rank's share of the cores it may use, less one for the loop. `own`: that the loader has."""
    if "workers" in parameters:
        return int(parameters["workers"])
    return max(1, min(_cores() - 1, max(_MOST_WORKERS, _TIMES_ITS_OWN * own)))


def _cores() -> int:
    """This rank's share of those that it may use."""
    cores = len(BoundCores.cores()) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # By torchrun, or by `--gpus N`, whose ranks do not see torchrun's variables (distributed/place.py).
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("ADVISOR_GPUS") or "1")
    return cores // ranks


class _Threads:
    """The threads of torch's operators, less those whose cores the workers take."""

    def __init__(self) -> None:
        self._left = self._before = 0  # 0: none was given up

    def give_up(self, workers: int) -> None:
        self._left = max(1, _cores() - workers)
        now = torch.get_num_threads()
        if now > self._left:
            self._before = now
            torch.set_num_threads(self._left)

    def take_back(self) -> None:
        if self._before and torch.get_num_threads() == self._left:  # else the script has set another number since
            torch.set_num_threads(self._before)
        self._before = 0


def _why_not(loader: DataLoader[Any], wanted: int, parameters: Mapping[str, str]) -> str:
    if loader.num_workers >= wanted:
        return (
            f"it has {counted(loader.num_workers, 'worker')}, and no more than {wanted} would be tried on these cores"
        )
    if is_stream(loader):
        return "an IterableDataset yields everything again in each worker"
    item = probe(loader)
    if item.error:
        return item.error
    if item.on_device:
        return "its items are on a device, which worker processes cannot share"
    if item.shared:
        return "it reads through a file that is open already, whose position workers would share"
    if item.keeps:
        return f"it keeps something from item to item, in `{item.keeps}`, which workers would lose"
    if not forks(loader):
        try:
            pickle.dumps((loader.dataset, loader.collate_fn, loader.worker_init_fn))
        except Exception as error:  # of Python's, or of the script's own __getstate__
            return f"workers are not forked, and it cannot be pickled for them: {error}".splitlines()[0]
    ahead = wanted * int(parameters.get("prefetch_factor", _PREFETCH))
    needed = item.bytes * (loader.batch_size or 1) * ahead
    free = shared_memory_bytes()
    if free is not None and needed > free:
        return f"its batches need {bytes_text(needed)} of shared memory, {bytes_text(free)} are free"
    return ""


def forks(loader: DataLoader[Any]) -> bool:
    context: Any = loader.multiprocessing_context or multiprocessing
    return bool(context.get_start_method() == "fork")


def shared_memory_bytes() -> int | None:
    try:
        status = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    return status.f_bavail * status.f_frsize


def _raise_workers(loader: DataLoader[Any], wanted: int, parameters: Mapping[str, str], device: torch.device) -> None:
    # Past `DataLoader.__setattr__`, which refuses some of these after construction.
    vars(loader).update(
        num_workers=wanted,
        prefetch_factor=int(parameters.get("prefetch_factor", loader.prefetch_factor or _PREFETCH)),
        pin_memory=loader.pin_memory or device.type == "cuda",
        persistent_workers=loader.persistent_workers or parameters.get("persistent") == "true",
        _advisor_workers=True,
    )


def _lower_workers(loader: DataLoader[Any], settings: Mapping[str, Any]) -> None:
    vars(loader).update(settings)
    vars(loader).pop("_advisor_workers", None)
