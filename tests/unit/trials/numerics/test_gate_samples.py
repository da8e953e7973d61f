"""The gate with models that take their batch as lists, as detectors do: images of many sizes, and what is on each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.loop.training import RootModule, Training
from advisor.trials.numerics.gate import Gate
from advisor.trials.numerics.replay import reordered


class Detector(nn.Module):
    """A dict of losses from images and boxes; boxes whose corners are the wrong way round are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)
        )

    def forward(self, images, targets):
        total = torch.zeros(())
        for image, target in zip(images, targets, strict=True):
            boxes = target["boxes"]
            if not bool((boxes[:, 2:] > boxes[:, :2]).all()):
                raise AssertionError("All bounding boxes should have positive height and width")
            total = total + (self.body(image[None]) - boxes.mean(0)).square().mean() * target["labels"].float().mean()
        return {"loss": total}


class InOrder(Detector):
    """Asks for the image with the most boxes first, as packed sequences do."""

    def forward(self, images, targets):
        counts = [len(target["boxes"]) for target in targets]
        if counts != sorted(counts, reverse=True):
            raise ValueError("sort them")
        return super().forward(images, targets)


def batch(samples: int) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    images, targets = [], []
    for i in range(samples):
        count = samples - i  # the last has one box
        corner = torch.rand(count, 2)
        boxes = torch.cat([corner, corner + 0.1 + torch.rand(count, 2)], 1)
        images.append(torch.randn(3, 16 + 4 * i, 24))
        targets.append({"boxes": boxes, "labels": torch.randint(1, 5, (count,))})
    return images, targets


def judged(net: Detector, change, samples: int = 3) -> Check:
    torch.manual_seed(0)
    images, targets = batch(samples)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    training = Training(device=torch.device("cpu"), optimizers=[optimizer])
    root = RootModule(module=net, name="Detector")
    training.roots.append(root)
    gate = Gate(training)
    for last in (False, False, True):
        if last:
            gate.arm()
        losses = net(images, targets)
        losses["loss"].retain_grad()
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
    root.args, root.kwargs, root.output = (images, targets), {}, losses
    root.output_grads = (losses["loss"].grad.clone(),)
    assert gate.captured()
    plain = type(net).forward.__get__(net)
    return gate.judge(
        lambda: setattr(net, "forward", change(plain)),
        lambda: net.__dict__.pop("forward", None),
        Semantics.REASSOCIATED,
    ).check


def same(forward):
    return forward


def stale(forward):
    held = []

    def changed(images, targets):
        held.append([image.clone() for image in images])
        return forward(held[0], targets)

    return changed


def wrong(forward):
    return lambda images, targets: {"loss": forward(images, targets)["loss"] * 1.2}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("net", [Detector, InOrder])
def test_boxes_stay_boxes(net, samples: int) -> None:
    check = judged(net(), same, samples)
    assert check.passed, check
    assert not judged(net(), wrong, samples).passed


def test_other_samples_of_the_same_batch_show_a_stale_input() -> None:
    assert judged(Detector(), stale).passed is False


def test_samples_of_lists_change_places_and_are_whole() -> None:
    images, targets = batch(3)
    ((moved, theirs), other) = reordered((images, targets), {"scale": torch.arange(3), "levels": torch.arange(4)})
    assert all(a is b for a, b in zip(moved, [images[2], *images[:2]], strict=True))
    assert all(a is b for a, b in zip(theirs, [targets[2], *targets[:2]], strict=True))
    assert other["scale"].tolist() == [2, 0, 1]
    assert other["levels"].tolist() == [0, 1, 2, 3]


def test_rows_of_tensors_change_places() -> None:
    levels = [torch.randn(4, 8, n, n) for n in (8, 4)]  # features of several sizes are no samples
    ((x, moved), _) = reordered((torch.arange(4), levels), {})
    assert x.tolist() == [3, 0, 1, 2]
    assert all(torch.equal(a[1:], b[:-1]) for a, b in zip(moved, levels, strict=True))
    ((image, boxes), _) = reordered((torch.arange(4.0).view(1, 1, 4), torch.tensor([[1.0, 2, 3, 4]])), {})
    assert image.flatten().tolist() == [3, 2, 1, 0]
    assert boxes.flatten().tolist() == [1, 2, 3, 4]
