# EXPECT: results-fetched-each-step|scalar-read-each-step
# ON: gpu
"""A meter class takes each batch's predictions to NumPy and counts in Python."""

import sys

import numpy as np
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
big = device.type == "cuda"
c, n = (48, 256) if big else (8, 8)


class Meter:
    def __init__(self, kinds):
        self.table = np.zeros((kinds, kinds), dtype=np.int64)

    def add(self, scores, truth):
        guess = scores.detach().cpu().numpy().argmax(1)
        for row, column in zip(truth.cpu().numpy(), guess, strict=True):
            for _ in range(50):
                self.table[row, column] += 1

    @property
    def right(self):
        return self.table.trace() / max(1, self.table.sum())


net = nn.Sequential(
    nn.Conv1d(6, c, 7, 2, 3, bias=False),
    nn.BatchNorm1d(c),
    nn.ReLU(),
    nn.Conv1d(c, c, 7, 2, 3, bias=False),
    nn.BatchNorm1d(c),
    nn.ReLU(),
    nn.AdaptiveAvgPool1d(1),
    nn.Flatten(),
    nn.Linear(c, 6),
).to(device)
opt, meter, k = torch.optim.AdamW(net.parameters(), fused=True), Meter(6), 0
while k < (int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
    signal, kind = torch.randn(n, 6, 512, device=device), torch.randint(0, 6, (n,), device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=big):
        scores = net(signal)
    loss = nn.functional.cross_entropy(scores.float(), kind)
    opt.zero_grad()
    loss.backward()
    opt.step()
    meter.add(scores.float(), kind)
    k += 1
    if k % 100 == 0:
        print(k, meter.right, flush=True)
