"""A one-stage detector in the style of YOLO: Darknet blocks with LeakyReLU, three heads, images of another size every ten batches.

Full size on a GPU:  python detector.py
Quick on a CPU:      python detector.py --epochs 1 --train-size 64 --batch-size 4 --image-size 96 --width 0.125 --workers 0
"""

import argparse
import math
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class ConvBnLeaky(nn.Sequential):
    def __init__(self, c1, c2, kernel=3, stride=1):
        super().__init__(
            nn.Conv2d(c1, c2, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(c2),
            nn.LeakyReLU(0.1, inplace=True),
        )


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.reduce = ConvBnLeaky(channels, channels // 2, 1)
        self.expand = ConvBnLeaky(channels // 2, channels)

    def forward(self, x):
        return x + self.expand(self.reduce(x))


class Detector(nn.Module):
    """Predicts, a cell and head, where a box's centre lies in it, its size, whether there is one, and of which class."""

    strides = (8, 16, 32)

    def __init__(self, num_classes=20, width=1.0):
        super().__init__()
        c = [max(8, int(64 * 2**i * width) // 8 * 8) for i in range(5)]
        out = 5 + num_classes
        self.stem = nn.Sequential(
            ConvBnLeaky(3, c[0] // 2),
            ConvBnLeaky(c[0] // 2, c[0], stride=2),
            Residual(c[0]),
            ConvBnLeaky(c[0], c[1], stride=2),
            *(Residual(c[1]) for _ in range(2)),
        )
        self.stage3 = nn.Sequential(ConvBnLeaky(c[1], c[2], stride=2), *(Residual(c[2]) for _ in range(4)))
        self.stage4 = nn.Sequential(ConvBnLeaky(c[2], c[3], stride=2), *(Residual(c[3]) for _ in range(4)))
        self.stage5 = nn.Sequential(ConvBnLeaky(c[3], c[4], stride=2), *(Residual(c[4]) for _ in range(2)))
        self.neck5 = nn.Sequential(ConvBnLeaky(c[4], c[3], 1), ConvBnLeaky(c[3], c[3]))
        self.up5 = nn.Sequential(ConvBnLeaky(c[3], c[2], 1), nn.Upsample(scale_factor=2))
        self.neck4 = nn.Sequential(ConvBnLeaky(c[2] + c[3], c[2], 1), ConvBnLeaky(c[2], c[2]))
        self.up4 = nn.Sequential(ConvBnLeaky(c[2], c[1], 1), nn.Upsample(scale_factor=2))
        self.neck3 = nn.Sequential(ConvBnLeaky(c[1] + c[2], c[1], 1), ConvBnLeaky(c[1], c[1]))
        self.heads = nn.ModuleList(nn.Conv2d(channels, out, 1) for channels in c[1:4])
        for head in self.heads:
            nn.init.constant_(head.bias, -2.0)

    def forward(self, x):
        p3 = self.stage3(self.stem(x))
        p4 = self.stage4(p3)
        n5 = self.neck5(self.stage5(p4))
        n4 = self.neck4(torch.cat([self.up5(n5), p4], 1))
        n3 = self.neck3(torch.cat([self.up4(n4), p3], 1))
        return [head(n).permute(0, 2, 3, 1) for head, n in zip(self.heads, (n3, n4, n5), strict=True)]


class Rectangles(Dataset):
    """Noise with up to five bright rectangles, as rows of (class, centre x, centre y, width, height), all from 0 to 1."""

    def __init__(self, size, image_size, num_classes):
        self.size, self.image_size, self.num_classes = size, image_size, num_classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        image = 0.2 * torch.rand(3, self.image_size, self.image_size, generator=g)
        count = int(torch.randint(1, 6, (), generator=g))
        classes = torch.randint(0, self.num_classes, (count, 1), generator=g)
        wh = 0.05 + 0.35 * torch.rand(count, 2, generator=g)
        xy = wh / 2 + (1 - wh) * torch.rand(count, 2, generator=g)
        for label, (x1, y1), (x2, y2) in zip(classes, xy - wh / 2, xy + wh / 2, strict=True):
            rows = slice(int(y1 * self.image_size), math.ceil(y2 * self.image_size))
            columns = slice(int(x1 * self.image_size), math.ceil(x2 * self.image_size))
            image[int(label) % 3, rows, columns] = 0.5 + 0.5 * int(label) / self.num_classes
        return image, torch.cat([classes.float(), xy, wh], 1)


def collate(batch):
    """Images stacked; boxes in one tensor, the image's number in front."""
    images, boxes = zip(*batch, strict=True)
    numbered = [torch.cat([torch.full((len(b), 1), float(i)), b], 1) for i, b in enumerate(boxes)]
    return torch.stack(images), torch.cat(numbered)


def detection_loss(outputs, boxes):
    total = 0.0
    for level, out in enumerate(outputs):
        rows, columns = out.shape[1:3]
        longest = boxes[:, 4:].amax(1)
        mine = boxes[(longest >= 0.15 * level) & ((longest < 0.15 * (level + 1)) | (level == 2))]
        image, label = mine[:, 0].long(), mine[:, 1].long()
        x, y = mine[:, 2] * columns, mine[:, 3] * rows
        i, j = x.long().clamp(0, columns - 1), y.long().clamp(0, rows - 1)
        there = torch.zeros_like(out[..., 4])
        there[image, j, i] = 1.0
        total = total + F.binary_cross_entropy_with_logits(out[..., 4], there)
        if len(mine):
            found = out[image, j, i]
            total = total + F.mse_loss(found[:, :2].sigmoid(), torch.stack([x - i, y - j], 1))
            total = total + F.mse_loss(found[:, 2:4].sigmoid(), mine[:, 4:])
            total = total + F.binary_cross_entropy_with_logits(
                found[:, 5:], F.one_hot(label, out.shape[-1] - 5).float()
            )
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--image-size", type=int, default=320)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--num-classes", type=int, default=20)
    parser.add_argument("--train-size", type=int, default=16000)
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        Rectangles(args.train_size, args.image_size, args.num_classes),
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
        collate_fn=collate,
    )
    model = Detector(args.num_classes, args.width).to(device)
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": 5e-4}, {"params": others}], lr=args.lr, momentum=0.937, nesterov=True
    )
    total = args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / total))
    )

    for epoch in range(args.epochs):
        model.train()
        running = torch.zeros((), device=device)
        for step, (images, boxes) in enumerate(loader):
            images, boxes = images.to(device, non_blocking=True), boxes.to(device, non_blocking=True)
            if step % 10 == 0:
                size = args.image_size + 32 * random.randint(-2, 2)
            if size != args.image_size:
                images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
            loss = detection_loss(model(images), boxes)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            scheduler.step()
            running += loss.detach()
            if step % 20 == 0:
                mean = running.item() / (step + 1)
                print(f"epoch {epoch} {step}/{len(loader)} size {size} loss {mean:.4f}", flush=True)
        torch.save(model.state_dict(), "detector.pt")


if __name__ == "__main__":
    main()
