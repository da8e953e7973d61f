# EXPECT: iterator-each-step|workers-restart
"""Each step asks the loader for a new iterator, as scripts of reinforcement learning do."""

import sys

import torch
import torch.nn.functional as F
from torch import nn, utils

cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"


class Replay(utils.data.Dataset):
    def __init__(self):
        self.frames = torch.randint(0, 255, (512, 4, 42, 42), dtype=torch.uint8)

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, at):
        return self.frames[at], at % 6


replay = utils.data.DataLoader(Replay(), 32, shuffle=True, num_workers=2)
policy = nn.Sequential(
    nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(6)
).to(device)
policy(torch.zeros(1, 4, 42, 42, device=device))
adam = torch.optim.Adam(policy.parameters(), 1e-4)


def update():
    frames, actions = next(iter(replay))
    loss = F.cross_entropy(policy(frames.to(device).float() / 255), actions.to(device))
    adam.zero_grad()
    loss.backward()
    adam.step()
    return loss


if __name__ == "__main__":
    left = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
    while left > 0:
        loss = update()
        left -= 1
        if left % 50 == 0:
            print(left, loss.item(), flush=True)
