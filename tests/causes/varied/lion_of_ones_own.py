# EXPECT: own-optimizer-loops|optimizer-loops-over-tensors
"""An optimizer class of the script's own that goes from tensor to tensor."""

import sys

import torch
from torch import nn

gpu = torch.cuda.is_available()
dev = "cuda" if gpu else "cpu"
c, n = (32, 32) if gpu else (8, 4)


class Lion(torch.optim.Optimizer):
    def __init__(self, weights, lr=1e-4, betas=(0.9, 0.99), decay=0.01):
        super().__init__(weights, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                mean, (first, second) = state["mean"], group["betas"]
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(torch.sign(mean * first + weight.grad * (1 - first)), alpha=-group["lr"])
                mean.mul_(second).add_(weight.grad, alpha=1 - second)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


net = nn.Sequential(
    nn.Conv2d(3, c, 3, padding=1), *[Cell() for _ in range(16)], nn.Flatten(), nn.Linear(c * 256, 10)
).to(dev)
lion = Lion(net.parameters())


def steps(limit):
    for k in range(limit):
        x, y = torch.randn(n, 3, 16, 16, device=dev), torch.randint(0, 10, (n,), device=dev)
        loss = nn.functional.cross_entropy(net(x), y)
        lion.zero_grad()
        loss.backward()
        lion.step()
        yield k, loss


for k, loss in steps(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
    if k % 100 == 99:
        print(k, loss.item(), flush=True)
