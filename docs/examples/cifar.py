"""ResNet-18 on CIFAR-sized images, with CPU augmentation, DataParallel and a checkpoint of the best epoch.

The images are synthetic (made once, 32x32 uint8), so nothing is downloaded.

Full size on a GPU:       python cifar.py
Quick on a CPU:           python cifar.py --width 16 --batch-size 64 --epochs 1 --train-size 1280 --test-size 256
On-GPU synthetic data:    python cifar.py --device-data
"""

# ruff: noqa: RET504  the forwards are written line by line, as people write them

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != self.expansion * planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, self.expansion * planes, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(self.expansion * planes),
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class ResNet(nn.Module):
    def __init__(self, block, num_blocks, width=64, num_classes=10):
        super().__init__()
        self.in_planes = width
        self.conv1 = nn.Conv2d(3, width, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._make_layer(block, width, num_blocks[0], stride=1)
        self.layer2 = self._make_layer(block, width * 2, num_blocks[1], stride=2)
        self.layer3 = self._make_layer(block, width * 4, num_blocks[2], stride=2)
        self.layer4 = self._make_layer(block, width * 8, num_blocks[3], stride=2)
        self.linear = nn.Linear(width * 8 * block.expansion, num_classes)

    def _make_layer(self, block, planes, num_blocks, stride):
        strides = [stride] + [1] * (num_blocks - 1)
        layers = []
        for stride in strides:
            layers.append(block(self.in_planes, planes, stride))
            self.in_planes = planes * block.expansion
        return nn.Sequential(*layers)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer1(out)
        out = self.layer2(out)
        out = self.layer3(out)
        out = self.layer4(out)
        out = F.avg_pool2d(out, 4)
        out = out.view(out.size(0), -1)
        out = self.linear(out)
        return out


def ResNet18(width=64):
    return ResNet(BasicBlock, [2, 2, 2, 2], width)


MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2023, 0.1994, 0.2010]).view(3, 1, 1)


class SyntheticCIFAR(Dataset):
    """uint8 images around ten class prototypes; training samples get a random crop and a random flip."""

    def __init__(self, size, train, seed):
        generator = torch.Generator().manual_seed(0)
        prototypes = F.interpolate(torch.rand(10, 3, 8, 8, generator=generator), scale_factor=4)
        generator.manual_seed(seed)
        self.targets = torch.randint(0, 10, (size,), generator=generator)
        noise = torch.randint(0, 192, (size, 3, 32, 32), generator=generator, dtype=torch.uint8)
        self.data = (prototypes * 63).to(torch.uint8)[self.targets] + noise
        self.train = train

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        img, target = self.data[index], int(self.targets[index])
        if self.train:
            img = F.pad(img, (4, 4, 4, 4))
            top, left = torch.randint(0, 9, (2,)).tolist()
            img = img[:, top : top + 32, left : left + 32]
            if torch.rand(1).item() < 0.5:
                img = img.flip(-1)
        return (img.float() / 255 - MEAN) / STD, target


class DeviceData:
    """The whole set as ready batches on the device: no augmentation, no copies while training."""

    def __init__(self, dataset, batch_size, device):
        images = (dataset.data.float() / 255 - MEAN) / STD
        self.images, self.targets = images.to(device), dataset.targets.to(device)
        self.batch_size = batch_size

    def __len__(self):
        return len(self.images) // self.batch_size

    def __iter__(self):
        yield from zip(
            self.images.split(self.batch_size)[: len(self)], self.targets.split(self.batch_size), strict=False
        )


parser = argparse.ArgumentParser(description="CIFAR-10 training")
parser.add_argument("--lr", default=0.1, type=float, help="learning rate")
parser.add_argument("--resume", "-r", action="store_true", help="resume from checkpoint")
parser.add_argument("--epochs", default=200, type=int)
parser.add_argument("--batch-size", default=128, type=int)
parser.add_argument("--width", default=64, type=int, help="channels of the first stage")
parser.add_argument("--workers", default=2, type=int)
parser.add_argument("--train-size", default=50000, type=int)
parser.add_argument("--test-size", default=10000, type=int)
parser.add_argument("--device-data", action="store_true", help="keep the data on the device, unaugmented")
parser.add_argument("--print-every", default=20, type=int)


def main():
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    best_acc = 0.0
    start_epoch = 0

    print("==> Preparing data..")
    trainset = SyntheticCIFAR(args.train_size, train=True, seed=1)
    testset = SyntheticCIFAR(args.test_size, train=False, seed=2)
    if args.device_data:
        trainloader = DeviceData(trainset, args.batch_size, device)
        testloader = DeviceData(testset, min(100, args.test_size), device)
    else:
        trainloader = DataLoader(trainset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
        testloader = DataLoader(testset, batch_size=100, shuffle=False, num_workers=args.workers)

    print("==> Building model..")
    net = ResNet18(args.width)
    net = net.to(device)
    if device == "cuda":
        net = torch.nn.DataParallel(net)

    if args.resume:
        print("==> Resuming from checkpoint..")
        checkpoint = torch.load("./checkpoint/ckpt.pth", map_location=device)
        net.load_state_dict(checkpoint["net"])
        best_acc = checkpoint["acc"]
        start_epoch = checkpoint["epoch"] + 1

    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    def train(epoch):
        print(f"\nEpoch: {epoch}")
        net.train()
        train_loss = 0.0
        correct = 0
        total = 0
        for batch_idx, (inputs, targets) in enumerate(trainloader):
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()

            train_loss += loss.item()
            _, predicted = outputs.max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
            if batch_idx % args.print_every == 0:
                print(
                    f"{batch_idx:4d}/{len(trainloader)} Loss: {train_loss / (batch_idx + 1):.3f} "
                    f"| Acc: {100.0 * correct / total:.3f}% ({correct}/{total})",
                    flush=True,
                )

    def test(epoch):
        nonlocal best_acc
        net.eval()
        test_loss = 0.0
        correct = 0
        total = 0
        with torch.no_grad():
            for inputs, targets in testloader:
                inputs, targets = inputs.to(device), targets.to(device)
                outputs = net(inputs)
                loss = criterion(outputs, targets)
                test_loss += loss.item()
                _, predicted = outputs.max(1)
                total += targets.size(0)
                correct += predicted.eq(targets).sum().item()
        acc = 100.0 * correct / total
        print(f"Test: Loss: {test_loss / len(testloader):.3f} | Acc: {acc:.3f}% ({correct}/{total})", flush=True)

        if acc > best_acc:
            print("Saving..")
            state = {"net": net.state_dict(), "acc": acc, "epoch": epoch}
            os.makedirs("checkpoint", exist_ok=True)
            torch.save(state, "./checkpoint/ckpt.pth")
            best_acc = acc

    for epoch in range(start_epoch, args.epochs):
        train(epoch)
        test(epoch)
        scheduler.step()


if __name__ == "__main__":
    main()
