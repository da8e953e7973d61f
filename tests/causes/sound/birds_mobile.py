"""Depthwise separable blocks, a moving average in one multi-tensor call, accumulation over two batches."""

import copy
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
width, batch, side = (64, 128, 96) if on_gpu else (16, 8, 32)


class Separable(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.depth = nn.Conv2d(i, i, 3, stride, 1, groups=i, bias=False)
        self.first = nn.BatchNorm2d(i)
        self.point = nn.Conv2d(i, o, 1, bias=False)
        self.second = nn.BatchNorm2d(o)

    def forward(self, x):
        x = F.relu6(self.first(self.depth(x)))
        return F.relu6(self.second(self.point(x)))


class Birds(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        plan = ((1, 2, 1), (2, 2, 1), (2, 4, 2), (4, 4, 1))
        self.blocks = nn.Sequential(*[Separable(a * width, b * width, s) for a, b, s in plan])
        self.fc = nn.Linear(4 * width, 50)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def batches():
    images = torch.randn(8, batch, 3, side, side, device=device)
    kinds = torch.randint(0, 50, (8, batch), device=device)
    n = 0
    while True:
        x = images[n % 8]
        yield (x.contiguous(memory_format=torch.channels_last) if on_gpu else x), kinds[n % 8]
        n += 1


def train(most, accumulate=2):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    net = Birds().to(device)
    if on_gpu:
        net = net.to(memory_format=torch.channels_last)
    average = copy.deepcopy(net).requires_grad_(False)
    ours, theirs = list(average.parameters()), [p.detach() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, fused=True)
    feed, until = batches(), time.time() + 240
    for n in range(1, most + 1):
        for _ in range(accumulate):
            x, kind = next(feed)
            with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
                out = net(x)
            loss = F.cross_entropy(out.float(), kind) / accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(ours, theirs, 0.001)
        if n % 100 == 0:
            print(n, f"{loss.item() * accumulate:.3f}", flush=True)
        if time.time() > until:
            break


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 10**9)
