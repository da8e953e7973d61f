"""Tails of image pipelines: found where they are, told by their values, refused where they are anything else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pipelines import (
    MEAN,
    STD,
    Compose,
    Images,
    Normalize,
    RandomErasing,
    RandomHorizontalFlip,
    ToDtype,
    ToTensor,
    package,
)
from torch.utils.data import ConcatDataset, Dataset, Subset

from advisor.profiling.inside.normalising import tails


def names(dataset: object) -> list[str]:
    return [tail.name for tail in tails(dataset)]


def test_found_at_the_end_of_each_pipeline_also_in_wrapped_data_sets() -> None:
    first = Images(Compose([RandomHorizontalFlip(), ToTensor(), Normalize()]))
    second = Images(Compose([ToTensor()]))
    assert names(first) == ["ToTensor + Normalize"]
    assert tails(first)[0].first == 1
    assert names(Subset(first, [0])) == ["ToTensor + Normalize"]
    assert names(ConcatDataset([first, Subset(second, [1]), first])) == ["ToTensor + Normalize", "ToTensor"]
    first.again = first.transform
    assert len(tails(first)) == 1


class Own(Normalize):
    """A class of the script's with a name of torchvision's."""


Own.__name__ = "Normalize"


@pytest.mark.parametrize(
    "steps",
    [
        [ToTensor(), Normalize(), RandomErasing()],
        [ToTensor(), Own()],
        [RandomHorizontalFlip(), Normalize()],
        [lambda array: array],
        [],
    ],
)
def test_not_found(steps: list) -> None:
    assert tails(Images(Compose(steps))) == []
    assert tails(Images(steps)) == []


def test_a_data_set_that_holds_itself_ends() -> None:
    class Circle(Dataset):
        pass

    circle = Circle()
    circle.inner, circle.transform = circle, Compose([ToTensor()])
    assert names(circle) == ["ToTensor"]


@pytest.mark.parametrize(
    ("steps", "kind"),
    [([ToTensor(), Normalize()], "array"), ([ToDtype(), Normalize()], "tensor"), ([ToTensor()], "grey")],
)
def test_the_table_and_the_bytes_give_what_the_steps_give(steps: list, kind: str) -> None:
    plain = Images(lambda image: image, kind)[3][0]
    (tail,) = tails(Images(Compose(steps), kind))
    pixels = tail.pixels(plain)
    assert pixels is not None
    table = tail.table(pixels.shape[0])
    assert table is not None
    made = torch.stack([row[places.long()] for row, places in zip(table, pixels, strict=True)])
    assert torch.equal(made, tail.run(plain))
    before = pixels.clone()
    plain[...] = 0  # a data set may decode into the same memory again
    assert torch.equal(pixels, before)


class Spread(ToTensor):
    """Not a function of each value alone."""

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        image = super().__call__(array)
        return image / image.max()


class Double(Normalize):
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return super().__call__(image).double()


for _kind, _name in ((Spread, "ToTensor"), (Double, "Normalize")):
    _kind.__name__, _kind.__module__ = _name, ToTensor.__module__


@pytest.mark.parametrize(
    ("steps", "channels"),
    [
        ([Spread()], 3),
        ([ToTensor(), Normalize()], 1),  # three means make three channels of one
        ([ToTensor(), Double()], 3),
        ([ToTensor(), ToDtype(torch.float16, scale=False)], 3),
        ([ToTensor(), Normalize((0.5, 0.5), (1.0, 1.0))], 3),  # the script's own error
    ],
)
def test_no_table(steps: list, channels: int) -> None:
    (tail,) = tails(Images(Compose(steps)))
    assert tail.table(channels) is None


def test_bytes_only_of_what_the_steps_turn_into_values() -> None:
    (tail,) = tails(Images(Compose([ToTensor(), Normalize()])))
    assert tail.pixels(np.zeros((4, 4, 3), np.uint8)) is not None
    for other in (
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
        torch.zeros(3, 4, 4, dtype=torch.uint8),  # ToTensor refuses it
        "path.jpg",
    ):
        assert tail.pixels(other) is None
    (tail,) = tails(Images(Compose([ToDtype()])))
    assert tail.pixels(torch.zeros(3, 4, 4, dtype=torch.uint8)) is not None
    assert tail.pixels(torch.zeros(3, 4, 4)) is None
    assert tail.pixels(torch.zeros(2, 3, 4, 4, dtype=torch.uint8)) is None


def test_a_dtype_for_each_kind_of_input_is_left_alone() -> None:
    assert names(Images(Compose([ToTensor(), ToDtype({torch.Tensor: torch.float32})]))) == []


def test_timed_on_one_thread_which_is_put_back() -> None:
    seen = []

    class Watched(ToTensor):
        def __call__(self, array: np.ndarray) -> torch.Tensor:
            seen.append((torch.get_num_threads(), array.shape))
            return super().__call__(array)

    Watched.__name__, Watched.__module__ = "ToTensor", ToTensor.__module__
    (tail,) = tails(Images(Compose([Watched(), Normalize()])))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert tail.seconds((3, 5, 7)) >= 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == [(1, (5, 7, 3))] * 3


def test_torchvisions_own() -> None:
    v1, v2 = package("torchvision.transforms"), package("torchvision.transforms.v2")
    for steps, name in (
        ([v1.RandomCrop(4), v1.ToTensor(), v1.Normalize(MEAN, STD)], "ToTensor + Normalize"),
        (
            [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Normalize(MEAN, STD)],
            "PILToTensor + ConvertImageDtype + Normalize",
        ),
    ):
        (tail,) = tails(Images(v1.Compose(steps)))
        assert tail.name == name
        assert tail.table(3) is not None
    steps = [v2.ToImage(), v2.RandomCrop(4), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    (tail,) = tails(Images(v2.Compose(steps)))
    assert tail.name == "ToDtype + Normalize"
    assert tail.table(3) is not None
