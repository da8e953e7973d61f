"""Optical flow by recurrent refinement: correlation, a convolutional GRU called twelve times a step, a loss behind a boolean mask,
fp16 autocast around a part of the net, GradScaler, clipping, OneCycleLR.

Full size on a GPU:  python flow.py
Quick on a CPU:      python flow.py --steps 40 --batch-size 1 --height 64 --width 64 --channels 16 --iters 3
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--height", type=int, default=368)
parser.add_argument("--width", type=int, default=496)
parser.add_argument("--channels", type=int, default=128)
parser.add_argument("--iters", type=int, default=12)
RADIUS = 3


class Encoder(nn.Module):
    def __init__(self, out, norm):
        super().__init__()
        c = out // 2
        self.net = nn.Sequential(
            nn.Conv2d(3, c, 7, 2, 3), norm(c), nn.ReLU(inplace=True),
            nn.Conv2d(c, c, 3, 2, 1), norm(c), nn.ReLU(inplace=True),
            nn.Conv2d(c, out, 3, 2, 1), norm(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)


class Update(nn.Module):
    def __init__(self, c):
        super().__init__()
        planes = (2 * RADIUS + 1) ** 2
        self.motion = nn.Sequential(nn.Conv2d(planes + 2, c, 3, 1, 1), nn.ReLU(inplace=True))
        self.z, self.r, self.q = (nn.Conv2d(3 * c, c, 3, 1, 1) for _ in range(3))
        self.head = nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.ReLU(inplace=True), nn.Conv2d(c, 2, 3, 1, 1))

    def forward(self, hidden, context, correlation, flow):
        x = torch.cat((context, self.motion(torch.cat((correlation, flow), 1))), 1)
        both = torch.cat((hidden, x), 1)
        z, r = torch.sigmoid(self.z(both)), torch.sigmoid(self.r(both))
        hidden = (1 - z) * hidden + z * torch.tanh(self.q(torch.cat((r * hidden, x), 1)))
        return hidden, self.head(hidden)


def look_up(first, second, flow):
    """Correlation of each place with those around where the flow leads."""
    _b, c, h, w = first.shape
    rows, columns = torch.meshgrid(
        torch.arange(h, device=flow.device), torch.arange(w, device=flow.device), indexing="ij"
    )
    x, y = columns + flow[:, 0], rows + flow[:, 1]
    found = []
    for dy in range(-RADIUS, RADIUS + 1):
        for dx in range(-RADIUS, RADIUS + 1):
            grid = torch.stack((2 * (x + dx) / (w - 1) - 1, 2 * (y + dy) / (h - 1) - 1), -1)
            found.append((first * F.grid_sample(second, grid, align_corners=True)).sum(1, keepdim=True))
    return torch.cat(found, 1) / c**0.5


class Flow(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.features, self.context = Encoder(c, nn.InstanceNorm2d), Encoder(2 * c, nn.BatchNorm2d)
        self.update = Update(c)

    def forward(self, a, b, iters):
        half = torch.autocast(a.device.type, torch.float16 if a.is_cuda else torch.bfloat16)
        with half:
            first, second = self.features(a), self.features(b)
            hidden, context = self.context(a).chunk(2, 1)
        first, second = first.float(), second.float()
        hidden, context = torch.tanh(hidden), torch.relu(context)
        flow = torch.zeros(len(a), 2, *first.shape[2:], device=a.device)
        found = []
        for _ in range(iters):
            flow = flow.detach()
            correlation = look_up(first, second, flow)
            with half:
                hidden, step = self.update(hidden, context, correlation, flow)
            flow = flow + step.float()
            found.append(8 * F.interpolate(flow, scale_factor=8, mode="bilinear", align_corners=True))
        return found


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.DataParallel(Flow(args.channels)) if device.type == "cuda" else Flow(args.channels)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=1e-4, eps=1e-8)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-4, args.steps + 100, pct_start=0.05)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    images = F.interpolate(torch.rand(32, 3, args.height // 8, args.width // 8), scale_factor=8, mode="bilinear")
    for step in range(args.steps):
        shift = torch.randint(-8, 9, (2,)).tolist()
        a = images[torch.randint(0, 32, (args.batch_size,))].to(device)
        b = torch.roll(a, shift, (2, 3))
        truth = torch.tensor([shift[1], shift[0]], dtype=torch.float32, device=device).view(1, 2, 1, 1)
        valid = torch.rand(args.batch_size, args.height, args.width, device=device) > 0.1
        optimizer.zero_grad()
        flows = model(2 * a - 1, 2 * b - 1, iters=args.iters)
        loss = 0.0
        for i, flow in enumerate(flows):
            loss = loss + 0.8 ** (len(flows) - i - 1) * (valid[:, None] * (flow - truth).abs()).mean()
        error = (flows[-1] - truth).norm(dim=1)[valid]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        schedule.step()
        scaler.update()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, error {error.mean().item():.2f}")


if __name__ == "__main__":
    main()
