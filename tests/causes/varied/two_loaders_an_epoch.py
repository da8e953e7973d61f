# EXPECT: workers-restart|few-loader-workers|loader-cpu-saturated
"""Labelled and unlabelled pictures side by side; both loaders are made by a method at the start of each short epoch."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SemiSupervised:
    def __init__(self):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        big = self.device == "cuda"
        wide, self.size, side = (32, 64, 32) if big else (8, 16, 16)
        self.known = TensorDataset(torch.randn(8 * self.size, 3, side, side), torch.arange(8 * self.size) % 10)
        self.other = TensorDataset(torch.randn(8 * self.size, 3, side, side))
        self.model = nn.Sequential(
            nn.Conv2d(3, wide, 3),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * wide, 10),
        ).to(self.device)
        self.opt = torch.optim.SGD(self.model.parameters(), 0.01)
        self.n = 0

    def loaders(self):
        return (DataLoader(data, self.size, shuffle=True, num_workers=2) for data in (self.known, self.other))

    def epoch(self, limit):
        for (x, y), (u,) in zip(*self.loaders(), strict=False):
            x, y, u = x.to(self.device), y.to(self.device), u.to(self.device)
            sure = self.model(u).softmax(1)
            loss = nn.functional.cross_entropy(self.model(x), y) - 0.1 * (sure * sure.log()).sum(1).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.n += 1
            if self.n >= limit:
                return False
        print("epoch", self.n, loss.item(), flush=True)
        return True


trainer = SemiSupervised()
while trainer.epoch(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000):
    pass
