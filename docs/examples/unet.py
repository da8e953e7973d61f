"""Segmentation with a UNet: bilinear upsampling, skip connections by concatenation, BCE and dice loss.

The images are synthetic discs on noise, so nothing is downloaded.

Full size on a GPU:  python unet.py
Quick on a CPU:      python unet.py --epochs 1 --train-size 32 --val-size 8 --batch-size 4 --image-size 64 --width 8
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class DoubleConv(nn.Module):
    """(convolution => BN => ReLU) * 2"""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(in_channels, out_channels))

    def forward(self, x):
        return self.maxpool_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1, x2):
        x1 = F.interpolate(x1, scale_factor=2, mode="bilinear", align_corners=True)
        x = torch.cat([x2, x1], dim=1)
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, n_channels=3, n_classes=1, width=64):
        super().__init__()
        self.inc = DoubleConv(n_channels, width)
        self.down1 = Down(width, width * 2)
        self.down2 = Down(width * 2, width * 4)
        self.down3 = Down(width * 4, width * 8)
        self.down4 = Down(width * 8, width * 8)
        self.up1 = Up(width * 16, width * 4)
        self.up2 = Up(width * 8, width * 2)
        self.up3 = Up(width * 4, width)
        self.up4 = Up(width * 2, width)
        self.outc = nn.Conv2d(width, n_classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        x5 = self.down4(x4)
        x = self.up1(x5, x4)
        x = self.up2(x, x3)
        x = self.up3(x, x2)
        x = self.up4(x, x1)
        return self.outc(x)


class Discs(Dataset):
    """A bright disc of random place and size on noise, and its mask."""

    def __init__(self, size, image_size, seed):
        self.size = size
        self.seed = seed
        axis = torch.arange(image_size, dtype=torch.float32)
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")
        self.image_size = image_size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        cy, cx, radius = (torch.rand(3, generator=generator) * self.image_size).tolist()
        mask = ((self.y - cy) ** 2 + (self.x - cx) ** 2 < (0.1 * self.image_size + 0.3 * radius) ** 2).float()
        image = torch.randn(3, self.image_size, self.image_size, generator=generator) * 0.5 + mask
        return {"image": image, "mask": mask.unsqueeze(0)}


def dice_loss(logits, target, eps=1e-6):
    probs = torch.sigmoid(logits)
    intersection = (probs * target).sum(dim=(1, 2, 3))
    union = probs.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
    return 1 - ((2 * intersection + eps) / (union + eps)).mean()


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    score = 0.0
    for batch in loader:
        image, mask = batch["image"].to(device), batch["mask"].to(device)
        prediction = (torch.sigmoid(net(image)) > 0.5).float()
        overlap = 2 * (prediction * mask).sum(dim=(1, 2, 3)) + 1e-6
        score += (overlap / (prediction.sum(dim=(1, 2, 3)) + mask.sum(dim=(1, 2, 3)) + 1e-6)).mean().item()
    net.train()
    return score / max(len(loader), 1)


def main():
    parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--train-size", type=int, default=5000)
    parser.add_argument("--val-size", type=int, default=320)
    parser.add_argument("--no-tf32", action="store_true", help="convolutions in fp32's own precision")
    args = parser.parse_args()

    if args.no_tf32:
        torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader_args = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(Discs(args.train_size, args.image_size, seed=0), shuffle=True, **loader_args)
    val_loader = DataLoader(Discs(args.val_size, args.image_size, seed=10**6), drop_last=True, **loader_args)

    net = UNet(width=args.width).to(device)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=args.learning_rate, weight_decay=1e-8, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=2)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(1, args.epochs + 1):
        net.train()
        epoch_loss = 0.0
        for batch in train_loader:
            images, true_masks = batch["image"].to(device), batch["mask"].to(device)

            masks_pred = net(images)
            loss = criterion(masks_pred, true_masks)
            loss += dice_loss(masks_pred, true_masks)

            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            epoch_loss += loss.item()

        val_score = evaluate(net, val_loader, device)
        scheduler.step(val_score)
        print(f"epoch {epoch}: loss {epoch_loss / len(train_loader):.4f}, dice {val_score:.4f}", flush=True)


if __name__ == "__main__":
    main()
