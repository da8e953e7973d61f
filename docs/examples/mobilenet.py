"""MobileNetV2-style training: inverted residuals, ReLU6, label smoothing, Nesterov SGD, EMA of the weights.

Full size on a GPU:  python mobilenet.py
Quick on a CPU:      python mobilenet.py --epochs 1 --train-size 128 --batch-size 16 --image-size 64 --width-mult 0.35
"""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def conv_bn_relu6(inp, oup, kernel=3, stride=1, groups=1):
    return nn.Sequential(
        nn.Conv2d(inp, oup, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(oup),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    def __init__(self, inp, oup, stride, expand_ratio):
        super().__init__()
        hidden_dim = round(inp * expand_ratio)
        self.use_res_connect = stride == 1 and inp == oup

        layers = []
        if expand_ratio != 1:
            layers.append(conv_bn_relu6(inp, hidden_dim, kernel=1))
        layers += [
            conv_bn_relu6(hidden_dim, hidden_dim, stride=stride, groups=hidden_dim),
            nn.Conv2d(hidden_dim, oup, 1, 1, 0, bias=False),
            nn.BatchNorm2d(oup),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x):
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    # Sandler et al., "MobileNetV2", 2018, table 2: expansion, channels, repeats, stride
    settings = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, num_classes=100, width_mult=1.0):
        super().__init__()

        def channels(value):
            return max(8, int(value * width_mult + 4) // 8 * 8)

        inp = channels(32)
        features = [conv_bn_relu6(3, inp, stride=2)]
        for t, c, n, s in self.settings:
            for i in range(n):
                features.append(InvertedResidual(inp, channels(c), s if i == 0 else 1, t))
                inp = channels(c)
        last = max(1280, channels(1280))
        features.append(conv_bn_relu6(inp, last, kernel=1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, num_classes))

    def forward(self, x):
        x = self.features(x)
        x = x.mean([2, 3])
        return self.classifier(x)


class ModelEma:
    """A moving average of the weights, for evaluation."""

    def __init__(self, model, decay=0.999):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if ema_v.dtype.is_floating_point:
                ema_v.mul_(self.decay).add_(model_v, alpha=1.0 - self.decay)
            else:
                ema_v.copy_(model_v)


class SyntheticImages(Dataset):
    def __init__(self, size, image_size, num_classes):
        self.size, self.image_size, self.num_classes = size, image_size, num_classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % self.num_classes
        return torch.randn(3, self.image_size, self.image_size, generator=generator) + label / self.num_classes, label


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--width-mult", type=float, default=1.0)
    parser.add_argument("--num-classes", type=int, default=100)
    parser.add_argument("--train-size", type=int, default=50000)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(
        SyntheticImages(args.train_size, args.image_size, args.num_classes),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers if device == "cuda" else 0,
        pin_memory=device == "cuda",
        drop_last=True,
    )

    model = MobileNetV2(args.num_classes, args.width_mult).to(device)
    ema = ModelEma(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=4e-5, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * max(len(loader), 1))

    for epoch in range(args.epochs):
        model.train()
        for i, (images, target) in enumerate(loader):
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update(model)
            if i % 20 == 0:
                print(f"epoch {epoch} step {i}/{len(loader)} loss {loss.item():.4f}", flush=True)
        torch.save({"model": model.state_dict(), "ema": ema.module.state_dict()}, "mobilenet.pth")


if __name__ == "__main__":
    main()
