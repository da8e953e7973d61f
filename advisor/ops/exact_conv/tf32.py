"""Whether cuDNN may multiply fp32 values as TF32, by the setting that this torch has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ALLOWED = "TF32 is on: its products are faster"


def _setting() -> tuple[Any, str, object, object]:
    """Who has it, under which name, and what it is where TF32 is allowed and where not: by operation from torch 2.9 on."""
    conv = getattr(torch.backends.cudnn, "conv", None)
    if conv is not None and hasattr(conv, "fp32_precision"):
        return conv, "fp32_precision", "tf32", "ieee"
    return torch.backends.cudnn, "allow_tf32", True, False


def allowed() -> bool:
    """Whether it may. NVIDIA's libraries go by `NVIDIA_TF32_OVERRIDE=0` before torch's setting."""
    owner, name, on, _ = _setting()
    return os.environ.get("NVIDIA_TF32_OVERRIDE") != "0" and getattr(owner, name) == on


@contextmanager
def forbidden() -> Iterator[None]:
    """Inside it may not."""
    owner, name, _, off = _setting()
    before = getattr(owner, name)
    setattr(owner, name, off)
    try:
        yield
    finally:
        setattr(owner, name, before)
