# EXPECT: input-starved|few-loader-workers|loader-blocks-cpu-training
"""An endless stream over a DataLoader without workers, whose data set works for each clip."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

use_gpu = torch.cuda.is_available()
target = torch.device("cuda" if use_gpu else "cpu")


class Clips(Dataset):
    def __init__(self, count=4096):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        noise = np.random.default_rng(number)
        clip = noise.standard_normal((1, 2048)).astype(np.float32)
        for _ in range(12):  # filters
            clip = np.convolve(clip[0], np.hanning(33), "same")[None].astype(np.float32)
        return torch.from_numpy(clip), number % 4


def forever(loader):
    while True:
        yield from loader


class Listener(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.a, self.b = nn.Conv1d(1, c, 16, 8), nn.Conv1d(c, 2 * c, 16, 8)
        self.end = nn.Linear(2 * c, 4)

    def forward(self, clip):
        return self.end(torch.relu(self.b(torch.relu(self.a(clip)))).mean(2))


def main(limit):
    listener = Listener().to(target)
    adam = torch.optim.Adam(listener.parameters())
    stream = forever(DataLoader(Clips(), batch_size=64 if use_gpu else 16, shuffle=True))
    for number in range(limit):
        clips, words = next(stream)
        loss = nn.functional.cross_entropy(listener(clips.to(target)), words.to(target))
        adam.zero_grad()
        loss.backward()
        adam.step()
        if number % 100 == 99:
            print(number, loss.item(), flush=True)


main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
