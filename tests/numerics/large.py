"""Nets of the size that people train, whose half precision the gate has refused: judged on a GPU only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics.nets import Kind, conv, conv_norm, images, mapped, supervised


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions; with `groups` above one Res2Net's, a group fed with what the one before gave."""

    def __init__(self, inputs: int, inner: int, stride: int = 1, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.groups, part = groups, inner // groups
        self.reduce = conv_norm(inputs, inner, 1)
        strides = (stride, dilation)
        self.parts = nn.ModuleList(conv_norm(part, part, 3, *strides) for _ in range(max(1, groups - 1)))
        self.pool = nn.AvgPool2d(3, stride, 1)
        self.expand = nn.Sequential(conv(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner))
        self.down = nn.Sequential()
        if stride != 1 or inputs != 4 * inner:
            self.down = nn.Sequential(conv(inputs, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.reduce(x)
        if self.groups == 1:
            y = self.parts[0](y)
        else:
            first, *pieces = y.chunk(self.groups, 1)
            done = [self.pool(first)]
            for piece, part in zip(pieces, self.parts, strict=True):
                fits = len(done) > 1 and done[-1].shape == piece.shape
                done.append(part(piece + done[-1] if fits else piece))
            y = torch.cat(done, 1)
        return self.relu(self.expand(y) + self.down(x))


class Backbone(nn.Module):
    """ResNet-50 or Res2Net-50, its last stage dilated in place of strided; gives the first stage and the last."""

    def __init__(self, groups: int = 1, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 64, 7, 2, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        channels, stages = 64, []
        for stage, depth in enumerate(depths):
            inner, blocks = width * 2**stage, []
            for block in range(depth):
                last = stage == len(depths) - 1
                stride = 2 if stage and not block and not last else 1
                blocks.append(Bottleneck(channels, inner, stride, 2 if last else 1, groups))
                channels = 4 * inner
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stages[0](self.stem(x))
        low = x
        for stage in self.stages[1:]:
            x = stage(x)
        return low, x


class Segmenter(nn.Module):
    """DeepLabV3+ over a backbone."""

    def __init__(self, backbone: Backbone, classes: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.backbone = backbone
        self.branches = nn.ModuleList(
            [conv_norm(2048, 256, 1), *(conv_norm(2048, 256, 3, 1, rate) for rate in (6, 12, 18))]
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv_norm(2048, 256, 1))
        self.project = nn.Sequential(conv_norm(5 * 256, 256, 1), nn.Dropout(dropout))
        self.low = conv_norm(256, 48, 1)
        self.last = nn.Sequential(conv_norm(304, 256), conv(256, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        low, y = self.backbone(x)
        pooled = F.interpolate(self.pooled(y), size=y.shape[2:], mode="bilinear", align_corners=False)
        y = self.project(torch.cat([*(branch(y) for branch in self.branches), pooled], 1))
        y = F.interpolate(y, size=low.shape[2:], mode="bilinear", align_corners=False)
        y = self.last(torch.cat([self.low(low), y], 1))
        return F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False)


class Block1d(nn.Module):
    """A residual block over signals, with dropout behind both norms."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(inputs, outputs, 17, padding=8, bias=False), nn.BatchNorm1d(outputs)
        self.conv2, self.bn2 = nn.Conv1d(outputs, outputs, 17, 4, padding=7, bias=False), nn.BatchNorm1d(outputs)
        self.skip = nn.Sequential(nn.MaxPool1d(4), nn.Conv1d(inputs, outputs, 1, bias=False))
        self.relu, self.dropout1, self.dropout2 = nn.ReLU(), nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y = self.skip(y)
        x = self.dropout1(self.relu(self.bn1(self.conv1(x))))
        y = self.conv2(x) + y
        return self.dropout2(self.relu(self.bn2(y))), y


class Signals(nn.Module):
    """ResNet1d for electrocardiograms: eight leads, blocks that halve the signal twice."""

    def __init__(self, dropout: float = 0.8, channels: tuple[int, ...] = (64, 128, 196, 256, 320)) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv1d(8, 64, 17, padding=8, bias=False), nn.BatchNorm1d(64), nn.ReLU()
        sizes = [64, *channels]
        self.blocks = nn.ModuleList(Block1d(a, b, dropout) for a, b in zip(sizes, channels, strict=False))
        self.head = nn.Linear(channels[-1] * (4096 >> (2 * len(channels))), 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        y = x
        for block in self.blocks:
            x, y = block(x, y)
        return self.head(x.flatten(1))


def _torchvisions() -> nn.Module:
    from torchvision.models.segmentation import deeplabv3_resnet50  # not in the test environment of a CPU

    model: nn.Module = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=3)
    return model


def _of_map(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], target)


def _signals() -> tuple[Tensor, Tensor]:
    x = images(8, 4096, 32, dims=1)
    return x, (x.view(32, 8, 64, 64).square().mean(3)[:, :6].amax(2) > 2.0).float()


def _segmentation(model: Callable[[], nn.Module], loss: Callable[..., Tensor]) -> Callable[[], Any]:
    return lambda: supervised(model(), mapped(rows=4, size=128), loss)


CE, BCE = F.cross_entropy, F.binary_cross_entropy_with_logits
DROPS = frozenset({"dropout"})
LARGE = [
    Kind("DeepLabV3 of torchvision", _segmentation(_torchvisions, _of_map), traits=DROPS),
    Kind("DeepLabV3+, ResNet-50", _segmentation(lambda: Segmenter(Backbone()), CE), traits=DROPS),
    Kind("DeepLabV3+, ResNet-101", _segmentation(lambda: Segmenter(Backbone(depths=(3, 4, 23, 3)), dropout=0.0), CE)),
    Kind("segmentation, Res2Net-50", _segmentation(lambda: Segmenter(Backbone(4), dropout=0.0), CE)),
    Kind("ResNet1d, dropout 0.8", lambda: supervised(Signals(), _signals, BCE, optimizer="adam"), traits=DROPS),
]  # fmt: skip
