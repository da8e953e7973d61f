# EXPECT: scalar-read-each-step|results-fetched-each-step
# ON: gpu
"""Gradients are clipped by a loop that reads each tensor's norm."""

import sys

import torch
from torch import nn

dev = "cuda" if torch.cuda.is_available() else "cpu"


class Wave(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.first = nn.Conv1d(1, c, 1)
        self.layers = nn.ModuleList([nn.Conv1d(c, c, 3, padding=2**i, dilation=2**i) for i in range(8)])
        self.last = nn.Conv1d(c, 1, 1)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def clip(weights, most):
    total = 0.0
    for weight in weights:
        total += weight.grad.norm().item() ** 2
    if total > most**2:
        for weight in weights:
            weight.grad.mul_(most / total**0.5)


def train(limit):
    net = Wave().to(dev)
    weights = list(net.parameters())
    opt = torch.optim.Adam(weights, 1e-3, fused=True)
    for k in range(limit):
        x = torch.randn(16, 1, 1024, device=dev)
        loss = (net(x[..., :-1]) - x[..., 1:]).square().mean()
        opt.zero_grad()
        loss.backward()
        clip(weights, 1.0)
        opt.step()
        if k % 100 == 99:
            print(k, loss.item(), flush=True)


train(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
