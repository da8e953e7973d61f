"""Maps for bulk copies without a GPU: what the driver is asked for, and where there is none."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from advisor.core.errors import AdvisorError
from advisor.ops import nvrtc, tensor_map
from advisor.ops.conv3x3 import api


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver was asked for; it writes its map where it was told to, or refuses [0] values."""
    calls: list[Any] = []

    def encode(at: Any, *rest: Any) -> int:
        calls.append((at.value, *rest))
        ctypes.memset(at.value, 7, 128)
        return 0 if rest[3][0] else 1

    monkeypatch.setattr(tensor_map, "encode", lambda: encode)
    tensor_map.boxes_of.cache_clear()
    return calls


def test_a_map_is_of_the_tensors_sizes_and_is_made_once(asked: list[Any]) -> None:
    x = torch.zeros(2, 5, 6, 64, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    found = tensor_map.boxes(x, 64, 10, 34)
    assert tensor_map.boxes(x, 64, 10, 34) is found
    assert (found.size, found.dtype) == (1, np.dtype((np.void, 128)))  # CuPy passes an array of one value as a value
    assert bytes(found[0]) == b"\x07" * 128
    ((at, dtype, dimensions, address, sizes, strides, box, steps, _, swizzle, *_),) = asked
    assert at % 64 == 0
    assert (dtype, dimensions, address.value) == (1, 5, x.data_ptr())
    assert list(sizes) == [64, 1, 6, 5, 2]
    assert list(strides) == [2 * 64, 2 * 64, 2 * 64 * 6, 2 * 64 * 6 * 5]  # bytes
    assert (list(box), list(steps)) == ([64, 1, 10, 34, 1], [1, 1, 1, 1, 1])
    assert swizzle == 3
    tensor_map.boxes(x, 32, 10, 34)
    assert asked[1][9] == 2


def test_of_groups_a_box_has_one_and_a_quarter_is_every_other_row_and_column(asked: list[Any]) -> None:
    x = torch.zeros(2, 5, 7, 96, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    found = tensor_map.boxes(x, 64, 9, 15, 2, tensor_map.QUARTERS, 2)
    assert found.nbytes == 4 * 128
    assert len(asked) == 4
    begins = [(call[3].value - x.data_ptr()) // (2 * 96) for call in asked]
    assert begins == [0, 1, 7, 8]  # pixels
    # channels of a group end at its own, so that what a box has beyond is no neighbour's
    assert [list(call[4]) for call in asked] == [
        [48, 2, columns, rows, 2] for rows, columns in ((3, 4), (3, 3), (2, 4), (2, 3))
    ]
    assert all(list(call[5]) == [2 * 48, 2 * 96 * 2, 2 * 96 * 7 * 2, 2 * 96 * 7 * 5] for call in asked)
    assert all(list(call[6]) == [64, 1, 9, 15, 1] for call in asked)


def test_a_map_that_the_driver_refuses_is_told(asked: list[Any]) -> None:
    with pytest.raises(AdvisorError, match=r"refuses a tensor map of 0 x 4 x 4 x 1 x 0 values \(error 1\)"):
        tensor_map.boxes(torch.zeros(0, 0, 4, 4), 64, 10, 34)


def test_without_such_a_driver_pytorchs_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "encode", lambda: None)
    monkeypatch.setattr(nvrtc, "on_device", lambda tensor: "")
    monkeypatch.setattr(nvrtc, "arch", lambda device: 90)
    x = torch.zeros(1, 4, 4, 64, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    assert (
        api.unsupported(x, torch.zeros(64, 64, 3, 3, device="meta"), None)
        == "weight and input are on different devices"
    )
    assert (
        api.unsupported(x, torch.zeros(64, 64, 3, 3), None)
        == "the driver makes no tensor maps (CUDA 12.0 and newer does)"
    )


@pytest.mark.parametrize("version", [(12, 8), (12, 9), (13, 0)])
def test_a_compiler_that_takes_no_two_architectures_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    cuda = types.SimpleNamespace(nvrtc=types.SimpleNamespace(getVersion=lambda: version))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(tensor_map, "encode", lambda: object())
    monkeypatch.setattr(nvrtc, "on_device", lambda tensor: "")
    monkeypatch.setattr(nvrtc, "arch", lambda device: 90)
    nvrtc.refused.cache_clear()
    try:
        x = torch.zeros(1, 4, 4, 64, dtype=torch.bfloat16).permute(0, 3, 1, 2)
        reason = api.unsupported(x, torch.zeros(64, 64, 3, 3), None)
        assert reason == ("" if version > (12, 8) else "compiled by NVRTC 12.9 or newer only, CuPy finds 12.8")
        assert nvrtc.refused("casts/cast_tensors.cu") == ""
    finally:
        nvrtc.refused.cache_clear()
