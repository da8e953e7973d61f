"""Copy the next batch to the GPU while the current one trains.

One batch ahead, tensors of the next batch go through pinned memory to the GPU on a stream of their own, and a thread of their own
where the loader does not pin them. The script still gets its batch on the host; when it then calls `.to(device)`, `.cuda()`,
`.type(torch.cuda.FloatTensor)` or `.type_as(there)` on one of those very tensors, unchanged, or copies it into a tensor of its own on the
GPU (`there.copy_(batch)`), it gets the copy that is there already. A tensor that it changed, sliced or converted first, took
as a NumPy array or wants a gradient of is copied as ever. Not seen is what is written past torch's own count of writes otherwise: through
`.data`, DLPack, or an array whose memory the batch was made of. A search finds that only where the losses of its last runs tell.

Holds one more batch in pinned and one in device memory. Loses nothing but host time where copies are short.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from advisor.core.profile import StepProfile
from advisor.core.stderr import say
from advisor.core.verdict import Check
from advisor.loop import heap
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.images import NormalisedImages
from advisor.transforms.loader import is_stream, leave_workers_no_garbage, probe
from advisor.transforms.patch import all_or_nothing, replace_attribute, tensors_in

_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)
# Below this many bytes, pinning takes less than handing over to a thread.
_WORTH_A_THREAD = 1 << 20
counts = {"ahead": 0, "on demand": 0}

# Loader → why it cannot be looked ahead in, "" when it can: asking reads items of its dataset.
_refusals: WeakKeyDictionary[DataLoader[Any], str] = WeakKeyDictionary()


class DevicePrefetch(Transform):
    """Copy batches to the GPU one step ahead."""

    id = "prefetch"
    traced = False  # batches are counted

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="batches stay on the host")
        sites, unmatched = [], []
        for index, loader in enumerate(training.loaders):
            name = f"{type(loader.dataset).__name__}, loader {index + 1}"
            why_not = _refusals[loader] = _why_not(loader)
            if why_not:
                unmatched.append(f"{name}: {why_not}")
            else:
                sites.append(name)
        reason = "" if sites else "; ".join(unmatched) or "no DataLoader was iterated in training"
        return Match(applies=bool(sites), reason=reason, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        loaders = [loader for loader in training.loaders if not self._cached_why_not(loader)]
        counts.update({"ahead": 0, "on demand": 0})
        device = training.device
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        ahead = _Ahead(device, CudaCopies(device))
        plain = DataLoader._get_iterator

        @functools.wraps(plain)
        def get_iterator(self: DataLoader[Any]) -> _BaseDataLoaderIter:
            if not any(self is loader for loader in loaders):
                return plain(self)
            leave_workers_no_garbage(self)
            # The loader's own thread pins better than we can; only for this iterator.
            pinned, self.pin_memory = self.pin_memory, self.pin_memory or device.type == "cuda"
            try:
                iterator = plain(self)
            finally:
                self.pin_memory = pinned
            ahead.look_ahead(iterator)
            return iterator

        with all_or_nothing() as undo:
            undo.push(ahead.stop)
            replace_attribute(undo, DataLoader, "_get_iterator", get_iterator)
            replace_attribute(undo, torch.Tensor, "to", ahead.replacing(torch.Tensor.to, target_of))
            replace_attribute(undo, torch.Tensor, "cuda", ahead.replacing(torch.Tensor.cuda, _cuda))
            replace_attribute(undo, torch.Tensor, "type", ahead.replacing(torch.Tensor.type, _typed))
            replace_attribute(undo, torch.Tensor, "type_as", ahead.replacing(torch.Tensor.type_as, target_of))
            replace_attribute(undo, torch.Tensor, "copy_", ahead.replacing_copy(torch.Tensor.copy_))
            replace_attribute(undo, torch.Tensor, "numpy", ahead.replacing_numpy(torch.Tensor.numpy))
            for iterator in _running_iterators(loaders):
                ahead.look_ahead(iterator)
        return undo

    def _cached_why_not(self, loader: DataLoader[Any]) -> str:
        if loader not in _refusals:
            _refusals[loader] = _why_not(loader)
        return _refusals[loader]

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        hits, misses = counts["ahead"], counts["on demand"]
        numbers = {"ahead": float(hits), "on_demand": float(misses)}
        if hits == 0:
            return Check(passed=False, detail="no batch tensor was moved to the GPU unchanged", numbers=numbers)
        if before is not None and after is not None:
            shares = [_overlap(profile) for profile in (before, after)]
            numbers |= {"overlapped_before": shares[0], "overlapped_after": shares[1]}
        return Check(passed=True, detail=f"{hits} batch tensors were on the GPU ahead of time", numbers=numbers)


class CudaCopies:
    """Copies to one CUDA device on a stream of their own.

    What is not pinned is pinned by a thread, as a loader with `pin_memory` does it: 80 MB take longer than many a step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="advisor-pins")

    def start(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin the copy; the callable returns it, ready for the stream that is current then.

        Raises:
            RuntimeError: no memory for it; also from the callable.
        """
        pinned = tensor.is_pinned()
        if pinned or type(tensor) is not torch.Tensor or tensor.nbytes < _WORTH_A_THREAD:
            self._wait()
            with torch.cuda.stream(self.stream):
                copy = (tensor if pinned else tensor.pin_memory()).to(self.device, non_blocking=True)
                done = self.stream.record_event()
            return lambda: self._ready(copy, done)
        # Given out here: in the thread it could be memory that this one frees, behind kernels that `_wait` knows nothing of.
        with torch.cuda.stream(self.stream):
            place = torch.empty_like(tensor, device=self.device)
        self._wait()
        coming = self._thread.submit(self._pin_and_copy, tensor, place)
        return lambda: self._ready(place, coming.result())

    def stop(self) -> None:
        """The thread ends with what it has been given."""
        self._thread.shutdown(wait=False)

    def _wait(self) -> None:
        # The new copy may lie where an earlier one was that queued kernels still read. (record_stream would say so as well, but
        # then the tensor's end needs CUDA, and a forked loader's worker that inherits it has none.)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _pin_and_copy(self, tensor: torch.Tensor, place: torch.Tensor) -> torch.cuda.Event:
        with torch.no_grad(), torch.cuda.stream(self.stream):
            place.copy_(tensor.pin_memory(), non_blocking=True)
            done: torch.cuda.Event = self.stream.record_event()
        return done

    def _ready(self, copy: torch.Tensor, done: torch.cuda.Event) -> torch.Tensor:
        torch.cuda.current_stream(self.device).wait_event(done)
        return copy


@dataclass(slots=True)
class _Copy:
    """Of a tensor in the state in which it was, as far as that can be told."""

    tensor: ref[torch.Tensor]
    state: tuple[int, int]
    finish: Callable[[], torch.Tensor]


@dataclass(slots=True)
class _Pending:
    """What was taken from an iterator ahead of time."""

    batch: Any = None
    end: Exception | None = None
    copies: dict[int, _Copy] = field(default_factory=dict)


class _Ahead:
    """The iterators that look ahead, and the copies of the batch that the script has now."""

    def __init__(self, device: torch.device, copies: Any) -> None:
        self.device = device
        self.copies = copies
        self.current: dict[int, _Copy] = {}
        self.active = True

    def stop(self) -> None:
        """No further look ahead. A batch that was taken already is still delivered."""
        self.active = False
        self.current = {}
        self.copies.stop()

    def look_ahead(self, iterator: _BaseDataLoaderIter) -> None:
        """Replace the iterator's `_next_data`, on the instance, by one that holds the next batch."""
        # Weakly, so that an iterator that the script drops still goes at once, and its workers with it.
        owner = ref(iterator)
        pending: list[_Pending] = []

        def take(iterator: _BaseDataLoaderIter) -> _Pending:
            try:
                return _Pending(batch=type(iterator)._next_data(iterator))
            except StopIteration as end:  # the epoch's end
                # Without its traceback, whose frames hold the iterator: it goes with its loop, and not as garbage that the next
                # epoch's workers inherit.
                return _Pending(end=end.with_traceback(None))
            except Exception as error:  # of the dataset: told when its batch is asked for
                return _Pending(end=error)

        def next_data() -> Any:
            iterator = owner()
            if iterator is None:
                raise StopIteration
            if iterator._num_yielded == 0:  # a new epoch: what an abandoned one left is no longer wanted
                pending.clear()
            now = pending.pop() if pending else take(iterator)
            if not self.active:
                vars(iterator).pop("_next_data", None)
            if now.end is not None:
                try:
                    raise now.end
                finally:
                    del now  # the exception's traceback holds this frame: leave it no way back
            if not self.active:
                return now.batch
            self.current = now.copies
            following = take(iterator)
            pending.append(following)
            try:
                for tensor in tensors_in(following.batch):
                    if _can_move(tensor):
                        following.copies[id(tensor)] = _Copy(ref(tensor), _state(tensor), self.copies.start(tensor))
            except Exception as error:  # no memory for one batch more: train on without, as the script would have
                self._no_more(error)
            return now.batch

        iterator._next_data = next_data  # type: ignore[method-assign]  # one iterator's own

    def _no_more(self, error: Exception) -> None:
        self.stop()
        say(f"no further batches are copied ahead: {type(error).__name__}: {error}")

    def _claim(self, tensor: torch.Tensor, target: torch.device | None) -> torch.Tensor | None:
        """The copy of this tensor, once, if it is still a copy of it and was wanted there."""
        if target is None or target.type != self.device.type or target.index not in (None, self.device.index):
            return None
        copy = self.current.pop(id(tensor), None)
        if copy is None or copy.tensor() is not tensor or copy.state != _state(tensor) or tensor.requires_grad:
            counts["on demand"] += 1
            return None
        try:
            ready = copy.finish()
        except RuntimeError as error:  # of the thread that copies
            self._no_more(error)
            return None
        counts["ahead"] += 1
        return ready

    def replacing(self, plain: Callable[..., Any], target: Callable[..., torch.device | None]) -> Callable[..., Any]:
        """In place of a method that moves its tensor to `target(args, kwargs)`."""

        @functools.wraps(plain)
        def moved(self_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if id(self_) in self.current:
                ready = self._claim(self_, target(args, kwargs))
                if ready is not None:
                    self_ = ready  # further conversions go on from the copy
            return plain(self_, *args, **kwargs)

        return moved

    def replacing_copy(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(plain)
        def copy_(self_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args and id(args[0]) in self.current:
                ready = self._claim(args[0], self_.device)
                if ready is not None:
                    args = (ready, *args[1:])
            return plain(self_, *args, **kwargs)

        return copy_

    def replacing_numpy(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def numpy(self_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.current:  # what is written into the array, torch does not count
                memory = _memory(self_)
                for key, copy in list(self.current.items()):
                    tensor = copy.tensor()
                    if tensor is None or _memory(tensor) == memory:
                        del self.current[key]
            return plain(self_, *args, **kwargs)

        return numpy


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's values are, and how often torch has written there."""
    return (tensor.data_ptr() if type(tensor) is torch.Tensor else 0), tensor._version


def _memory(tensor: torch.Tensor) -> int:
    # Images that are bytes yet are not to be made numbers for the asking.
    return tensor.untyped_storage().data_ptr() if type(tensor) is torch.Tensor else id(tensor)


def _cuda(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """The device that `Tensor.cuda` was asked for."""
    device = args[0] if args else kwargs.get("device")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")


def _typed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device that `Tensor.type` was asked for, by a class of tensors or its name; None for a dtype alone."""
    wanted = args[0] if args else kwargs.get("dtype")
    if isinstance(wanted, str):
        return torch.device("cuda") if wanted.startswith("torch.cuda.") else None
    return torch.device("cuda") if getattr(wanted, "is_cuda", False) else None


def target_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device that `Tensor.to` was asked for, or None."""
    wanted = kwargs.get("device", args[0] if args else kwargs.get("other"))
    if isinstance(wanted, torch.Tensor):
        return wanted.device
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return torch.device("cuda", wanted)
    try:
        return torch.device(wanted) if isinstance(wanted, (str, torch.device)) else None
    except RuntimeError:
        return None


def _can_move(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, NormalisedImages)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_inference()
        and not tensor.requires_grad
    )


def _why_not(loader: DataLoader[Any]) -> str:
    if is_stream(loader):
        return "" if loader.num_workers else "taking a batch ahead from a stream would lose it at an early end"
    if loader.num_workers:
        return ""
    sampler = _sampler_of(loader)
    if sampler is not None and not isinstance(sampler, _SAMPLERS):
        return f"{type(sampler).__name__} may keep state that a batch ahead would change"
    item = probe(loader, collated=True)
    if item.error:
        return item.error
    if item.on_device:
        return "its items are on a device already"
    if item.reused:
        return "its batches come in the same memory, and a batch ahead would overwrite the one before"
    if item.random:
        return "its items or batches draw random numbers in this process, and a batch ahead would change their order"
    return ""


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """What chooses the items: a script's own batch sampler stands for both, and torch's then leaves `loader.sampler` unused."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _running_iterators(loaders: list[DataLoader[Any]]) -> list[_BaseDataLoaderIter]:
    samplers = {id(loader._index_sampler) for loader in loaders}
    return [
        candidate
        for candidate in heap.living(heap.classes(_BaseDataLoaderIter))
        if id(vars(candidate).get("_index_sampler")) in samplers
    ]


def _overlap(profile: StepProfile) -> float:
    copies = [copy for copy in profile.copies if copy.kind == "h2d"]
    total = sum(copy.time_us for copy in copies)
    return sum(copy.time_us * copy.overlapped_frac for copy in copies) / total if total else 0.0
