"""Whether cuDNN, or cuBLAS, may multiply fp32 values as TF32, by the setting that this torch has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ALLOWED = "TF32 is on: its products are faster"


Setting = tuple[Any, str, object, object]  # who has it, its name, what it is where TF32 is allowed and where not


def _of_convolutions() -> Setting:
    """By operation from torch 2.9 on."""
    conv = getattr(torch.backends.cudnn, "conv", None)
    if conv is not None and hasattr(conv, "fp32_precision"):
        return conv, "fp32_precision", "tf32", "ieee"
    return torch.backends.cudnn, "allow_tf32", True, False


def _of_products() -> Setting:
    owner = torch.backends.cuda.matmul
    try:
        owner.fp32_precision  # noqa: B018  # torch before 2.9 answers unknown names with an error of its own
    except (AttributeError, RuntimeError):
        return owner, "allow_tf32", True, False
    return owner, "fp32_precision", "tf32", "ieee"


def _allowed(setting: Setting) -> bool:
    owner, name, on, _ = setting
    return os.environ.get("NVIDIA_TF32_OVERRIDE") != "0" and getattr(owner, name) == on


def allowed() -> bool:
    """Whether cuDNN may. NVIDIA's libraries go by `NVIDIA_TF32_OVERRIDE=0` before torch's setting."""
    return _allowed(_of_convolutions())


def products_allowed() -> bool:
    """Whether cuBLAS may."""
    return _allowed(_of_products())


@contextmanager
def forbidden() -> Iterator[None]:
    """Inside neither may."""
    settings = _of_convolutions(), _of_products()
    before = [getattr(owner, name) for owner, name, *_ in settings]
    for owner, name, _, off in settings:
        setattr(owner, name, off)
    try:
        yield
    finally:
        for (owner, name, *_), value in zip(settings, before, strict=True):
            setattr(owner, name, value)
