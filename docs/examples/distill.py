"""Knowledge distillation: a ResNet teacher in evaluation mode, a MobileNetV3 student, mixup on the device, AdamW, accumulation.

Full size on a GPU:  python distill.py
Quick on a CPU:      python distill.py --epochs 1 --train-size 64 --batch-size 8 --image-size 64 --workers 0
"""

import argparse

import torch
from models import mobilenet_v3_large, resnet18
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def distillation_loss(student, teacher, temperature):
    log_p = F.log_softmax(student / temperature, dim=1)
    q = F.softmax(teacher / temperature, dim=1)
    return F.kl_div(log_p, q, reduction="batchmean") * temperature**2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=2, help="batches an optimizer step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--alpha", type=float, default=0.5, help="weight of the teacher's part of the loss")
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--image-size", type=int, default=160)
    parser.add_argument("--num-classes", type=int, default=100)
    parser.add_argument("--train-size", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    labels = torch.randint(0, args.num_classes, (args.train_size,))
    images = torch.randn(args.train_size, 3, args.image_size, args.image_size)
    images += labels.view(-1, 1, 1, 1) / args.num_classes
    loader = DataLoader(
        TensorDataset(images, labels),
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=device.type == "cuda",
        drop_last=True,
    )

    teacher = resnet18(args.num_classes).to(device).eval().requires_grad_(False)
    student = mobilenet_v3_large(args.num_classes).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=0.05)
    mix = torch.distributions.Beta(0.2, 0.2)

    for epoch in range(args.epochs):
        student.train()
        losses = []
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            share = mix.sample().item()
            order = torch.randperm(len(x), device=device)
            x = share * x + (1 - share) * x[order]
            with torch.no_grad():
                guide = teacher(x)
            logits = student(x)
            hard = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])
            loss = (1 - args.alpha) * hard + args.alpha * distillation_loss(logits, guide, args.temperature)
            (loss / args.accumulate).backward()
            if (i + 1) % args.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        print(f"epoch {epoch} loss {torch.stack(losses).mean().item():.4f}", flush=True)
        torch.save({"student": student.state_dict(), "optimizer": optimizer.state_dict()}, "distilled.pt")


if __name__ == "__main__":
    main()
