"""Functions of popular packages that write files natively, where no audit event tells of it: wrapped, so that a guard is told.

A package is wrapped once the script has imported it; none is imported for it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A path about to be written, and whether it is written anew; returned is where to write in its place, or None.
Told = Callable[[str | bytes | os.PathLike[str], bool], object]


@dataclass(frozen=True, slots=True)
class Writer:
    """`name` of a module (dotted: of a class in it) writes at the path it is given as `keyword`, or at `position`.

    `mode` is the keyword, at the next position, by which it may only read ("r", or none) or change what is there.
    """

    module: str
    name: str
    position: int
    keyword: str
    mode: str = ""


# Checkpoints of Accelerate and Transformers are safetensors; images and volumes are often written by OpenCV and h5py.
WRITERS = (
    Writer("torch", "save", 1, "f"),
    Writer("torch", "serialization.save", 1, "f"),
    Writer("torch", "jit.save", 1, "f"),
    Writer("torch", "jit.RecursiveScriptModule.save", 1, "f"),
    Writer("torch", "autograd.profiler.profile.export_chrome_trace", 1, "path"),
    Writer("torch.export.pt2_archive._package", "PT2ArchiveWriter.__init__", 1, "archive_path_or_buffer"),
    Writer("safetensors", "serialize_file", 1, "filename"),
    Writer("torchvision.io.image", "write_file", 0, "filename"),
    Writer("cv2", "imwrite", 0, "filename"),
    Writer("h5py", "File.__init__", 1, "name", mode="mode"),
    Writer("SimpleITK", "WriteImage", 1, "fileName"),
    Writer("soundfile", "write", 0, "file"),
)


def announce(told: Told) -> None:
    """From now on `told` is called before each of these writes, of modules imported later too."""
    modules = {writer.module for writer in WRITERS}
    for module in modules & set(sys.modules):
        _wrap(module, told)
    sys.meta_path.insert(0, _AfterImport(modules - set(sys.modules), told))


def _wrap(module: str, told: Told) -> None:
    for writer in WRITERS:
        if writer.module != module:
            continue
        *parents, name = writer.name.split(".")
        owner: Any = sys.modules[module]
        for parent in parents:
            owner = getattr(owner, parent, None)
        plain = getattr(owner, name, None)
        if plain is not None:
            setattr(owner, name, _announced(writer, plain, told))


def _announced(writer: Writer, plain: Callable[..., Any], told: Told) -> Callable[..., Any]:
    @functools.wraps(plain)
    def announced(*args: Any, **kwargs: Any) -> Any:
        path = _given(writer.keyword, writer.position, args, kwargs)
        mode = _given(writer.mode, writer.position + 1, args, kwargs) if writer.mode else "w"
        if isinstance(path, (str, bytes, os.PathLike)) and mode not in (None, "r"):
            instead = told(path, mode == "w")
            if instead is not None and len(args) > writer.position:
                args = (*args[: writer.position], instead, *args[writer.position + 1 :])
            elif instead is not None:
                kwargs[writer.keyword] = instead
        return plain(*args, **kwargs)

    return announced


def _given(keyword: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[position] if len(args) > position else kwargs.get(keyword)


class _AfterImport:
    """Finds nothing itself: it lets the finders behind it find a module, and wraps its writers when its loader has run it."""

    def __init__(self, waiting: set[str], told: Told) -> None:
        self._waiting, self._told = waiting, told

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._waiting:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (f.find_spec(name, path, target) for f in behind if hasattr(f, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if spec is None or execute is None:
            return spec

        def exec_module(module: Any) -> None:
            execute(module)
            if name in self._waiting:  # who has asked whether there is such a module (`find_spec`) has not imported it
                self._waiting.discard(name)
                _wrap(name, self._told)

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]  # the import system's hook; a spec that was found has a loader
        return spec
