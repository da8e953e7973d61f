"""One-stage detection on a feature pyramid: frozen batch norms in the trunk, GroupNorm in heads shared by levels, focal loss, GIoU.

Full size on a GPU:  python retina.py
Quick on a CPU:      python retina.py --steps 40 --batch-size 1 --image-size 64 --width 8
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--image-size", type=int, default=512)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--classes", type=int, default=20)
STRIDES = (8, 16, 32)


class FrozenNorm(nn.Module):
    """A batch norm whose statistics and weights stay as they are."""

    def __init__(self, c):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("mean", 0.0), ("var", 1.0)):
            self.register_buffer(name, torch.full((c,), value))

    def forward(self, x):
        scale = self.weight * (self.var + 1e-5).rsqrt()
        return x * scale.view(1, -1, 1, 1) + (self.bias - self.mean * scale).view(1, -1, 1, 1)


class Bottleneck(nn.Module):
    def __init__(self, c_in, c, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c_in, c, 1, bias=False), FrozenNorm(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, stride, 1, bias=False), FrozenNorm(c)
        self.conv3, self.bn3 = nn.Conv2d(c, 4 * c, 1, bias=False), FrozenNorm(4 * c)
        self.skip = nn.Sequential(nn.Conv2d(c_in, 4 * c, 1, stride, bias=False), FrozenNorm(4 * c))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.skip(x))


class Head(nn.Module):
    def __init__(self, c, out):
        super().__init__()
        groups = min(32, c // 4)
        layers = [nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.GroupNorm(groups, c), nn.ReLU(True)) for _ in range(4)]
        self.body, self.last = nn.Sequential(*layers), nn.Conv2d(c, out, 3, 1, 1)

    def forward(self, x):
        return self.last(self.body(x))


class Detector(nn.Module):
    def __init__(self, c, classes):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, c, 7, 2, 3, bias=False), FrozenNorm(c), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.ModuleList(
            [
                Bottleneck(c, c, 1),
                Bottleneck(4 * c, 2 * c, 2),
                Bottleneck(8 * c, 4 * c, 2),
                Bottleneck(16 * c, 8 * c, 2),
            ]
        )
        pyramid = 4 * c
        self.lateral = nn.ModuleList(nn.Conv2d(n * c, pyramid, 1) for n in (8, 16, 32))
        self.smooth = nn.ModuleList(nn.Conv2d(pyramid, pyramid, 3, 1, 1) for _ in STRIDES)
        self.classify, self.place = Head(pyramid, classes), Head(pyramid, 4)
        nn.init.constant_(self.classify.last.bias, -4.6)

    def forward(self, x):
        x, features = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        levels = [lateral(f) for lateral, f in zip(self.lateral, features[1:], strict=True)]
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], scale_factor=2, mode="nearest")
        levels = [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]
        return [
            (self.classify(level), F.softplus(self.place(level)) * s) for level, s in zip(levels, STRIDES, strict=True)
        ]


def focal(logits, target):
    p, cost = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    right = p * target + (1 - p) * (1 - target)
    return ((0.25 * target + 0.75 * (1 - target)) * (1 - right) ** 2 * cost).sum()


def giou(a, b):
    """Of boxes by their distances to the left, top, right and bottom."""
    inner = (torch.min(a[:, 0], b[:, 0]) + torch.min(a[:, 2], b[:, 2])) * (
        torch.min(a[:, 1], b[:, 1]) + torch.min(a[:, 3], b[:, 3])
    )
    outer = (torch.max(a[:, 0], b[:, 0]) + torch.max(a[:, 2], b[:, 2])) * (
        torch.max(a[:, 1], b[:, 1]) + torch.max(a[:, 3], b[:, 3])
    )
    union = (a[:, 0] + a[:, 2]) * (a[:, 1] + a[:, 3]) + (b[:, 0] + b[:, 2]) * (b[:, 1] + b[:, 3]) - inner
    return inner / union - (outer - union) / outer


def scene(args, device):
    """Images with one coloured box each, its class and its corners."""
    size, n = args.image_size, args.batch_size
    images = torch.rand(n, 3, size, size, device=device) * 0.3
    kinds = torch.randint(0, args.classes, (n,)).tolist()
    boxes = []
    for i, kind in enumerate(kinds):
        w, h = torch.randint(size // 4, size // 2, (2,)).tolist()
        x, y = (int(torch.randint(0, size - side, ())) for side in (w, h))
        images[i, kind % 3, y : y + h, x : x + w] += 0.3 + 0.4 * kind / args.classes
        boxes.append((x, y, x + w, y + h))
    return images, kinds, torch.tensor(boxes, dtype=torch.float32, device=device)


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Detector(args.width, args.classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for step in range(args.steps):
        images, kinds, boxes = scene(args, device)
        loss_class, loss_box, found = 0.0, 0.0, 0
        for (logits, sides), stride in zip(model(images), STRIDES, strict=True):
            h, w = logits.shape[2:]
            y, x = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
            x, y = (x + 0.5) * stride, (y + 0.5) * stride
            truth = torch.stack(
                [
                    x - boxes[:, 0, None, None],
                    y - boxes[:, 1, None, None],
                    boxes[:, 2, None, None] - x,
                    boxes[:, 3, None, None] - y,
                ],
                1,
            )
            inside = truth.amin(1) > 0
            target = torch.zeros_like(logits)
            for i, kind in enumerate(kinds):
                target[i, kind] = inside[i].float()
            loss_class = loss_class + focal(logits, target)
            chosen = inside.nonzero(as_tuple=True)
            loss_box = loss_box + (1 - giou(sides.permute(0, 2, 3, 1)[chosen], truth.permute(0, 2, 3, 1)[chosen])).sum()
            found += len(chosen[0])
        loss = (loss_class + loss_box) / max(found, 1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
