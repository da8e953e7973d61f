# EXPECT: double-precision
"""Cells marked in 2-D; a map of weights for borders comes from NumPy and multiplies the loss of each pixel."""

import sys

import numpy as np
import torch
from torch import nn

cuda = torch.cuda.is_available()
place = torch.device("cuda" if cuda else "cpu")
side, count, wide = (128, 16, 32) if cuda else (48, 4, 8)
x, y = np.meshgrid(np.linspace(-1, 1, side), np.linspace(-1, 1, side))
borders = torch.tensor(1.0 + np.exp(-(x**2 + y**2))).to(place)


def net():
    parts = [nn.Conv2d(1, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()]
    parts += [nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, 1, 1)]
    return nn.Sequential(*parts).to(place)


def objective(score, truth):
    each = nn.functional.binary_cross_entropy_with_logits(score, truth, reduction="none")
    return (each * borders).mean()


cells = net()
opt = torch.optim.Adam(cells.parameters())
left = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
while left:
    picture = torch.rand(count, 1, side, side, device=place)
    value = objective(cells(picture), (picture > 0.7).float())
    opt.zero_grad()
    value.backward()
    opt.step()
    left -= 1
    if left % 100 == 0:
        print(left, float(value), flush=True)
