"""Segmentation of volumes: a 3-D U-Net with InstanceNorm and LeakyReLU, patches cut from synthetic scans, Dice and cross-entropy.

Full size on a GPU:  python unet3d.py
Quick on a CPU:      python unet3d.py --epochs 1 --scans 2 --steps 40 --batch-size 1 --patch 16 --width 4
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--steps", type=int, default=100, help="in an epoch")
parser.add_argument("--scans", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--patch", type=int, default=96)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--classes", type=int, default=3)


class Block(nn.Module):
    def __init__(self, c_in, c_out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv3d(c_in, c_out, 3, stride, 1)
        self.norm1 = nn.InstanceNorm3d(c_out, affine=True)
        self.conv2 = nn.Conv3d(c_out, c_out, 3, 1, 1)
        self.norm2 = nn.InstanceNorm3d(c_out, affine=True)
        self.act = nn.LeakyReLU(0.01, inplace=True)

    def forward(self, x):
        x = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(x)))


class UNet3d(nn.Module):
    def __init__(self, width, classes, levels=4):
        super().__init__()
        widths = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(
            Block(c_in, c, 1 if i == 0 else 2) for i, (c_in, c) in enumerate(zip([1, *widths], widths, strict=False))
        )
        self.up = nn.ModuleList(nn.ConvTranspose3d(c * 2, c, 2, 2) for c in widths[-2::-1])
        self.merge = nn.ModuleList(Block(c * 2, c) for c in widths[-2::-1])
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=False):
            x = merge(torch.cat((skip, up(x)), 1))
        return self.head(x)


def dice(logits, target):
    p = logits.softmax(1)
    t = F.one_hot(target, logits.shape[1]).permute(0, 4, 1, 2, 3)
    overlap = (p * t).sum((2, 3, 4))
    return 1 - ((2 * overlap + 1) / (p.sum((2, 3, 4)) + t.sum((2, 3, 4)) + 1)).mean()


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side = args.patch + 16
    coarse = torch.randn(args.scans, 1, 6, 6, 6)
    scans = F.interpolate(coarse, size=(side,) * 3, mode="trilinear")
    labels = (scans[:, 0] > 0.5).long() + (scans[:, 0] > 1.0).long()
    scans = scans + 0.3 * torch.randn_like(scans)
    model = UNet3d(args.width, args.classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: (1 - e / args.epochs) ** 0.9)
    for epoch in range(args.epochs):
        total = 0.0
        for _ in range(args.steps):
            chosen = torch.randint(0, args.scans, (args.batch_size,)).tolist()
            corners = torch.randint(0, side - args.patch + 1, (args.batch_size, 3)).tolist()
            cut = [tuple(slice(c, c + args.patch) for c in corner) for corner in corners]
            x = torch.stack([scans[(i, slice(None), *at)] for i, at in zip(chosen, cut, strict=False)]).to(device)
            y = torch.stack([labels[(i, *at)] for i, at in zip(chosen, cut, strict=False)]).to(device)
            logits = model(x)
            loss = F.cross_entropy(logits, y) + dice(logits, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 12)
            optimizer.step()
            total += loss.item()
        schedule.step()
        print(f"epoch {epoch}: loss {total / args.steps:.3f}")


if __name__ == "__main__":
    main()
