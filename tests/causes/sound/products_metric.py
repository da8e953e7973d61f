"""Embeddings by a triplet loss; batches come from a generator, the loop draws from it."""

import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
width, batch, side = (64, 128, 64) if on_gpu else (12, 8, 32)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for i, o in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            self.layers.append(nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()))
            self.layers.append(nn.Sequential(nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()))
        self.project = nn.Linear(4 * width, 64)

    def forward(self, image):
        for layer in self.layers:
            image = layer(image)
        return F.normalize(self.project(image.mean((2, 3))), dim=1)


def triplets(generator):
    pool = torch.randn(512, 3, side, side, generator=generator).to(device)
    if on_gpu:
        pool = pool.contiguous(memory_format=torch.channels_last)
    while True:
        chosen = torch.randint(0, 512, (batch,), device=device)
        yield torch.cat([pool[chosen], pool[chosen].flip(3), pool[(chosen + 7) % 512]])


def train(most):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    net = Embedding().to(device)
    if on_gpu:
        net = net.to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, fused=True)
    begun = time.monotonic()
    for n, images in enumerate(triplets(torch.Generator().manual_seed(0)), 1):
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            anchor, same, other = net(images).chunk(3)
        loss = F.triplet_margin_loss(anchor.float(), same.float(), other.float(), 0.2)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if n % 100 == 0:
            print(n, f"{loss.item():.4f}", flush=True)
        if n >= most or time.monotonic() - begun > 240:
            return


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 10**9)
