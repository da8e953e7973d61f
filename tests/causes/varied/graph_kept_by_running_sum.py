# EXPECT: memory-growing|host-memory-growing
"""A generator of steps over 1-D signals; the epoch's mean loss is a sum of losses with their graphs."""

import itertools
import sys

import torch
import torch.nn as nn

gpu = torch.cuda.is_available()
dev = "cuda" if gpu else "cpu"
wide, many = (64, 64) if gpu else (16, 8)


def tower():
    layers = []
    for i in range(4):
        layers += [nn.Conv1d(wide if i else 2, wide, 5, padding=2, bias=False), nn.BatchNorm1d(wide), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(wide, 1)).to(dev)


def progress(model, optimizer):
    running = torch.zeros((), device=dev)
    for n in itertools.count(1):
        signal = torch.randn(many, 2, 256, device=dev)
        loss = (model(signal).squeeze(1) - signal.mean((1, 2))).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        running = running + loss * signal.square().mean()
        yield n, running / n


model = tower()
most = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
for n, mean in progress(model, torch.optim.SGD(model.parameters(), lr=1e-3)):
    if n % 100 == 0:
        print(n, mean.item(), flush=True)
    if n >= most:
        break
