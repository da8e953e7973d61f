"""What a DataLoader's items tell about it, looked at without leaving a trace.

They are read in a process that is forked for that, as a worker is. A data set that opens its file at first use would otherwise do so in
the training process, and all workers that are forked later would share the one file's position: wrong items, without a word.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import operator
import os
import pickle
import random
import select
import signal
import stat
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from advisor.core.errors import first_line
from advisor.transforms.patch import tensors_in

try:
    import fcntl
except ImportError:  # Windows, which has no fork either
    fcntl = None  # type: ignore[assignment]  # a module elsewhere

_DESCRIPTORS = "/proc/self/fd"
PATIENCE_S = 30.0  # for reading two items; what a fork has left locked for good takes longer
_CONTAINERS = (list, tuple, dict, set, deque)
_FEW = 100  # a container of so many is looked into: it may hold a cache for each of something


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Items of a data set: the bytes of one, whether it is on a device already, and what reading does.

    random: it draws random numbers.
    shared: it reads through a file that was open already, and moves its position.
    keeps: an attribute of the data set that it leaves changed.
    reused: batches made of it share memory.
    error: what came of reading; then nothing else is known.
    """

    bytes: int = 0
    on_device: bool = False
    random: bool = False
    shared: bool = False
    keeps: str = ""
    reused: bool = False
    error: str = ""


# Loader → by `collated` what was found, and with which files open.
_found: WeakKeyDictionary[DataLoader[Any], dict[bool, tuple[dict[int, Any], Item]]] = WeakKeyDictionary()


def probe(loader: DataLoader[Any], *, collated: bool = False) -> Item:
    """Read the first and the last item: once, and again when this process has other files open than then.

    Args:
        collated: make two batches of one too, where the script does that by itself (mixing images, drawing a size, filling a buffer).
    """
    if fcntl is None or not os.path.isdir(_DESCRIPTORS):
        return Item(error="only Linux lets items be read without a trace")
    files = _open_files()
    known = _found.setdefault(loader, {})
    if collated not in known or known[collated][0] != files:
        known[collated] = files, in_a_fork(functools.partial(_read, loader, collated))
    return known[collated][1]


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether the dataset has no items by index."""
    return isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__")


def leave_workers_no_garbage(loader: DataLoader[Any]) -> None:
    """Before a loader starts its workers: collect what they would inherit.

    A forked worker whose collector frees a pinned batch with a copy on its way asks CUDA about it and is aborted.
    """
    if loader.num_workers:
        gc.collect()


def _read(loader: DataLoader[Any], collated: bool) -> Item:
    """In the fork: anything may change."""
    positions = _positions_of_its_own()
    state, generators = _state(loader.dataset), _generators()
    items = [loader.dataset[index] for index in _first_and_last(loader.dataset)]
    tensors = tensors_in(items[0])
    batches: list[Any] = []
    on_device = any(tensor.device.type != "cpu" for tensor in tensors)
    if collated and not on_device and loader.batch_sampler is None:
        batches = [loader.collate_fn(item) for item in items]  # each is one already
    elif collated and not on_device and loader.collate_fn is not default_collate:
        batches = [loader.collate_fn(copy.deepcopy([items[0], items[0]])) for _ in range(2)]
    return Item(
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        on_device=on_device,
        random=_generators() != generators,
        shared=any(_position(descriptor) != position for descriptor, position in positions.items()),
        keeps=_changed(state, _state(loader.dataset)),
        reused=len(batches) > 1 and not _memory(batches[0]).isdisjoint(_memory(batches[1])),
    )


def _memory(batch: Any) -> set[int]:
    """Where its tensors begin: batches that are parts of one tensor are in no other's way."""
    return {
        tensor.data_ptr()
        for tensor in tensors_in(batch)
        if tensor.layout is torch.strided and tensor.numel() and tensor.device.type == "cpu"
    }


def _first_and_last(dataset: Any) -> Iterable[int]:
    """The last as well: scripts look at the first one themselves, and by then it is in a cache or a buffer."""
    try:
        return sorted({0, max(len(dataset) - 1, 0)})
    except (TypeError, NotImplementedError):
        return (0,)


def in_a_fork(read: Callable[[], Item]) -> Item:
    """What `read` returns in a copy of this process, which runs no exit handlers and is ended after `_PATIENCE_S`.

    CUDA cannot be used in it: reading that does raises there, as it would in a worker.
    """
    receiving, sending = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads, which are not in the copy
            child = os.fork()
    except OSError as error:
        os.close(receiving)
        os.close(sending)
        return Item(error=first_line(error))
    if not child:
        _answer(read, sending)
    os.close(sending)
    answer, come = b"", select.poll()
    come.register(receiving, select.POLLIN)
    try:
        if come.poll(PATIENCE_S * 1000):
            answer = os.read(receiving, select.PIPE_BUF)
    finally:
        os.close(receiving)
        with suppress(OSError):  # the script's own handler has waited for it
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not answer:
        return Item(error="an item that was read in a process of its own came to no end, or ended it")
    return Item(**json.loads(answer))


