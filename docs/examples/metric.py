"""Metric learning: an embedding behind PReLUs, a margin softmax over very many classes, fp16 autocast inside the forward, GradScaler.

Full size on a GPU:  python metric.py
Quick on a CPU:      python metric.py --steps 40 --batch-size 8 --image-size 32 --width 8 --classes 500
"""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--image-size", type=int, default=112)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--classes", type=int, default=93431)


class Block(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(c_in), nn.Conv2d(c_in, c_out, 3, 1, 1, bias=False)
        self.bn2, self.act = nn.BatchNorm2d(c_out), nn.PReLU(c_out)
        self.conv2, self.bn3 = nn.Conv2d(c_out, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
        self.skip = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x):
        out = self.bn3(self.conv2(self.act(self.bn2(self.conv1(self.bn1(x))))))
        return out + self.skip(x)


class Embedding(nn.Module):
    def __init__(self, c, size, out=512):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c), nn.PReLU(c))
        self.blocks = nn.Sequential(*(Block(a, b, 2) for a, b in ((c, c), (c, 2 * c), (2 * c, 4 * c), (4 * c, 8 * c))))
        self.fc = nn.Linear(8 * c * math.ceil(size / 16) ** 2, out)
        self.norm = nn.BatchNorm1d(out)

    def forward(self, x):
        with torch.autocast(x.device.type, torch.float16 if x.is_cuda else torch.bfloat16):
            x = self.blocks(self.stem(x)).flatten(1)
        return self.norm(self.fc(x.float()))


class Margin(nn.Module):
    """The cosine to the right class has an angle added before the softmax."""

    def __init__(self, out, classes, scale=64.0, margin=0.5):
        super().__init__()
        self.weight, self.scale, self.margin = nn.Parameter(0.01 * torch.randn(classes, out)), scale, margin

    def forward(self, x, y):
        with torch.autocast(x.device.type, torch.float16 if x.is_cuda else torch.bfloat16):
            cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        cosine = cosine.float().clamp(-1, 1)
        rows = torch.where(y >= 0)[0]
        angle = cosine[rows, y[rows]].detach().arccos() + self.margin
        target = torch.cos(angle) - cosine[rows, y[rows]].detach()
        cosine = cosine.index_put((rows, y[rows]), cosine[rows, y[rows]] + target)
        return F.cross_entropy(self.scale * cosine, y)


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = F.interpolate(torch.rand(512, 3, 8, 8), size=(args.image_size,) * 2, mode="bilinear")
    model, head = Embedding(args.width, args.image_size).to(device), Margin(512, args.classes).to(device)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.02, momentum=0.9, weight_decay=5e-4)
    scaler = torch.amp.GradScaler(device.type, growth_interval=100, enabled=device.type == "cuda")
    for step in range(args.steps):
        chosen = torch.randint(0, 512, (args.batch_size,))
        x, y = images[chosen].to(device), (chosen % args.classes).to(device)
        loss = head(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
