"""Super-resolution: residual dense blocks without norms, pixel shuffle, L1, Adam, an average of the weights that validation uses.

Full size on a GPU:  python superres.py
As EDSR has blocks:  python superres.py --residual --width 256 --blocks 32 --patch 48
Quick on a CPU:      python superres.py --steps 40 --batch-size 2 --patch 16 --width 8 --blocks 1
"""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--patch", type=int, default=64, help="of the small image")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--blocks", type=int, default=16)
parser.add_argument("--residual", action="store_true", help="blocks of two convolutions, in place of dense ones")


class Dense(nn.Module):
    def __init__(self, c, growth):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c + i * growth, growth, 3, 1, 1) for i in range(4))
        self.last = nn.Conv2d(c + 4 * growth, c, 3, 1, 1)
        self.act = nn.LeakyReLU(0.2, True)

    def forward(self, x):
        found = [x]
        for conv in self.convs:
            found.append(self.act(conv(torch.cat(found, 1))))
        return x + 0.2 * self.last(torch.cat(found, 1))


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.ReLU(True), nn.Conv2d(c, c, 3, 1, 1))

    def forward(self, x):
        return x + 0.1 * self.body(x)


class Upscaler(nn.Module):
    def __init__(self, c, blocks, residual):
        super().__init__()
        self.first = nn.Conv2d(3, c, 3, 1, 1)
        body = (Residual(c) if residual else Dense(c, c // 2) for _ in range(blocks))
        self.body = nn.Sequential(*body, nn.Conv2d(c, c, 3, 1, 1))
        self.up = nn.Sequential(
            nn.Conv2d(c, 4 * c, 3, 1, 1), nn.PixelShuffle(2), nn.PReLU(c),
            nn.Conv2d(c, 4 * c, 3, 1, 1), nn.PixelShuffle(2), nn.PReLU(c),
        )  # fmt: skip
        self.last = nn.Conv2d(c, 3, 3, 1, 1)

    def forward(self, x):
        first = self.first(x)
        return self.last(self.up(first + self.body(first)))


@torch.no_grad()
def follow(average, model, decay=0.999):
    for old, new in zip(average.parameters(), model.parameters(), strict=False):
        old.mul_(decay).add_(new, alpha=1 - decay)


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large = F.interpolate(torch.rand(64, 3, 12, 12), size=(8 * args.patch,) * 2, mode="bicubic").clamp(0, 1)
    model = Upscaler(args.width, args.blocks, args.residual).to(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [args.steps // 2], gamma=0.5)
    for step in range(args.steps):
        side = 4 * args.patch
        corners = torch.randint(0, 4 * args.patch + 1, (args.batch_size, 2)).tolist()
        chosen = torch.randint(0, 64, (args.batch_size,)).tolist()
        target = torch.stack(
            [large[i, :, y : y + side, x : x + side] for i, (y, x) in zip(chosen, corners, strict=False)]
        ).to(device)
        small = F.interpolate(target, scale_factor=0.25, mode="bicubic", antialias=True)
        optimizer.zero_grad()
        loss = F.l1_loss(model(small), target)
        loss.backward()
        optimizer.step()
        schedule.step()
        follow(average, model)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        if step % 500 == 499:
            average.eval()
            with torch.no_grad():
                error = F.mse_loss(average(small), target)
            print(f"PSNR {-10 * error.log10().item():.2f} dB")


if __name__ == "__main__":
    main()
