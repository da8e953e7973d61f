"""AlexNet for 32x32 images: five convolutions, the two wide linear layers that hold nearly all of its weights, and Adam.

Full size on a GPU:  python alexnet.py
Quick on a CPU:      python alexnet.py --width 16 --hidden 1024 --batch-size 32 --epochs 1 --train-size 1280 --test-size 256
"""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class AlexNet(nn.Module):
    def __init__(self, width, hidden, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(width, 3 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(3 * width, 6 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(4 * width * 2 * 2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x):
        x = self.features(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


def synthetic(size, seed):
    """Ten fixed prototypes under noise: learnable, and the same in every run."""
    prototypes = torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    prototypes = nn.functional.interpolate(prototypes, scale_factor=4)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (size,), generator=generator)
    return TensorDataset(prototypes[labels] + 0.3 * torch.randn(size, 3, 32, 32, generator=generator) - 0.5, labels)


def accuracy(model, loader, device):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(1) == labels).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution")
    parser.add_argument("--hidden", type=int, default=4096, help="units of the linear layers")
    parser.add_argument("--train-size", type=int, default=50000)
    parser.add_argument("--test-size", type=int, default=10000)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(synthetic(args.train_size, seed=2), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(synthetic(args.test_size, seed=3), batch_size=args.batch_size)

    model = AlexNet(args.width, args.hidden).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        model.train()
        for step, (images, labels) in enumerate(train_loader):
            images, labels = images.to(device), labels.to(device)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"epoch {epoch + 1} step {step}: loss {loss.item():.4f}", flush=True)
        print(f"epoch {epoch + 1}: accuracy {accuracy(model, test_loader, device):.3f}", flush=True)


if __name__ == "__main__":
    main()
