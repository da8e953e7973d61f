# EXPECT: gradients-unused
"""Two views, two encoders; the slow one follows in one multi-tensor call, and its forward records a graph for nobody."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

has = torch.cuda.is_available()
dev = torch.device("cuda" if has else "cpu")
w, views = (48, 128) if has else (12, 16)


def encoder():
    def unit(i, o, s):
        return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))

    return nn.Sequential(unit(3, w, 1), unit(w, w, 2), unit(w, 2 * w, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def pairs(limit):
    for _ in range(limit):
        image = torch.randn(views, 3, 32, 32, device=dev)
        yield image + 0.1 * torch.randn_like(image), image.flip(3)


online = encoder().to(dev)
predictor = nn.Linear(2 * w, 2 * w).to(dev)
slow = copy.deepcopy(online)
slow_weights, weights = [p.detach() for p in slow.parameters()], [p.detach() for p in online.parameters()]
opt = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)
for number, (one, other) in enumerate(pairs(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)):
    guess = F.normalize(predictor(online(one)), dim=1)
    goal = F.normalize(slow(other), dim=1)
    loss = 2 - 2 * (guess * goal).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    torch._foreach_lerp_(slow_weights, weights, 0.01)
    if number % 100 == 99:
        print(number, loss.item(), flush=True)
