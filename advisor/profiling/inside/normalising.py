"""Where a data set ends its transforms of an image by turning 8-bit pixels into normalised fp32, which a GPU could do as well.

Known by the names of torchvision's classes (timm's alike); torchvision itself is not needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

_PACKAGES = ("torchvision", "timm")
# What may stand in the end of a pipeline, each a function of a value and its channel alone; and what each takes at its beginning.
_TAKES: dict[str, tuple[str, ...]] = {
    "ToTensor": ("pil", "array"),
    "MaybeToTensor": ("pil", "array"),
    "PILToTensor": ("pil",),
    "MaybePILToTensor": ("pil",),
    "ToImage": ("pil", "array", "tensor"),
    "ToDtype": ("tensor",),
    "ConvertImageDtype": ("tensor",),
    "Normalize": (),
    "ToPureTensor": (),
}
CHANNELS = (3, 1)  # RGB and grey
_MODES = {"RGB": 3, "L": 1}  # of PIL images: 8 bits a channel
_DEEPEST = 8  # data sets around data sets


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The last steps of one Compose: `steps` is what `pipeline.transforms[first:]` was."""

    pipeline: Any
    first: int
    steps: tuple[Any, ...]

    @property
    def name(self) -> str:
        """`ToTensor + Normalize`."""
        return " + ".join(type(step).__name__ for step in self.steps)

    def run(self, image: Any) -> Any:
        """What the script gets for this image."""
        for step in self.steps:
            image = step(image)
        return image

    def pixels(self, image: Any) -> torch.Tensor | None:
        """The image's bytes, [C, H, W] uint8 of memory of their own, where this tail turns it into fp32 value by value; else None."""
        taken = _TAKES[type(self.steps[0]).__name__]
        pil, numpy = sys.modules.get("PIL.Image"), sys.modules.get("numpy")
        if pil is not None and numpy is not None and isinstance(image, pil.Image):
            if "pil" not in taken or image.mode not in _MODES:
                return None
            image = numpy.array(image)
        elif numpy is not None and type(image) is numpy.ndarray:
            if "array" not in taken or image.dtype != numpy.uint8 or image.ndim not in (2, 3):
                return None
            image = numpy.array(image)
        elif isinstance(image, torch.Tensor):
            if "tensor" not in taken or image.dtype != torch.uint8 or image.dim() != 3 or image.device.type != "cpu":
                return None
            tensor = image.as_subclass(torch.Tensor).clone()
            return tensor if tensor.shape[0] in CHANNELS else None
        else:
            return None
        tensor = torch.from_numpy(image if image.ndim == 3 else image[:, :, None]).permute(2, 0, 1)
        return tensor if tensor.shape[0] in CHANNELS else None

    def table(self, channels: int) -> torch.Tensor | None:
        """The fp32 value that this tail makes of each byte of each channel, [C, 256]; None where it cannot be told.

        Made by the tail itself from an image of all bytes, and held against what it makes of random ones.
        """
        every = torch.arange(256, dtype=torch.uint8).expand(channels, 1, 256)
        random = torch.randint(
            256, (channels, 3, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0), device="cpu"
        )
        try:
            table, check = (self.run(self._image(pixels)) for pixels in (every, random))
        except Exception:  # three means for one channel, say: the script's own error, should it come to that
            return None
        for made, pixels in ((table, every), (check, random)):
            if not isinstance(made, torch.Tensor) or made.dtype != torch.float32 or made.shape != pixels.shape:
                return None
        values = table.as_subclass(torch.Tensor).reshape(channels, 256).clone()
        expected = torch.stack([row[places.long()] for row, places in zip(values, random, strict=True)])
        return values if torch.equal(expected, check.as_subclass(torch.Tensor)) else None

    def seconds(self, shape: Sequence[int], repeats: int = 3) -> float:
        """Least time to turn one random image of `shape` [C, H, W] into fp32, beyond what reading its bytes takes; on one thread,
        as workers compute.

        Raises:
            Whatever the transforms raise.
        """
        image = self._image(
            torch.randint(
                256, tuple(shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0), device="cpu"
            )
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return max(0.0, _least(lambda: self.run(image), repeats) - _least(lambda: self.pixels(image), repeats))
        finally:
            torch.set_num_threads(threads)

    def _image(self, pixels: torch.Tensor) -> Any:
        """An image of these bytes [C, H, W], of a kind that the first step takes."""
        taken = _TAKES[type(self.steps[0]).__name__]
        if "tensor" in taken:
            return pixels.contiguous()
        array = pixels.permute(1, 2, 0).contiguous().numpy()
        if "array" in taken:
            return array
        from PIL import Image

        return Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0])


def _least(call: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def tails(dataset: Any) -> list[Tail]:
    """The tails of all pipelines that a data set, and those inside it, hold as attributes; each pipeline once."""
    found: dict[int, Tail] = {}
    for pipeline in _pipelines(dataset, _DEEPEST):
        tail = _tail(pipeline)
        if tail is not None:
            found.setdefault(id(pipeline), tail)
    return list(found.values())


def _pipelines(owner: Any, deep: int) -> Iterator[Any]:
    held = getattr(owner, "__dict__", {})
    for value in list(held.values()):
        if _known(value) == "Compose":
            yield value
        elif deep:
            for inner in value if isinstance(value, (list, tuple)) and len(value) <= 64 else [value]:
                if isinstance(inner, Dataset):
                    yield from _pipelines(inner, deep - 1)


def _known(value: Any) -> str:
    """The name of a torchvision or timm class, as such; empty for others."""
    kind = type(value)
    return kind.__name__ if kind.__module__.partition(".")[0] in _PACKAGES else ""


def _tail(pipeline: Any) -> Tail | None:
    steps = getattr(pipeline, "transforms", None)
    if not isinstance(steps, (list, tuple)):
        return None
    first = len(steps)
    while first and _known(steps[first - 1]) in _TAKES and _plain_dtype(steps[first - 1]):
        first -= 1
    while first < len(steps) and not _TAKES[_known(steps[first])]:
        first += 1  # a Normalize of what has been made a tensor by other means
    return Tail(pipeline, first, tuple(steps[first:])) if first < len(steps) else None


def _plain_dtype(step: Any) -> bool:
    """Not a dtype for each kind of input, as v2.ToDtype also takes them."""
    return isinstance(getattr(step, "dtype", torch.float32), torch.dtype)
