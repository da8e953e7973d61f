"""Checkpoints written by a process of their own while the training goes on.

`torch.save` to a path copies the tensors to the host, forks, and returns; the fork writes beside the path and renames, so that what is there
is always whole, and a training that is killed loses no checkpoint that it believes saved: the fork writes on. The bytes are those of the
plain call, devices that tensors are to be loaded to included. Whoever opens, renames, removes or looks at a file that is still being
written waits for it, and so does the interpreter's end. What cannot be copied is saved as ever; so is a file object.

The training pays for the copy, and not for pickling and the disk. Memory: one copy of the checkpoint on the host.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from advisor.core.stderr import say
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing, replace_attribute

_PART = ".advisor-part"  # a folder beside the file, while that is written
_EVENTS = frozenset({"open", "os.rename", "os.remove", "os.link", "shutil.copyfile", "os.truncate"})


@dataclass(slots=True, eq=False)
class _Writing:
    """One file: the process that writes it, and since when."""

    process: int
    began: float


class BackgroundSaves(Transform):
    """`torch.save` to a path does not wait for the disk."""

    id = "background_saves"
    traced = False

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if not hasattr(os, "fork"):
            return Match(applies=False, reason="this system has no fork")
        return Match(applies=True, sites=("torch.save",))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        plain = torch.save
        _listen()
        with all_or_nothing() as undo:
            undo.push(Saves.wait_for_all)

            @functools.wraps(plain)
            def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
                if args or kwargs or not isinstance(f, (str, os.PathLike)) or os.getpid() != Saves.process:
                    return plain(obj, f, *args, **kwargs)
                return Saves.save(plain, obj, os.path.abspath(os.fspath(f)))

            for owner in (torch, torch.serialization):
                replace_attribute(undo, owner, "save", save)
            replace_attribute(undo, os, "stat", _waiting(os.stat))
        return undo

    def effect(self, training: Training, before: Any, after: Any) -> Check:
        return Check(passed=Saves.begun > 0, detail=f"{Saves.begun} files were written in the background")


class Saves:
    """The files that are being written, of this process."""

    writing: ClassVar[dict[str, _Writing]] = {}
    process: ClassVar[int] = os.getpid()
    begun: ClassVar[int] = 0
    held_s: ClassVar[float] = 0.0  # what the training has paid: copies, and waits
    written_s: ClassVar[float] = 0.0  # what the writing took, beside it
    failed: ClassVar[list[str]] = []

    @classmethod
    def save(cls, plain: Any, obj: Any, path: str) -> None:
        """Begin to write `obj` at `path`.

        Raises:
            OSError: where the folder cannot be written, as the plain call does.
        """
        began = time.perf_counter()
        cls.wait_for(path)
        tags: dict[int, str] = {}
        try:
            twin = _copied(obj, tags)
        except Exception:  # what is no plain tensor: as ever
            plain(obj, path)
            return
        os.mkdir(path + _PART)  # the folder's own error, now
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are not in the copy
            child = os.fork()
        if not child:
            _write(plain, twin, path, tags)
        cls.writing[path] = _Writing(child, time.perf_counter())
        cls.begun += 1
        cls.held_s += time.perf_counter() - began

    @classmethod
    def wait_for(cls, path: str) -> None:
        """Until this file is whole; at once where it is."""
        found = cls.writing.pop(path, None)
        if found is None:
            return
        began = time.perf_counter()
        _, status = os.waitpid(found.process, 0)
        ended = time.perf_counter()
        cls.held_s += ended - began
        cls.written_s += ended - found.began
        if status:
            cls.failed.append(path)
            say(f"background_saves: {path} could not be written")

    @classmethod
    def reap(cls) -> None:
        """Those that are done."""
        for path, found in list(cls.writing.items()):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(found.process, os.WNOHANG)[0]:
                    del cls.writing[path]
                    cls.written_s += time.perf_counter() - found.began

    @classmethod
    def wait_for_all(cls) -> None:
        """Until all are whole."""
        for path in list(cls.writing):
            cls.wait_for(path)

    @classmethod
    def at_exit(cls) -> None:
        """The interpreter's end waits, and says what it was worth."""
        if os.getpid() != cls.process or not cls.begun:
            return
        cls.wait_for_all()
        say(
            f"{cls.begun} checkpoints written in the background: {cls.written_s:.2f} s of writing, of which the training "
            f"has waited {cls.held_s:.2f}"
        )


def _copied(obj: Any, tags: dict[int, str]) -> Any:
    """All of it as it is now, tensors in the host's memory; `tags`: by storage, where the script had it.

    Raises:
        Exception: whatever cannot be copied raises.
    """
    seen: dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        found: torch.Tensor = memo.setdefault(id(tensor), _on_host(tensor, tags=tags, seen=seen))
        return found

    kinds = [kind for kind in (torch.Tensor, torch.nn.Parameter) if "__deepcopy__" in vars(kind)]
    before = [vars(kind)["__deepcopy__"] for kind in kinds]
    try:
        for kind in kinds:
            kind.__deepcopy__ = twin  # type: ignore[method-assign]  # replaced for one copy
        return copy.deepcopy(obj)
    finally:
        for kind, own in zip(kinds, before, strict=True):
            kind.__deepcopy__ = own  # type: ignore[method-assign]  # put back


def _on_host(tensor: torch.Tensor, *, tags: dict[int, str], seen: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy in the host's memory: tensors that share storage share it in the copy."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise TypeError(f"{type(tensor).__name__} is not copied")
    whole = tensor.untyped_storage()
    address = whole.data_ptr() or id(whole)
    if address not in seen:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(whole, 0, (whole.nbytes(),), (1,))
        seen[address] = flat.to("cpu", copy=True)
        tags[seen[address].untyped_storage()._cdata] = torch.serialization.location_tag(whole)
    twin = torch.empty(0, dtype=tensor.dtype).set_(
        seen[address].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    twin.requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(twin, tensor.requires_grad) if type(tensor) is torch.nn.Parameter else twin


def _write(plain: Any, twin: Any, path: str, tags: dict[int, str]) -> None:
    """The fork's whole life."""
    code = 1
    try:
        there = torch.serialization.location_tag
        torch.serialization.location_tag = lambda storage: tags.get(storage._cdata) or there(storage)
        part = os.path.join(path + _PART, os.path.basename(path))  # a checkpoint has its file's name in it
        plain(twin, part)
        os.replace(part, path)
        os.rmdir(path + _PART)
        code = 0
    finally:
        os._exit(code)


def _waiting(plain: Any) -> Any:
    @functools.wraps(plain)
    def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
        _look(path)
        return plain(path, *args, **kwargs)

    return stat


def _look(path: Any) -> None:
    if Saves.writing and os.getpid() == Saves.process and isinstance(path, (str, bytes, os.PathLike)):
        Saves.reap()
        Saves.wait_for(os.path.abspath(os.fsdecode(path)))


class _Hook:
    there = False


def _listen() -> None:
    """An audit hook cannot be taken back: with nothing being written it does nothing."""
    if _Hook.there:
        return
    _Hook.there = True

    def told(event: str, args: tuple[Any, ...]) -> None:
        if Saves.writing and event in _EVENTS:
            for path in args[:2]:
                _look(path)

    sys.addaudithook(told)
    atexit.register(Saves.at_exit)
