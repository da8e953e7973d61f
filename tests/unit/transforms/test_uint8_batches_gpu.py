"""Bytes through workers, pinned memory and the kernel, on the stream of the copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loops import make_loop
from pipelines import Compose, Images, Normalize, RandomHorizontalFlip, ToDtype, ToTensor
from torch.utils.data import DataLoader

from advisor.ops import catalog, dispatch
from advisor.transforms import images
from advisor.transforms.prefetch import DevicePrefetch
from advisor.transforms.uint8_batches import Uint8Batches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda x: x.to("cuda", non_blocking=True),
    "cuda": lambda x: x.cuda(),
    "channels_last": lambda x: x.to("cuda", memory_format=torch.channels_last),
    "bf16": lambda x: x.to("cuda", torch.bfloat16),
    "halved first": lambda x: (x / 2).to("cuda"),
}


@pytest.mark.parametrize("ahead", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("move", MOVES)
def test_bit_equal_on_a_busy_device(move: str, kind: str, ahead: bool) -> None:
    steps = [RandomHorizontalFlip(), ToTensor()] if kind == "array" else [ToDtype()]
    dataset = Images(Compose([*steps, Normalize()]), kind)
    loop = make_loop(device="cuda", steps=1)
    loader = DataLoader(dataset, batch_size=5, shuffle=True, num_workers=2, pin_memory=True)
    loop.training.loaders.append(loader)

    def drawn() -> list[tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(3)
        busy = torch.randn(2048, 2048, device="cuda")
        found = []
        for x, number in loader:
            for _ in range(3):
                busy = busy @ busy / 64
            moved = MOVES[move](x)
            found.append((moved + 0, number))
            del moved
        return found

    plain = drawn()
    images.moved.clear()
    before = sum(catalog.get("input").engaged.values())
    undo = Uint8Batches().apply(loop.training, {})
    also = DevicePrefetch().apply(loop.training, {}) if ahead else None
    with dispatch.everything():
        ours = drawn()
    for (x, number), (want, want_number) in zip(ours, plain, strict=True):
        assert torch.equal(number, want_number)
        assert torch.equal(x, want)
        assert (x.dtype, x.stride()) == (want.dtype, want.stride())
    if move != "halved first":
        assert images.moved["uint8"] >= 3
        assert sum(catalog.get("input").engaged.values()) > before or (move, kind) == ("channels_last", "tensor")
        assert Uint8Batches().effect(loop.training, None, None).passed
    if also is not None:
        also.run()
    undo.run()
    assert type(next(iter(loader))[0]) is torch.Tensor
