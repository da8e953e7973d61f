"""Images kept as bytes behave as the fp32 tensor that they stand for, and move as bytes."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from advisor.ops import dispatch
from advisor.transforms import images
from advisor.transforms.images import NormalisedImages, Table

PIXELS = torch.randint(256, (4, 5, 6, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).permute(
    0, 3, 1, 2
)
TABLE = Table(torch.arange(256.0).div(255).expand(3, 256).sub(torch.tensor([[0.1], [0.2], [0.3]])))
VALUES = torch.stack([TABLE.values[c][PIXELS[:, c].long()] for c in range(3)], 1)
META = torch.device("meta")


@pytest.fixture
def kept() -> NormalisedImages:
    dispatch.clear()
    images.moved.clear()
    return NormalisedImages(PIXELS.clone(), TABLE)


def test_facts_are_those_of_the_plain_tensor_and_cost_nothing(kept) -> None:
    assert isinstance(kept, torch.Tensor)
    for fact in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "is_cuda", "nbytes"):
        assert getattr(kept, fact) == getattr(VALUES, fact), fact
    for fact in ("size", "dim", "numel", "element_size", "stride", "is_contiguous", "is_floating_point", "is_pinned"):
        assert getattr(kept, fact)() == getattr(VALUES, fact)(), fact
    assert len(kept) == 4
    assert kept.size(1) == 3
    assert kept.untouched


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: 2 - x,
        lambda x: x[1:, 0],
        lambda x: x.mean((0, 2, 3)),
        lambda x: x.half(),
        lambda x: x.to(torch.float64),
        lambda x: x.to("cpu"),
        lambda x: x.cpu(),
        lambda x: x.clone(),
        lambda x: x.detach(),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.to("cpu", copy=True),
        lambda x: torch.cat([x, x]),
        lambda x: torch.stack(list(x)),
        lambda x: torch.nn.functional.conv2d(x, torch.ones(2, 3, 1, 1)),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.from_numpy(np.asarray(x).copy()),
        lambda x: torch.tensor(x.tolist()),
        copy.deepcopy,
        lambda x: torch.empty(4, 3, 5, 6).copy_(x),
        lambda x: torch.lerp(x, x.flip(0), 0.3),
        lambda x: torch.nn.functional.pad(input=x, pad=(1, 1)),
    ],
)
def test_what_is_computed_with_it_is_computed_with_the_values(kept, function) -> None:
    got, want = function(kept), function(VALUES.clone())
    assert torch.equal(got, want)
    assert got.dtype == want.dtype
    assert type(got) is torch.Tensor


def test_what_is_done_in_place_stays(kept) -> None:
    kept.mul_(2)
    kept[0] = 0
    kept += 1
    want = VALUES * 2
    want[0] = 0
    assert torch.equal(kept, want + 1)


def test_what_was_changed_in_place_moves_as_it_is(kept) -> None:
    view = kept[0]
    view.zero_()
    assert torch.equal(kept.plain()[0], torch.zeros(3, 5, 6))
    kept.to(META)
    assert images.moved["uint8"] == 0


def test_without_torch_function_too(kept) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(torch.add(kept, 1), VALUES + 1)


def test_values_alone_leave_it_as_bytes(kept) -> None:
    assert torch.equal(kept.plain(), VALUES)
    assert kept.untouched
    assert "0." in repr(kept)
    assert kept.untouched


def test_gradients_of_it_as_of_any_leaf(kept) -> None:
    kept.requires_grad_()
    (kept * 3).sum().backward()
    assert torch.equal(kept.grad, torch.full_like(VALUES, 3))


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.to(META),
        lambda x: x.to("meta", non_blocking=True),
        lambda x: x.to(torch.empty(0, device=META)),
        lambda x: x.to(device="meta", dtype=torch.float16),
        lambda x: x.to(META, memory_format=torch.channels_last),
    ],
)
def test_a_move_sends_bytes(kept, move) -> None:
    got, want = move(kept), move(VALUES)
    assert (got.shape, got.dtype, got.device, got.stride()) == (want.shape, want.dtype, want.device, want.stride())
    assert type(got) is torch.Tensor
    assert images.moved == {"uint8": 1}
    assert kept.untouched


def test_cuda_is_a_move(kept, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(images, "moved_batch", lambda *given: asked.append(given[1:4]) or torch.zeros(1))
    kept.cuda()
    kept.cuda(1, non_blocking=True)
    kept.cuda("cuda:2")
    assert asked == [
        (torch.device("cuda"), torch.float32, False),
        (torch.device("cuda", 1), torch.float32, True),
        (torch.device("cuda", 2), torch.float32, False),
    ]


def test_pinned_it_is_its_bytes_that_are_pinned(kept, monkeypatch) -> None:
    class Bytes:
        shape = PIXELS.shape

        def pin_memory(self):
            return PIXELS[:2]

        def is_pinned(self):
            return True

    kept.pixels = Bytes()
    assert kept.is_pinned()
    pinned = kept.pin_memory()
    assert type(pinned) is NormalisedImages
    assert pinned.untouched
    assert torch.equal(pinned.plain(), VALUES[:2])


def test_integers_are_made_of_the_values(kept) -> None:
    assert kept.to(META, torch.int64).dtype == torch.int64
    assert images.moved["uint8"] == 0


def test_between_processes_it_goes_as_bytes_with_its_table(kept) -> None:
    kept.pixels = torch.zeros(4, 3, 100, 100, dtype=torch.uint8)
    shared = ForkingPickler.dumps(kept)
    assert len(shared) < len(TABLE.data) + 1024
    back = ForkingPickler.loads(shared)
    assert back.untouched
    assert back.table == TABLE
    assert torch.equal(back.plain(), kept.plain())
    kept.zero_()
    back = ForkingPickler.loads(ForkingPickler.dumps(kept))
    assert type(back) is torch.Tensor
    assert torch.equal(back, kept.plain())


def test_saved_it_is_the_plain_tensor(kept) -> None:
    file = io.BytesIO()
    torch.save({"batch": kept}, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)["batch"]
    assert type(back) is torch.Tensor
    assert torch.equal(back, VALUES)
    assert type(pickle.loads(pickle.dumps(kept))) is torch.Tensor


def test_one_image(kept) -> None:
    one = NormalisedImages(PIXELS[0], TABLE)
    assert one.shape == (3, 5, 6)
    assert torch.equal(one + 0, VALUES[0])
    assert one.to(META).shape == (3, 5, 6)
