"""Steps that several transforms take: undo on failure, replaced attributes, nested tensors, the parameters of a training, the
functions that run its step."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from advisor.loop.training import RootModule, Training
from advisor.transforms.base import Undo
from advisor.transforms.targets import targets

_MISSING = object()
_OURS_AND_TORCHS = tuple(str(path) + os.sep for path in (Path(__file__).parents[1], Path(torch.__file__).parent))


@contextmanager
def all_or_nothing() -> Iterator[Undo]:
    """An `Undo` to push to; when the block raises, what was pushed is taken back before the exception goes on."""
    undo = Undo()
    try:
        yield undo
    except BaseException:
        undo.run()
        raise


def replace_attribute(undo: Undo, owner: Any, name: str, value: Any) -> None:
    """Set `owner.name`; undo puts back what was in the owner's own dictionary, or removes the attribute.

    When someone else has replaced the attribute since, undo leaves theirs in place, so `value` must do nothing harmful once
    its transform is undone.
    """
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)

    def put_back() -> None:
        if vars(owner).get(name, _MISSING) is not value:
            return
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    undo.push(put_back)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `function` applied to each tensor in it. Tuples, named tuples, lists, dictionaries and dataclasses are searched.

    Containers in which nothing changed are returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        mapped = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(mapped, value, strict=True)):
            return value
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, function) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return changed
        other = value.copy()
        for key, item in changed.items():
            other[key] = item
        return other
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: map_tensors(item, function) for name, item in fields.items()}
        if all(changed[name] is item for name, item in fields.items()):
            return value
        twin = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(twin, name, item)  # it may be frozen
        return twin
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested value, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give `tensor` these values, of its shape, in its own memory. One that is expanded has each once, and torch refuses to write it whole."""
    if tensor.layout is torch.strided:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.size(dim) > 1:
                tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def target_of(training: Training, root: RootModule) -> torch.nn.Module:
    """The module whose forward transforms work on for this root (see `targets`)."""
    return targets(dataclasses.replace(training, roots=[root]))[0]


def parameters_of(training: Training) -> list[torch.nn.Parameter]:
    """The parameters of all roots, each once, in order."""
    unique: dict[int, torch.nn.Parameter] = {}
    for root in training.roots:
        for parameter in root.module.parameters():
            unique.setdefault(id(parameter), parameter)
    return list(unique.values())


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From inside a step: the functions on the stack that run it, innermost first, without torch's and our own."""
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def is_script(filename: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not filename.startswith((*_OURS_AND_TORCHS, "<"))
