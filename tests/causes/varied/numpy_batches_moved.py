# EXPECT: own-batches-pageable|copies-pageable|pageable-copy-waits|copies-stall-compute|copies-not-overlapped
# ON: gpu
"""A generator of NumPy arrays; each is copied from pageable memory while the GPU waits."""

import sys

import numpy as np
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
n, side = (512, 128) if device.type == "cuda" else (4, 32)
store = np.random.default_rng(0).random((2 * n, 3, side, side), dtype=np.float32)


def arrays():
    at = 0
    while True:
        yield store[at : at + n]
        at = (at + 64) % n


net = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, 2, 1),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 3),
).to(device)
opt = torch.optim.SGD(net.parameters(), 0.01)
feed, k = arrays(), 0
while k < (int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
    x = torch.from_numpy(next(feed)).to(device)
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    k += 1
    if k % 100 == 0:
        print(k, loss.item(), flush=True)
