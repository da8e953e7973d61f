# EXPECT: memory-growing|host-memory-growing
"""Volumes in functions; a dict keeps each step's output for a plot at the end."""

import collections
import sys

import torch
import torch.nn.functional as F
from torch import nn

big = torch.cuda.is_available()
device = torch.device("cuda" if big else "cpu")
side, wide = (32, 16) if big else (10, 6)


def model():
    return nn.Sequential(
        nn.Conv3d(1, wide, 3, 1, 1), nn.ReLU(), nn.Conv3d(wide, wide, 3, 1, 1), nn.ReLU(), nn.Conv3d(wide, 1, 1)
    ).to(device)


def one_step(net, opt, log):
    scan = torch.rand(2, 1, side, side, side, device=device)
    again = net(scan)
    parts = {"shape": F.mse_loss(again, scan), "smooth": again.diff(dim=2).abs().mean()}
    opt.zero_grad()
    sum(parts.values()).backward()
    opt.step()
    log["output"].append(again)
    for name, part in parts.items():
        log[name].append(part)


def main():
    net = model()
    opt, log = torch.optim.Adam(net.parameters(), 1e-4), collections.defaultdict(list)
    for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000):
        one_step(net, opt, log)
        if step % 100 == 99:
            print(step, float(log["shape"][-1]), flush=True)


main()
