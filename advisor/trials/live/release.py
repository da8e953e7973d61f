"""Give memory back to the driver behind a trial, what lies in garbage too where the device is short of it. In the child."""

from __future__ import annotations

import gc

import torch

# Below this share of free memory garbage is looked for: hundreds of milliseconds. Above it the next trial has room anyway.
SHORT_FRAC = 0.5


def give_back(device: torch.device) -> None:
    """Free what nothing holds.

    An error that left a trial's frames, a compiled graph's own caches and modules that know each other stand in cycles, which only the
    collector takes apart. It comes by the number of Python objects, not by gigabytes: a DeepLabV3+ whose whole ran out of memory still held
    115 GB when the next change was tried, which ran out of memory at once.
    """
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if free < SHORT_FRAC * total:
        gc.collect()
        torch.cuda.empty_cache()
