# EXPECT: device-synchronised
# ON: gpu
"""Parts of the step are timed by a context manager that waits for the device."""

import contextlib
import sys
import time

import torch
from torch import nn

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
spent = {"forward": 0.0, "backward": 0.0, "update": 0.0}


@contextlib.contextmanager
def timed(part):
    if cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    yield
    if cuda:
        torch.cuda.synchronize()
    spent[part] += time.perf_counter() - begun


layers = [
    part for _ in range(10) for part in (nn.Conv3d(16, 16, 3, padding=1, bias=False), nn.BatchNorm3d(16), nn.ReLU())
]
net = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), *layers, nn.Conv3d(16, 1, 1)).to(device)
opt = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
for k in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
    scan = torch.rand(1, 1, 12, 12, 12, device=device)
    with timed("forward"):
        loss = (net(scan) - scan).square().mean()
    with timed("backward"):
        opt.zero_grad()
        loss.backward()
    with timed("update"):
        opt.step()
    if k % 100 == 99:
        print(k, {part: round(seconds, 2) for part, seconds in spent.items()}, flush=True)
