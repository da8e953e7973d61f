"""Streets marked by a U-Net with cross-entropy and dice, in functions; DataLoader with workers that stay."""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
base, side, batch, workers = (32, 128, 32, 4) if on_gpu else (8, 48, 4, 1)


class Streets(Dataset):
    def __init__(self):
        self.images = torch.randint(0, 256, (256, 3, side, side), dtype=torch.uint8)
        self.marks = torch.randint(0, 4, (256, side, side))

    def __len__(self):
        return 16 * len(self.images)

    def __getitem__(self, index):
        return self.images[index % 256], self.marks[index % 256]


def conv(i, o):
    layers = [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(3, base), conv(base, 2 * base), conv(2 * base, 4 * base)
        self.up_b, self.up_a = nn.ConvTranspose2d(4 * base, 2 * base, 2, 2), nn.ConvTranspose2d(2 * base, base, 2, 2)
        self.d, self.e, self.out = conv(4 * base, 2 * base), conv(2 * base, base), nn.Conv2d(base, 4, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        b = self.d(torch.cat([b, self.up_b(c)], 1))
        return self.out(self.e(torch.cat([a, self.up_a(b)], 1)))


def dice(scores, marks):
    shares = scores.softmax(1)
    wanted = F.one_hot(marks, 4).movedim(-1, 1)
    return 1 - 2 * (shares * wanted).sum() / (shares.sum() + wanted.sum())


def train(model, loader, optimizer, most):
    done, until = 0, time.time() + 240
    while True:
        for images, marks in loader:
            images, marks = images.to(device, non_blocking=True), marks.to(device, non_blocking=True)
            images = images.float().div_(255)
            if on_gpu:
                images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                scores = model(images)
            loss = F.cross_entropy(scores.float(), marks) + dice(scores.float(), marks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            done += 1
            if done % 100 == 0:
                print(done, f"{loss.item():.3f}", flush=True)
            if done >= most or time.time() > until:
                return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int, nargs="?", default=10**9)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = UNet().to(device)
    if on_gpu:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    loader = DataLoader(
        Streets(),
        batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=on_gpu,
        persistent_workers=True,
        drop_last=True,
    )
    train(model, loader, optimizer, parser.parse_args().steps)


if __name__ == "__main__":
    main()