def _answer(read: Callable[[], Item], sending: int) -> NoReturn:
    """The fork's whole life. What the script prints in it goes nowhere; one write says what was found."""
    try:
        gc.disable()  # see `leave_workers_no_garbage`
        torch.set_num_threads(1)  # its threads are not in the copy
        silent = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silent, stream)
        try:
            item = read()
        except BaseException as error:  # the data set is the script's own code
            item = Item(error=first_line(error)[:300])
        os.write(sending, json.dumps(asdict(item)).encode())
    finally:
        os._exit(0)


def _open_files() -> dict[int, tuple[int, int]]:
    """Descriptors of files that are open for reading, and which file each is of."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        descriptor = int(name)
        with suppress(OSError):  # the one that the list was read through
            status, flags = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if stat.S_ISREG(status.st_mode) and flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_PATH:
                found[descriptor] = (status.st_dev, status.st_ino)
    return found


def _positions_of_its_own() -> dict[int, int]:
    """Opens a fork's files anew, for it shares their positions with the process it is of; returns where each of them stands."""
    positions = {}
    for descriptor in _open_files():
        positions[descriptor] = position = os.lseek(descriptor, 0, os.SEEK_CUR)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
        own = os.open(f"{_DESCRIPTORS}/{descriptor}", flags)
        os.lseek(own, position, os.SEEK_SET)
        os.dup2(own, descriptor)
        os.close(own)
    return positions


def _position(descriptor: int) -> int:
    try:
        return os.lseek(descriptor, 0, os.SEEK_CUR)
    except OSError:  # closed since
        return -1


def _generators() -> Any:
    """Where Python's, NumPy's and torch's host generators stand."""
    numpy: Any = sys.modules.get("numpy")
    legacy = pickle.dumps(numpy.random.get_state()) if numpy else None
    return random.getstate(), torch.get_rng_state().tolist(), legacy


def _state(dataset: Any) -> dict[tuple[int, str], Any]:
    """Attributes of a data set, of its class, and of the data sets it wraps, in which something of a reading may be kept.

    Containers by their values, numbers, random-number generators, and how often an `lru_cache` was asked in vain. Neither arrays that
    are filled in place nor what lies in other objects.
    """
    found: dict[tuple[int, str], Any] = {}
    waiting, seen = [dataset], set()
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        attributes: dict[str, Any] = {}
        for holder in (*reversed(type(owner).__mro__), owner):
            attributes |= getattr(holder, "__dict__", {})
        for name, value in attributes.items():
            if isinstance(value, Dataset):
                waiting.append(value)
            elif isinstance(value, _CONTAINERS):
                found[id(owner), name] = values = list(_values(value))
                waiting += [inner for inner in values if isinstance(inner, Dataset)]
            elif isinstance(value, functools._lru_cache_wrapper):
                found[id(owner), name] = value.cache_info().misses
            elif _is_generator(value):
                found[id(owner), name] = pickle.dumps(value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                found[id(owner), name] = value
    return found


def _values(container: Any) -> Iterator[Any]:
    for value in container.values() if isinstance(container, dict) else container:
        yield value
        if len(container) <= _FEW and isinstance(value, _CONTAINERS):
            yield from value.values() if isinstance(value, dict) else value


def _changed(before: dict[tuple[int, str], Any], after: dict[tuple[int, str], Any]) -> str:
    """The first attribute with another number or something new in it; what was opened does not count, nor what was not there."""
    for key, was in before.items():
        now: Any = after.get(key)
        if type(now) is not type(was):
            continue
        if not isinstance(was, list):
            changed = now is not was and now != was
        elif len(now) == len(was) and all(map(operator.is_, was, now)):
            changed = False
        else:
            held = set(map(id, was))
            changed = any(id(value) not in held and value is not None and not _is_open(value) for value in now)
        if changed:
            return key[1]
    return ""


def _is_open(value: Any) -> bool:
    """A file, or a library's like; an image can be closed too, and is data."""
    return hasattr(value, "close") and not hasattr(value, "__array_interface__")


def _is_generator(value: Any) -> bool:
    return isinstance(value, (random.Random, torch.Generator)) or type(value).__module__.startswith("numpy.random")
