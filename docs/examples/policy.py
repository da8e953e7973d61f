"""Deep Q-learning: a small net asked one observation at a time while a game is played, and updated from a replay memory in between.

Full size on a GPU:  python policy.py
Quick on a CPU:      python policy.py --updates 40 --batch-size 8 --width 8
"""

import argparse
import copy
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--plays", type=int, default=4, help="moves between two updates")
SIDE = 42


class Catch:
    """A ball falls, a bat moves left or right: the observation is the last two frames."""

    def reset(self):
        self.ball, self.bat, self.last = [0, random.randrange(SIDE)], SIDE // 2, self._draw([0, 0], 0)
        return self._seen()

    def _draw(self, ball, bat):
        frame = torch.zeros(SIDE, SIDE)
        frame[ball[0], ball[1]] = 1.0
        frame[SIDE - 1, max(0, bat - 3) : bat + 4] = 0.5
        return frame

    def _seen(self):
        now = self._draw(self.ball, self.bat)
        both, self.last = torch.stack((self.last, now)), now
        return both

    def step(self, move):
        self.bat = min(SIDE - 1, max(0, self.bat + 3 * (move - 1)))
        self.ball[0] += 1
        over = self.ball[0] == SIDE - 1
        reward = float(abs(self.ball[1] - self.bat) <= 3) if over else 0.0
        return self._seen(), reward, over


class Values(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (
            nn.Conv2d(2, c, 8, 4),
            nn.Conv2d(c, 2 * c, 4, 2),
            nn.Conv2d(2 * c, 2 * c, 3),
        )
        self.fc1, self.fc2 = nn.Linear(2 * c, 16 * c), nn.Linear(16 * c, 3)

    def forward(self, x):
        x = F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = Values(args.width).to(device)
    target = copy.deepcopy(values)
    optimizer = torch.optim.Adam(values.parameters(), lr=1e-4)
    memory, game = deque(maxlen=20000), Catch()
    seen, won, played = game.reset(), 0.0, 0
    update = 0
    while update < args.updates:
        for _ in range(args.plays):
            if random.random() < max(0.05, 1 - played / 2000):
                move = random.randrange(3)
            else:
                with torch.no_grad():
                    move = values(seen[None].to(device)).argmax(1).item()
            after, reward, over = game.step(move)
            memory.append((seen, move, reward, after, over))
            seen = game.reset() if over else after
            won, played = won + reward, played + 1
        if len(memory) < 4 * args.batch_size:
            continue
        batch = random.sample(memory, args.batch_size)
        x, y = (torch.stack([item[i] for item in batch]).to(device) for i in (0, 3))
        moves, rewards, ends = (torch.tensor([float(item[i]) for item in batch], device=device) for i in (1, 2, 4))
        with torch.no_grad():
            best = rewards + 0.99 * (1 - ends) * target(y).max(1).values
        loss = F.smooth_l1_loss(values(x).gather(1, moves.long()[:, None])[:, 0], best)
        optimizer.zero_grad()
        loss.backward()
        for parameter in values.parameters():
            parameter.grad.clamp_(-1, 1)
        optimizer.step()
        update += 1
        if update % 500 == 0:
            target.load_state_dict(values.state_dict())
        if update % 20 == 0:
            print(f"update {update}: loss {loss.item():.4f}, won {won:.0f}")


if __name__ == "__main__":
    main()
