"""Super-resolution with pixel shuffle and an L1 loss, in a while loop; no norms."""

import sys
import time

import torch
import torch.nn as nn

gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
channels, batch, side = (64, 32, 64) if gpu else (16, 4, 20)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, 1, 1), nn.ReLU(inplace=True), nn.Conv2d(channels, channels, 3, 1, 1)
        )

    def forward(self, x):
        return x + self.body(x)


class Sharper(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, channels, 3, 1, 1)
        self.body = nn.Sequential(*[Residual() for _ in range(6)])
        self.tail = nn.Sequential(nn.Conv2d(channels, 12, 3, 1, 1), nn.PixelShuffle(2))

    def forward(self, x):
        x = self.head(x)
        return self.tail(x + self.body(x))


torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
model = Sharper().to(device)
large = torch.rand(8, batch, 3, 2 * side, 2 * side, device=device)
small = torch.stack([nn.functional.avg_pool2d(image, 2) for image in large])
if gpu:
    model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
criterion = nn.L1Loss()
limit = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
iteration, stop = 0, time.time() + 240
while iteration < limit and time.time() < stop:
    low, high = small[iteration % 8], large[iteration % 8]
    if gpu:
        low = low.contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16, enabled=gpu):
        sharp = model(low)
    loss = criterion(sharp.float(), high)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    iteration += 1
    if iteration % 100 == 0:
        print(f"iteration {iteration}: {loss.item():.4f}", flush=True)
