# EXPECT: double-precision
"""Regression of a signal's phase; the targets are NumPy's and so are the loss and its gradient."""

import sys

import numpy as np
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
items = 512 if device == "cuda" else 64
random = np.random.default_rng(3)
phases = random.uniform(-np.pi, np.pi, (64, items, 128))


def waves(phase):
    return torch.sin(torch.as_tensor(phase, dtype=torch.float32, device=device)).unsqueeze(1)


class Phase(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(1, hidden, 9, padding=4), nn.ReLU(), nn.Conv1d(hidden, 1, 9, padding=4))

    def forward(self, wave):
        return self.inner(wave).squeeze(1)


def learn(limit):
    net = Phase().to(device)
    descent = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    count = 0
    while count < limit:
        for phase in phases:
            target = torch.from_numpy(phase).to(device)
            loss = (net(waves(phase)) - target).square().mean()
            descent.zero_grad()
            loss.backward()
            descent.step()
            count += 1
            if count % 100 == 0:
                print(count, loss.item(), flush=True)
            if count >= limit:
                break


if __name__ == "__main__":
    learn(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
