# EXPECT: anomaly-mode
"""Volumes; the class that trains switches anomaly detection on in its constructor."""

import sys

import torch
from torch import nn, optim

GPU = torch.cuda.is_available()


class Fitting:
    def __init__(self, debug=True):
        self.where = torch.device("cuda", 0) if GPU else torch.device("cpu")
        wide = 16 if GPU else 4
        self.net = nn.Sequential(
            nn.Conv3d(1, wide, 3, padding=1),
            nn.InstanceNorm3d(wide, affine=True),
            nn.LeakyReLU(),
            nn.Conv3d(wide, wide, 3, padding=1),
            nn.InstanceNorm3d(wide, affine=True),
            nn.LeakyReLU(),
            nn.Conv3d(wide, 2, 1),
        ).to(self.where)
        self.rule = optim.RMSprop(self.net.parameters(), lr=1e-4)
        if debug:
            torch.autograd.set_detect_anomaly(True, check_nan=True)

    def data(self):
        side = 32 if GPU else 12
        while True:
            scan = torch.rand(2, 1, side, side, side, device=self.where)
            yield scan, (scan > 0.5).long().squeeze(1)

    def __call__(self, most):
        for step, (scan, mask) in enumerate(self.data()):
            error = nn.functional.cross_entropy(self.net(scan), mask)
            self.rule.zero_grad(set_to_none=True)
            error.backward()
            self.rule.step()
            if step % 50 == 49:
                print("error", float(error), flush=True)
            if step + 1 >= most:
                return


Fitting()(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
