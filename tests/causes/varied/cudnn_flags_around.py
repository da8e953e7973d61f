# EXPECT: cudnn-off
# ON: gpu
"""A context manager around the forward pass switches cuDNN off, as a workaround for an old fault had it."""

import contextlib
import sys

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def careful():
    with torch.backends.cudnn.flags(enabled=False):
        yield


class Task:
    def __init__(self):
        block = [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        self.net = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1),
            *block,
            nn.Conv2d(64, 64, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 5),
        ).to(device)
        self.opt = torch.optim.SGD(self.net.parameters(), 0.01)

    def step(self):
        x = torch.randn(64 if device.type == "cuda" else 2, 3, 64, 64, device=device)
        y = torch.randint(0, 5, (len(x),), device=device)
        with careful():
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.opt.zero_grad()
            loss.backward()
        self.opt.step()
        return loss


task = Task()
for k in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
    loss = task.step()
    if k % 100 == 99:
        print(k, loss.item(), flush=True)
