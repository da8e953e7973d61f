"""Torchvision's transforms as far as tests of the input path need them: by the same names, with the same arithmetic."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Compose:
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for step in self.transforms:
            image = step(image)
        return image


class ToTensor:
    def __call__(self, array: np.ndarray) -> torch.Tensor:
        array = array if array.ndim == 3 else array[:, :, None]
        image = torch.from_numpy(array.transpose(2, 0, 1)).contiguous()
        return image.to(torch.float32).div(255) if image.dtype == torch.uint8 else image


class ToDtype:
    def __init__(self, dtype: Any = torch.float32, scale: bool = True) -> None:
        self.dtype, self.scale = dtype, scale

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.to(self.dtype).mul_(1 / 255) if self.scale else image.to(self.dtype)


class Normalize:
    def __init__(self, mean: Any = MEAN, std: Any = STD) -> None:
        self.mean, self.std = mean, std

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.as_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return image.clone().sub_(mean).div_(std)


class RandomHorizontalFlip:
    """Of an array [H, W, C]."""

    def __call__(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array[:, ::-1]) if torch.rand(1) < 0.5 else array


class RandomErasing:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        image[:, : torch.randint(4, (1,)).item()] = 0
        return image


for _kind in (Compose, ToTensor, ToDtype, Normalize, RandomHorizontalFlip, RandomErasing):
    _kind.__module__ = "torchvision.transforms.transforms"


class Images(Dataset):
    """Twelve random images with their number. `kind`: "array" [H, W, C], "grey" [H, W], or "tensor" [C, H, W]."""

    def __init__(self, transform: Any, kind: str = "array") -> None:
        self.transform, self.kind = transform, kind

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, int]:
        shape = (6, 8) if self.kind == "grey" else (6, 8, 3)
        image: Any = np.random.RandomState(index).randint(0, 256, shape, dtype=np.uint8)
        if self.kind == "tensor":
            image = torch.from_numpy(image).permute(2, 0, 1).contiguous()
        return self.transform(image), index


def package(name: str) -> ModuleType:
    """Torchvision, or what needs it, also beside a torch that its compiled operators were not built for. Skips without it."""
    plain = torch.library.register_fake

    def without_its_own(op: object, *rest: object, **more: object) -> object:
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return plain(op, *rest, **more)

    try:
        with mock.patch.object(torch.library, "register_fake", without_its_own), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torchvision")
            return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs {name}: {error}")
