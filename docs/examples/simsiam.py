"""SimSiam: one encoder called on two views of each image, a predictor, no gradient through the targets, cosine schedule.

Full size on a GPU:  python simsiam.py
Quick on a CPU:      python simsiam.py --epochs 1 --train-size 320 --batch-size 8 --image-size 32 --width 8 --workers 0
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--train-size", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--workers", type=int, default=4)


class Views(Dataset):
    """Two crops of an image, mirrored and tinted by chance."""

    def __init__(self, count, size):
        self.count, self.size = count, size
        self.images = F.interpolate(torch.rand(64, 3, 8, 8), size=(2 * size,) * 2, mode="bilinear")

    def __len__(self):
        return self.count

    def view(self, image):
        y, x = torch.randint(0, self.size, (2,)).tolist()
        crop = image[:, y : y + self.size, x : x + self.size]
        crop = crop.flip(2) if torch.rand(()) < 0.5 else crop
        return (crop * (0.6 + 0.8 * torch.rand(3, 1, 1)) - 0.5) / 0.25

    def __getitem__(self, index):
        image = self.images[index % 64]
        return self.view(image), self.view(image)


class Basic(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
        self.conv2, self.bn2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out)
        self.skip = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.skip(x))


class SimSiam(nn.Module):
    def __init__(self, c, out=256):
        super().__init__()
        blocks = [Basic(a, b, s) for a, b, s in ((c, c, 1), (c, 2 * c, 2), (2 * c, 4 * c, 2), (4 * c, 8 * c, 2))]
        self.encoder = nn.Sequential(
            nn.Conv2d(3, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c), nn.ReLU(True), *blocks,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8 * c, out, bias=False), nn.BatchNorm1d(out), nn.ReLU(True),
            nn.Linear(out, out, bias=False), nn.BatchNorm1d(out, affine=False),
        )  # fmt: skip
        self.predictor = nn.Sequential(
            nn.Linear(out, out // 4, bias=False), nn.BatchNorm1d(out // 4), nn.ReLU(True), nn.Linear(out // 4, out)
        )

    def forward(self, a, b):
        za, zb = self.encoder(a), self.encoder(b)
        return self.predictor(za), self.predictor(zb), za.detach(), zb.detach()


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        Views(args.train_size, args.image_size), args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers,
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    model = SimSiam(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        for step, (a, b) in enumerate(loader):
            a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
            pa, pb, za, zb = model(a, b)
            loss = 1 - 0.5 * (F.cosine_similarity(pa, zb).mean() + F.cosine_similarity(pb, za).mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.4f}")
        schedule.step()


if __name__ == "__main__":
    main()
