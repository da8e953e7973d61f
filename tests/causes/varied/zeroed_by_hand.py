# EXPECT: gradients-zeroed|optimizer-loops-over-tensors|own-optimizer-loops
"""Gradients are zeroed tensor by tensor in a function, for two networks."""

import sys

import torch
from torch import nn

gpu = torch.cuda.is_available()
where = "cuda" if gpu else "cpu"
c, n = (32, 16) if gpu else (8, 4)


def deep(i, o):
    inner = [
        part for _ in range(12) for part in (nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU())
    ]
    return nn.Sequential(nn.Conv2d(i, c, 1), *inner, nn.Conv2d(c, o, 1)).to(where)


def forget(*networks):
    for network in networks:
        for weight in network.parameters():
            if weight.grad is not None:
                weight.grad.data.zero_()


there, back = deep(3, 2), deep(2, 3)
opt = torch.optim.SGD([*there.parameters(), *back.parameters()], lr=1e-3)
for k in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
    picture = torch.randn(n, 3, 16, 16, device=where)
    forget(there, back)
    loss = (back(there(picture)) - picture).abs().mean()
    loss.backward()
    opt.step()
    if k % 100 == 99:
        print(k, loss.item(), flush=True)
