"""A pupil learns from a frozen teacher, in a class; the teacher runs without gradients."""

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SMALL, LARGE, BATCH, SIDE = (64, 128, 128, 64) if CUDA else (8, 16, 8, 24)


def tower(width):
    layers, before = [], 3
    for after, stride in ((width, 1), (width, 2), (2 * width, 1), (2 * width, 2), (4 * width, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


class Lesson:
    def __init__(self):
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self.pupil, self.teacher = tower(SMALL).to(DEVICE), tower(LARGE).to(DEVICE).eval().requires_grad_(False)
        if CUDA:
            self.pupil, self.teacher = (net.to(memory_format=torch.channels_last) for net in (self.pupil, self.teacher))
        self.optimizer = torch.optim.AdamW(self.pupil.parameters(), 1e-3, fused=True)
        self.pages = [torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE) for _ in range(8)]
        if CUDA:
            self.pages = [page.contiguous(memory_format=torch.channels_last) for page in self.pages]

    def teach(self, page):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            with torch.no_grad():
                wanted = self.teacher(page)
            answer = self.pupil(page)
        loss = F.kl_div(answer.float().log_softmax(1), wanted.float().softmax(1), reduction="batchmean")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, most, seconds=240):
        end, n = time.time() + seconds, 0
        while n < most and time.time() < end:
            for page in self.pages:
                loss = self.teach(page)
                n += 1
                if n % 100 == 0:
                    print(n, f"{float(loss):.4f}", flush=True)
                if n >= most:
                    break


Lesson().run(int(sys.argv[1]) if len(sys.argv) > 1 else 10**9)
