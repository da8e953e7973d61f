"""Classification of signals: a 1-D ResNet with dropout, batch norm and padded kernels of 17, on synthetic heart beats.

Full size on a GPU:  python ecg.py
Quick on a CPU:      python ecg.py --epochs 1 --train-size 640 --batch-size 16 --length 512 --width 8
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--train-size", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--length", type=int, default=4096)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--dropout", type=float, default=0.5)


class Residual(nn.Module):
    def __init__(self, c_in, c_out, dropout):
        super().__init__()
        self.conv1 = nn.Conv1d(c_in, c_out, 17, padding=8, bias=False)
        self.bn1 = nn.BatchNorm1d(c_out)
        self.conv2 = nn.Conv1d(c_out, c_out, 17, stride=4, padding=8, bias=False)
        self.bn2 = nn.BatchNorm1d(c_out)
        self.skip = nn.Sequential(nn.MaxPool1d(4), nn.Conv1d(c_in, c_out, 1, bias=False))
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x):
        out = self.drop1(F.relu(self.bn1(self.conv1(x))))
        return self.drop2(F.relu(self.bn2(self.conv2(out) + self.skip(x))))


class ResNet1d(nn.Module):
    def __init__(self, width, length, dropout, leads=12, classes=6):
        super().__init__()
        widths = [width, width * 2, width * 3, width * 4]
        self.stem = nn.Sequential(nn.Conv1d(leads, width, 17, padding=8, bias=False), nn.BatchNorm1d(width), nn.ReLU())
        self.blocks = nn.Sequential(*(Residual(a, b, dropout) for a, b in zip([width, *widths], widths, strict=False)))
        self.fc = nn.Linear(widths[-1] * (length // 256), classes)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).flatten(1))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    time = torch.linspace(0, 10, args.length)
    rates = torch.rand(256, 1, 1) * 2 + 0.5
    beats = torch.exp(-40 * torch.sin(3.14 * rates * time) ** 2) + 0.1 * torch.randn(256, 12, args.length)
    labels = (torch.cat([rates[:, 0]] * 6, 1) > torch.linspace(0.7, 2.2, 6)).float()
    chosen = torch.randint(0, 256, (args.train_size,))
    loader = DataLoader(TensorDataset(chosen), args.batch_size, shuffle=True)
    model = ResNet1d(args.width, args.length, args.dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        model.train()
        total, seen = 0.0, 0
        for (index,) in loader:
            x, y = beats[index].to(device), labels[index].to(device)
            model.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach().cpu().numpy() * len(x)
            seen += len(x)
        print(f"epoch {epoch}: loss {total / seen:.4f}")


if __name__ == "__main__":
    main()
