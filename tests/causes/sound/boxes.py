"""A detector of one stage: a pyramid, shared heads and a focal loss."""

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
base, batch, side, classes = (64, 16, 256, 20) if on_gpu else (8, 2, 64, 5)


def block(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(block(3, base, 2), block(base, base, 2))
        self.c3, self.c4 = (
            nn.Sequential(block(base, 2 * base, 2), block(2 * base, 2 * base)),
            block(2 * base, 4 * base, 2),
        )
        self.l3, self.l4 = nn.Conv2d(2 * base, base, 1), nn.Conv2d(4 * base, base, 1)
        self.tower = nn.Sequential(block(base, base), block(base, base))
        self.kind, self.box = nn.Conv2d(base, classes, 3, padding=1), nn.Conv2d(base, 4, 3, padding=1)

    def forward(self, images):
        c3 = self.c3(self.stem(images))
        c4 = self.c4(c3)
        p4 = self.l4(c4)
        p3 = self.l3(c3) + F.interpolate(p4, scale_factor=2.0)
        heads = [self.tower(level) for level in (p3, p4)]
        return [(self.kind(head), self.box(head)) for head in heads]


def focal(scores, wanted):
    chance = torch.sigmoid(scores)
    right = chance * wanted + (1 - chance) * (1 - wanted)
    return ((1 - right) ** 2 * F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")).mean()


def run(most):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = Detector().to(device)
    images = torch.randn(4, batch, 3, side, side, device=device)
    if on_gpu:
        model = model.to(memory_format=torch.channels_last)
    sizes = (side // 8, side // 16)
    kinds = [(torch.rand(batch, classes, s, s, device=device) < 0.02).float() for s in sizes]
    boxes = [torch.rand(batch, 4, s, s, device=device) for s in sizes]
    opt = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    until = time.time() + 240
    for n in range(1, most + 1):
        pictures = images[n % 4]
        if on_gpu:
            pictures = pictures.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            levels = model(pictures)
        loss = sum(
            focal(kind.float(), k) + F.smooth_l1_loss(box.float(), b)
            for (kind, box), k, b in zip(levels, kinds, boxes, strict=True)
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
        if n % 100 == 0:
            print(n, f"{loss.item():.3f}", flush=True)
        if time.time() > until:
            return


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 10**9)
