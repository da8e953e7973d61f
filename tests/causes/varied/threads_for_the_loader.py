# EXPECT: threads-fewer-than-cores
# ON: cpu
"""Volumes on a CPU; a helper that was written for workers sets one thread for the whole process."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


def seeded(seed):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


class Net(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.a, self.b, self.c = nn.Conv3d(1, c, 3, padding=1), nn.Conv3d(c, c, 3, padding=1), nn.Conv3d(c, 2, 1)

    def forward(self, scan):
        return self.c(F.relu(self.b(F.relu(self.a(scan)))))


def train(limit):
    random = seeded(5)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), 0.01)
    done = 0
    while done < limit:
        scan = torch.rand(1, 1, 20, 20, 20, generator=random)
        loss = F.cross_entropy(net(scan), (scan > 0.5).long().squeeze(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        done += 1
        if done % 50 == 0:
            print(done, loss.item(), flush=True)


train(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
