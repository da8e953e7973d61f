"""A loader-bound training: JPEG files decoded, cropped, jittered and normalised in Python by two workers, a small net behind them.

Full size on a GPU:  python jpegs.py
Quick on a CPU:      python jpegs.py --epochs 1 --train-size 320 --batch-size 8 --image-size 64 --width 8 --workers 0
"""

import argparse
import io
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--train-size", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--workers", type=int, default=2)


class Photos(Dataset):
    """Files as a disk would give them, one class a tint."""

    def __init__(self, count, size):
        self.count, self.size, self.files = count, size, []
        for label in range(16):
            noise = torch.rand(3, 12, 16) * 0.6 + 0.4 * torch.rand(3, 1, 1)
            large = F.interpolate(noise[None], size=(375, 500), mode="bilinear")[0]
            photo = Image.fromarray((255 * large).byte().permute(1, 2, 0).numpy())
            file = io.BytesIO()
            photo.save(file, "JPEG", quality=90)
            self.files.append((file.getvalue(), label))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        file, label = self.files[index % len(self.files)]
        photo = Image.open(io.BytesIO(file)).convert("RGB")
        side = random.randint(200, 370)
        x, y = random.randint(0, photo.width - side), random.randint(0, photo.height - side)
        photo = photo.crop((x, y, x + side, y + side)).resize((self.size, self.size), Image.BILINEAR)
        if random.random() < 0.5:
            photo = photo.transpose(Image.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8).view(self.size, self.size, 3)
        x = pixels.permute(2, 0, 1).float() / 255 * random.uniform(0.7, 1.3)
        return (x - 0.45) / 0.22, label


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        Photos(args.train_size, args.image_size),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        drop_last=True,
    )
    layers, c = [], 3
    for width in (args.width, 2 * args.width, 4 * args.width, 8 * args.width):
        layers += [nn.Conv2d(c, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        c = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 16)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        right = seen = 0
        for step, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (logits.argmax(1) == y).sum().item()
            seen += len(y)
            if step % 20 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}, {100 * right / seen:.0f} % right")


if __name__ == "__main__":
    main()
