"""Organs marked in volumes by a 3-D network with group norms, in a trainer class."""

import sys
import time

import torch
from torch import nn

on_gpu = torch.cuda.is_available()
where = "cuda" if on_gpu else "cpu"
base, side, batch = (32, 64, 4) if on_gpu else (8, 16, 1)


def twice(i, o):
    return nn.Sequential(
        nn.Conv3d(i, o, 3, padding=1, bias=False),
        nn.GroupNorm(4, o),
        nn.ReLU(inplace=True),
        nn.Conv3d(o, o, 3, padding=1, bias=False),
        nn.GroupNorm(4, o),
        nn.ReLU(inplace=True),
    )


class VNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.coarse = twice(1, base), twice(base, 2 * base)
        self.pool, self.up = nn.MaxPool3d(2), nn.ConvTranspose3d(2 * base, base, 2, 2)
        self.join, self.mask = twice(2 * base, base), nn.Conv3d(base, 3, 1)

    def forward(self, scan):
        fine = self.fine(scan)
        coarse = self.up(self.coarse(self.pool(fine)))
        return self.mask(self.join(torch.cat((fine, coarse), 1)))


class Trainer:
    def __init__(self, most):
        torch.manual_seed(0)
        self.net = VNet().to(where)
        if on_gpu:
            self.net.to(memory_format=torch.channels_last_3d)
        self.opt = torch.optim.SGD(self.net.parameters(), 0.01, momentum=0.9, fused=True)
        self.scans = torch.randn(4, batch, 1, side, side, side, device=where)
        self.masks = torch.randint(0, 3, (4, batch, side, side, side), device=where)
        self.most, self.done, self.until = most, 0, time.time() + 240

    def training_step(self, scan, mask):
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            guess = self.net(scan)
        loss = nn.functional.cross_entropy(guess.float(), mask)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def fit(self):
        while self.done < self.most and time.time() < self.until:
            loss = self.training_step(self.scans[self.done % 4], self.masks[self.done % 4])
            self.done += 1
            if self.done % 50 == 0:
                print(f"{self.done}: {loss:.3f}", flush=True)


if __name__ == "__main__":
    Trainer(int(sys.argv[1]) if len(sys.argv) > 1 else 10**9).fit()
