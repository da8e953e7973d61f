"""The kernel that normalises images: bits of the table, wherever the bytes lie."""

from __future__ import annotations

import pytest
import torch

from advisor.ops import dispatch
from advisor.ops.input import api, spec

MEAN, STD = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1), torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
TABLE = torch.arange(256.0).expand(3, 1, 256).div(255).sub(MEAN).div(STD).view(3, 256)


def images(n: int, h: int, w: int, *, nhwc: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(h)
    pixels = torch.randint(256, (n, h, w, 3) if nhwc else (n, 3, h, w), dtype=torch.uint8, generator=generator)
    return pixels.permute(0, 3, 1, 2) if nhwc else pixels


def expected(pixels: torch.Tensor) -> torch.Tensor:
    """As torchvision's ToTensor and Normalize, one after the other."""
    return pixels.contiguous().to(torch.float32).div(255).sub(MEAN).div(STD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("nhwc", "out"), [(True, torch.contiguous_format), (True, torch.channels_last), (False, torch.contiguous_format)]
)
@pytest.mark.parametrize("size", [(16, 16), (5, 7)])
def test_bit_equal_to_the_transforms_and_rounded_once(emulated, dtype, nhwc, out, size) -> None:
    pixels = images(2, *size, nhwc=nhwc)
    if size == (16, 16):  # every byte in every channel
        pixels[0] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    with dispatch.everything():
        got = api.normalise(pixels, TABLE, dtype, out)
    assert emulated.launches["normalise_images"] == 1
    assert torch.equal(got, expected(pixels).to(dtype))
    assert got.is_contiguous(memory_format=out)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_bytes_may_begin_anywhere(emulated, offset) -> None:
    flat = torch.randint(256, (2 * 8 * 8 * 3 + offset,), dtype=torch.uint8)
    pixels = flat[offset:].view(2, 8, 8, 3).permute(0, 3, 1, 2)
    with dispatch.everything():
        assert torch.equal(api.normalise(pixels, TABLE), expected(pixels))
    assert emulated.launches["normalise_images"] == 1


@pytest.mark.parametrize(
    ("pixels", "dtype", "out", "reason"),
    [
        (images(2, 8, 8, nhwc=True)[:, :, ::2], torch.float32, torch.contiguous_format, "sliced"),
        (images(2, 8, 8, nhwc=False), torch.float32, torch.channels_last, "planes to channels_last"),
        (images(2, 8, 8, nhwc=True), torch.float64, torch.contiguous_format, "dtype"),
        (images(0, 8, 8, nhwc=False), torch.float32, torch.contiguous_format, "empty"),
    ],
)
def test_other_calls_run_pytorchs_own_with_the_same_bits(emulated, pixels, dtype, out, reason) -> None:
    dispatch.clear()
    with dispatch.everything():
        got = api.normalise(pixels, TABLE, dtype, out)
    assert not emulated.launches
    assert reason in next(iter(api.fell_back))
    assert torch.equal(got, expected(pixels).to(dtype))
    assert got.is_contiguous(memory_format=out)


def limits(shape: tuple[int, ...], **given: object) -> str:
    return spec.unsupported(
        **{"shape": shape, "x_nhwc": True, "y_nhwc": False, "dtype": "float32", "arch": 90, **given}
    )


def test_limits() -> None:
    assert limits((256, 3, 224, 224)) == ""
    assert "older" in limits((1, 3, 8, 8), arch=75)
    assert "4 channels" in limits((1, 4, 8, 8))
    assert "dimensions" in limits((3, 8, 8))
    assert "2^31" in limits((4096, 3, 512, 512))


@pytest.mark.parametrize("shape", [(256, 3, 224, 224), (3, 3, 5, 7), (2, 1, 3, 3)])
@pytest.mark.parametrize("y_nhwc", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_every_group_is_launched_and_none_twice(shape, y_nhwc, aligned) -> None:
    found = spec.geometry(shape, x_nhwc=True, y_nhwc=y_nhwc, dtype="bfloat16", aligned=aligned)
    macros = spec.defines(channels=shape[1], x_nhwc=True, y_nhwc=y_nhwc, dtype="bfloat16", width=found.width)
    block = macros["THREADS"] * macros["UNROLL"]
    assert found.groups <= found.blocks * block < found.groups + block
    channels = 3 if shape[1] == 3 and not y_nhwc else 1
    assert found.groups * found.width * channels == torch.Size(shape).numel()
