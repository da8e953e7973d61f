"""A CIFAR speed run: the whole net in half precision and channels_last, data on the device, 2x2 first convolution, GELU, SGD with
Nesterov, label smoothing, a triangular schedule.

Full size on a GPU:  python speedrun.py
Quick on a CPU:      python speedrun.py --epochs 4 --train-size 640 --batch-size 64 --width 16
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--train-size", type=int, default=50000)
parser.add_argument("--batch-size", type=int, default=1024)
parser.add_argument("--width", type=int, default=64)


class Group(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
            nn.Conv2d(c_out, c_out, 3, padding=1, bias=False),
        )
        self.pool, self.act = nn.MaxPool2d(2), nn.GELU()
        self.norm1, self.norm2 = nn.BatchNorm2d(c_out, momentum=0.4), nn.BatchNorm2d(c_out, momentum=0.4)
        for norm in (self.norm1, self.norm2):
            norm.weight.requires_grad = False

    def forward(self, x):
        x = self.act(self.norm1(self.pool(self.conv1(x))))
        return self.act(self.norm2(self.conv2(x)))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2, bias=True)
        self.groups = nn.Sequential(Group(24, c), Group(c, 4 * c), Group(4 * c, 4 * c))
        self.head = nn.Linear(4 * c, 10, bias=False)

    def forward(self, x):
        x = self.groups(F.gelu(self.whiten(x)))
        return self.head(x.amax((2, 3))) / 9


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    dtype = torch.half if device.type == "cuda" else torch.bfloat16
    labels = torch.randint(0, 10, (args.train_size,), device=device)
    faces = F.interpolate(torch.randn(10, 3, 4, 4, device=device), size=32, mode="bilinear")
    images = torch.empty(args.train_size, 3, 32, 32, device=device, dtype=dtype)
    for part in torch.arange(args.train_size, device=device).split(10000):
        images[part] = (faces[labels[part]] + 0.5 * torch.randn(len(part), 3, 32, 32, device=device)).to(dtype)
    images = images.contiguous(memory_format=torch.channels_last)
    model = Net(args.width).to(device, dtype).to(memory_format=torch.channels_last)
    trained = [p for p in model.parameters() if p.requires_grad]
    steps = args.epochs * (args.train_size // args.batch_size)
    optimizer = torch.optim.SGD(trained, lr=0.2, momentum=0.85, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(5 * (i + 1) / steps, 1.25 * (1 - i / steps) + 1e-3)
    )
    for epoch in range(args.epochs):
        for chosen in torch.randperm(args.train_size, device=device).split(args.batch_size)[
            : args.train_size // args.batch_size
        ]:
            x, y = images[chosen], labels[chosen]
            if torch.rand(()) < 0.5:
                x = x.flip(-1)
            loss = F.cross_entropy(model(x), y, label_smoothing=0.2)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
